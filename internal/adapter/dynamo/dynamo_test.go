package dynamo_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/adapter/dynamo"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// prompt is 4 blocks of 2 tokens.
var prompt = []uint32{1, 2, 3, 4, 5, 6, 7, 8}

func tokensHashes(lora, salt string) []uint64 {
	return kvblock.AppendTokensHashes(nil, prompt, 2, kvblock.Seed(lora, salt), false, nil)
}

// world is an index with workers.
type world struct {
	*index.Index
	seq uint64
}

func (w *world) apply(worker, model string, events ...*kvcastv1.RouterEvent) {
	w.seq++
	w.ApplyEntry(&kvcastv1.Entry{Seq: w.seq, Worker: worker, Model: model, Events: events})
}

func (w *world) add(worker, model string, labels map[string]string) {
	w.apply(worker, model, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{
		Model: model, BlockSize: 2, Ranks: []uint32{0}, Labels: labels, Endpoint: worker + ":8000",
	}}})
}

// store stores the blocks of the prompt from an index up to another one, in a tier. Block n has the block hash 100 + n.
func (w *world) store(worker, model string, rank uint32, tier kvcastv1.Tier, from, to int, hashes []uint64) {
	s := &kvcastv1.Stored{BlockSize: 2, TokensHashes: hashes[from:to]}
	if from > 0 {
		s.ParentHash = proto.Uint64(uint64(99 + from))
	}
	for n := from; n < to; n++ {
		s.BlockHashes = append(s.BlockHashes, uint64(100+n))
	}
	w.apply(worker, model, &kvcastv1.RouterEvent{DpRank: &rank, Tier: tier, Event: &kvcastv1.RouterEvent_Stored{Stored: s}})
}

const (
	device   = kvcastv1.Tier_TIER_DEVICE
	host     = kvcastv1.Tier_TIER_HOST_PINNED
	disk     = kvcastv1.Tier_TIER_DISK
	external = kvcastv1.Tier_TIER_EXTERNAL
)

func newWorld() *world {
	w := &world{Index: index.New()}
	w.add("7", "m", nil) // the id is the name
	w.store("7", "m", 0, device, 0, 2, tokensHashes("", ""))
	w.store("7", "m", 0, host, 0, 3, tokensHashes("", ""))
	w.store("7", "m", 1, device, 0, 1, tokensHashes("", ""))
	w.add("pod-a", "m", map[string]string{"id": "18446744073709551615"})
	w.store("pod-a", "m", 0, disk, 0, 1, tokensHashes("", ""))
	w.store("pod-a", "m", 0, external, 1, 4, tokensHashes("", ""))
	w.add("pod-b", "m", map[string]string{"group": "blue"}) // the id is configured
	w.store("pod-b", "m", 0, device, 0, 4, tokensHashes("", ""))
	w.add("pod-c", "m", nil) // has no id
	w.store("pod-c", "m", 0, device, 0, 4, tokensHashes("", ""))
	w.add("9", "adapted", nil)
	w.store("9", "adapted", 0, device, 0, 3, tokensHashes("l", "s"))
	return w
}

func newHandler(x *index.Index, ready func() string) http.Handler {
	return dynamo.NewHandler(dynamo.Config{
		WorkerIDs: map[string]uint64{"pod-b": 11}, WorkerIDLabel: "id", GroupLabel: "group", Ready: ready,
		Authorize: func(next http.Handler) http.Handler { return next }, Logger: slog.New(slog.DiscardHandler),
		Registerer: prometheus.NewRegistry(),
	}, x)
}

func isReady() string { return "" }

// call sends a request with a body of JSON, and returns the status and the body.
func call(h http.Handler, method, path, body string) (int, string) {
	r := httptest.NewRequestWithContext(context.Background(), method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	text, _ := io.ReadAll(w.Result().Body)
	return w.Code, strings.TrimSpace(string(text))
}

// signed returns hashes as a list of JSON, in which Dynamo has signed numbers.
func signed(hashes []uint64) string {
	all := make([]int64, len(hashes))
	for i, h := range hashes {
		all[i] = int64(h)
	}
	text, _ := json.Marshal(all)
	return string(text)
}

func TestQueries(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	plain := `{"scores":{"7":{"0":4,"1":2}},"frequencies":[],"instances":{` +
		`"18446744073709551615":{"longest_matched":8,"gpu":0,"dp":{"0":0},"cpu":0,"disk":8},` +
		`"7":{"longest_matched":6,"gpu":4,"dp":{"0":4,"1":2},"cpu":6,"disk":6}}}`
	blue := `{"scores":{"11":{"0":8}},"frequencies":[],"instances":{"11":{"longest_matched":8,"gpu":8,"dp":{"0":8},"cpu":8,"disk":8}}}`
	none := `{"scores":{},"frequencies":[],"instances":{}}`
	for _, tt := range []struct {
		name, path, body, want string
	}{
		{"tokens", "/query", `{"token_ids":[1,2,3,4,5,6,7,8,9],"model_name":"m"}`, plain},
		{"tokens, null fields", "/query", `{"token_ids":[1,2,3,4,5,6,7,8],"model_name":"m","lora_name":null,"cache_salt":null,"tenant_id":"x","more":1}`, plain},
		{"another group", "/query", `{"token_ids":[1,2,3,4,5,6,7,8],"model_name":"m","routing_group":"blue"}`, blue},
		{"adapter and salt", "/query", `{"token_ids":[1,2,3,4,5,6,7,8],"model_name":"adapted","lora_name":"l","cache_salt":"s"}`,
			`{"scores":{"9":{"0":6}},"frequencies":[],"instances":{"9":{"longest_matched":6,"gpu":6,"dp":{"0":6},"cpu":6,"disk":6}}}`},
		{"no adapter", "/query", `{"token_ids":[1,2,3,4],"model_name":"adapted"}`, none},
		{"less than a block", "/query", `{"token_ids":[1],"model_name":"m"}`, none},
		{"no tokens", "/query", `{"token_ids":[],"model_name":"m"}`, none},
		{"hashes", "/query_by_hash", `{"block_hashes":` + signed(tokensHashes("", "")) + `,"model_name":"m"}`, plain},
		{"hashes of another group", "/query_by_hash", `{"block_hashes":` + signed(tokensHashes("", "")) + `,"model_name":"m","routing_group":"blue"}`, blue},
		{"no hashes", "/query_by_hash", `{"block_hashes":[],"model_name":"m"}`, none},
		{"tiers", "/query_tiered_by_hash", `{"block_hashes":` + signed(tokensHashes("", "")) + `,"model_name":"m","routing_group":"default"}`,
			`{"block_size":2,"tiered":{"device":{"scores":[[{"worker_id":7,"dp_rank":0},2],[{"worker_id":7,"dp_rank":1},1]],"frequencies":[]},` +
				`"lower_tier":[["host_pinned",{"hits":[[{"worker_id":7,"dp_rank":0},1]]}],["disk",{"hits":[[{"worker_id":18446744073709551615,"dp_rank":0},1]]}],` +
				`["external",{"hits":[[{"worker_id":18446744073709551615,"dp_rank":0},3]]}]]}}`},
		{"tiers of unknown blocks", "/query_tiered_by_hash", `{"block_hashes":[-1],"model_name":"m"}`,
			`{"block_size":2,"tiered":{"device":{"scores":[],"frequencies":[]},"lower_tier":[]}}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, got := call(h, http.MethodPost, tt.path, tt.body)
			if diff := cmp.Diff(tt.want, got); status != http.StatusOK || diff != "" {
				t.Errorf("status %d (-want +got):\n%s", status, diff)
			}
		})
	}
}

// TestSharedIDsAreLogged has two workers with one id, of different ranks, and asks for them several times.
func TestSharedIDsAreLogged(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.add("pod-d", "m", map[string]string{"id": "7"})
	w.store("pod-d", "m", 2, device, 0, 1, tokensHashes("", ""))
	var log bytes.Buffer
	h := dynamo.NewHandler(dynamo.Config{
		WorkerIDLabel: "id", Ready: isReady, Authorize: func(next http.Handler) http.Handler { return next },
		Logger: slog.New(slog.NewTextHandler(&log, nil)), Registerer: prometheus.NewRegistry(),
	}, w.Index)
	for range 3 {
		if status, got := call(h, http.MethodPost, "/query", `{"token_ids":[1,2,3,4],"model_name":"m"}`); status != http.StatusOK || !strings.Contains(got, `"7":{"0":4,"1":2,"2":2}`) {
			t.Errorf("got status %d and %s", status, got)
		}
	}
	if n := strings.Count(log.String(), "two workers have one id"); n != 1 || !strings.Contains(log.String(), "id=7 worker=7 other=pod-d") {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
}

func TestErrorsOfQueries(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	many := `{"token_ids":[` + strings.Repeat("0,", 4<<20) + `0],"model_name":"m"}`
	manyHashes := `{"block_hashes":[` + strings.Repeat("0,", 4<<20) + `0],"model_name":"m"}`
	for _, tt := range []struct {
		name, path, body string
		status           int
		says             string
	}{
		{"unknown model", "/query", `{"token_ids":[1],"model_name":"x"}`, 404, "no indexer for model=x routing_group=default"},
		{"empty model", "/query", `{"token_ids":[1,2],"model_name":""}`, 404, "no indexer for model= routing_group=default"},
		{"empty model with hashes", "/query_tiered_by_hash", `{"block_hashes":` + signed(tokensHashes("", "")) + `,"model_name":""}`, 404, "no indexer for model= "},
		{"unknown group", "/query_by_hash", `{"block_hashes":[1],"model_name":"m","routing_group":"red"}`, 404, "no indexer for model=m routing_group=red"},
		{"salt with hashes", "/query_by_hash", `{"block_hashes":[1],"model_name":"m","cache_salt":""}`, 400, "cache_salt is not allowed with block_hashes"},
		{"no JSON", "/query", `{"token_ids":[1`, 400, "the body is not JSON"},
		{"a list", "/query", `[]`, 422, "the body is a array: want an object"},
		{"no model", "/query", `{"token_ids":[1]}`, 422, "field model_name is missing: want a string"},
		{"no tokens", "/query", `{"model_name":"m"}`, 422, "field token_ids is missing: want a list of numbers from 0 to 4294967295"},
		{"null tokens", "/query", `{"token_ids":null,"model_name":"m"}`, 422, "field token_ids is missing"},
		{"a token too large", "/query", `{"token_ids":[4294967296],"model_name":"m"}`, 422, "field token_ids is not allowed to be a number 4294967296: want a list of numbers from 0 to 4294967295"},
		{"a negative token", "/query", `{"token_ids":[-1],"model_name":"m"}`, 422, "want a list of numbers from 0"},
		{"a hash too large", "/query_tiered_by_hash", `{"block_hashes":[9223372036854775808],"model_name":"m"}`, 422, "want a list of signed 64-bit numbers"},
		{"a number for the model", "/query", `{"token_ids":[1],"model_name":1}`, 422, "field model_name is not allowed to be a number: want a string"},
		{"more than 8 MiB", "/query", many, 413, "more than 8388608 bytes"},
		{"more than 8 MiB of hashes", "/query_by_hash", manyHashes, 413, "more than 8388608 bytes"},
		{"more elements than the limit", "/query", `{"token_ids":[` + strings.Repeat("0,", 1<<20) + `0],"model_name":"m"}`, 413, "the body has 1048577 elements, and the limit is 1048576"},
		{"registration", "/register", `{}`, 404, "kvcast reads the engines of its own configuration"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, got := call(h, http.MethodPost, tt.path, tt.body)
			var body struct{ Error string }
			if err := json.Unmarshal([]byte(got), &body); err != nil || status != tt.status || !strings.Contains(body.Error, tt.says) {
				t.Errorf("got status %d and %.200s, want %d and an error that says %q", status, got, tt.status, tt.says)
			}
		})
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/query", strings.NewReader("token_ids=1"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, r); w.Code != http.StatusUnsupportedMediaType {
		t.Errorf("another content type: got status %d", w.Code)
	}
}

// TestSlowBodiesDelayNobody sends the beginnings of more bodies than requests are answered at a time.
func TestSlowBodiesDelayNobody(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	var ended sync.WaitGroup
	defer ended.Wait()
	for range 100 {
		body, end := io.Pipe()
		defer func() { _ = end.Close() }()
		ended.Go(func() {
			r := httptest.NewRequestWithContext(context.Background(), http.MethodPost, "/query", body)
			h.ServeHTTP(httptest.NewRecorder(), r)
		})
		if _, err := io.WriteString(end, "{"); err != nil { // it returns when that has been read
			t.Fatal(err)
		}
	}
	if status, got := call(h, http.MethodPost, "/query", `{"token_ids":[1,2],"model_name":"m"}`); status != http.StatusOK {
		t.Errorf("got status %d and %s, want %d", status, got, http.StatusOK)
	}
}

// sendBodies begins to send bodies of a size from addresses until the test ends, and returns how many were refused with 503. Header
// Content-Length has their length, or -1 for none.
func sendBodies(t *testing.T, h http.Handler, bodies, size, length int, address func(i int) string) (refused int) {
	var ended sync.WaitGroup
	t.Cleanup(ended.Wait)
	for i := range bodies {
		body, end := io.Pipe()
		t.Cleanup(func() { _ = end.Close() })
		status := make(chan int, 1)
		ended.Go(func() {
			w := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(context.Background(), http.MethodPost, "/query", body)
			r.RemoteAddr, r.ContentLength = address(i), int64(length)
			h.ServeHTTP(w, r)
			_ = body.Close()
			status <- w.Code
		})
		if _, err := end.Write(make([]byte, size-1)); err != nil {
			if refused++; <-status != http.StatusServiceUnavailable {
				t.Error("refused with another status than 503")
			}
		}
	}
	return refused
}

// TestBodiesThatAreReceivedAreLimited has so many large bodies of two addresses in progress that their memory is used up.
func TestBodiesThatAreReceivedAreLimited(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	t.Run("use all memory", func(t *testing.T) {
		// 8 MiB each, of 128 MiB
		if n := sendBodies(t, h, 20, 8<<20, -1, func(i int) string { return fmt.Sprintf("192.0.2.%d:1", 10+i%2) }); n != 4 {
			t.Errorf("%d bodies were refused, want 4", n)
		}
		if status, got := call(h, http.MethodPost, "/query", `{"token_ids":[1,2],"model_name":"m"}`); status != http.StatusServiceUnavailable || !strings.Contains(got, "take all memory") {
			t.Errorf("got status %d and %s, want 503 because of the memory", status, got)
		}
		if status, got := call(h, http.MethodGet, "/workers", ""); status != http.StatusOK {
			t.Errorf("a request without a body: got status %d and %s", status, got)
		}
	})
	if status, got := call(h, http.MethodPost, "/query", `{"token_ids":[1,2],"model_name":"m"}`); status != http.StatusOK {
		t.Errorf("afterwards: got status %d and %s, want %d", status, got, http.StatusOK)
	}
}

// TestBodiesOfAnAddressAreLimited has large bodies of one address in progress, which use half of the memory.
func TestBodiesOfAnAddressAreLimited(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	if n := sendBodies(t, h, 10, 8<<20, -1, func(i int) string { return fmt.Sprintf("[2001:db8::%d]:1", i) }); n != 2 { // in one /64
		t.Errorf("%d bodies were refused, want 2", n)
	}
	if status, got := call(h, http.MethodPost, "/query", `{"token_ids":[1,2],"model_name":"m"}`); status != http.StatusOK {
		t.Errorf("another address: got status %d and %s, want %d", status, got, http.StatusOK)
	}
}

// TestBodiesOfKnownLengthTakeNoMore has bodies with a Content-Length, of which 12 fit into the 64 MiB of an address.
func TestBodiesOfKnownLengthTakeNoMore(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	h := dynamo.NewHandler(dynamo.Config{Ready: isReady, Authorize: func(next http.Handler) http.Handler { return next }, Logger: slog.New(slog.DiscardHandler), Registerer: registry}, newWorld().Index)
	if n := sendBodies(t, h, 14, 5<<20, 5<<20, func(int) string { return "192.0.2.9:1" }); n != 2 {
		t.Errorf("%d bodies were refused, want 2", n)
	}
	want := `
# HELP kvcast_budget_refused_total Requests for a resource that were refused because its bound was reached, by resource.
# TYPE kvcast_budget_refused_total counter
kvcast_budget_refused_total{resource="dynamo_answer_bytes"} 0
kvcast_budget_refused_total{resource="dynamo_request_bytes"} 2
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "kvcast_budget_refused_total"); err != nil {
		t.Error(err)
	}
}

// unreadAnswer is an answer whose client reads nothing until read is closed.
type unreadAnswer struct {
	*httptest.ResponseRecorder
	began chan<- struct{} // receives a value when something is written
	read  <-chan struct{}
}

func (a unreadAnswer) Write(b []byte) (int, error) {
	a.began <- struct{}{}
	<-a.read
	return a.ResponseRecorder.Write(b)
}

// TestAnswersThatAreNotReadDelayNobody has an address that reads no answer, of more requests and dumps than are answered at a time.
func TestAnswersThatAreNotReadDelayNobody(t *testing.T) {
	t.Parallel()
	h := newHandler(newWorld().Index, isReady)
	const requests = 40
	began, read := make(chan struct{}, 100*requests), make(chan struct{})
	var ended sync.WaitGroup
	defer ended.Wait()
	defer close(read)
	send := func(method, path string) {
		ended.Go(func() {
			r := httptest.NewRequestWithContext(context.Background(), method, path, http.NoBody)
			r.RemoteAddr = "192.0.2.9:1"
			h.ServeHTTP(unreadAnswer{httptest.NewRecorder(), began, read}, r)
		})
	}
	send(http.MethodGet, "/dump")
	<-began
	for range requests {
		send(http.MethodGet, "/workers")
	}
	for range requests { // all are being sent
		<-began
	}
	for _, path := range []string{"/workers", "/dump"} {
		if status, got := call(h, http.MethodGet, path, ""); status != http.StatusOK {
			t.Errorf("%s of another address: got status %d and %s", path, status, got)
		}
	}
}

// addressListener accepts connections of addresses.
type addressListener struct {
	net.Listener
	addresses []string
}

type addressConn struct {
	net.Conn
	remote net.Addr
}

func (c addressConn) RemoteAddr() net.Addr { return c.remote }
func (c addressConn) Close() error         { return nil }

func (l *addressListener) Accept() (net.Conn, error) {
	if len(l.addresses) == 0 {
		return nil, net.ErrClosed
	}
	remote := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(l.addresses[0]), 1))
	l.addresses = l.addresses[1:]
	return addressConn{remote: remote}, nil
}

// TestConnectionsOfAnAddressAreLimited has connections of one address, and then of others.
func TestConnectionsOfAnAddressAreLimited(t *testing.T) {
	t.Parallel()
	from := &addressListener{}
	l := dynamo.LimitConnections(from, prometheus.NewRegistry())
	accepted := func(n int, address string) (all []net.Conn) {
		from.addresses = slices.Repeat([]string{address}, n)
		for {
			c, err := l.Accept()
			if err != nil {
				return all
			}
			all = append(all, c)
		}
	}
	first := accepted(200, "192.0.2.1")
	if len(first) != 128 {
		t.Errorf("%d connections of one address, want 128", len(first))
	}
	_ = first[0].Close()
	_ = first[0].Close()
	if n := len(accepted(2, "192.0.2.1")); n != 1 {
		t.Errorf("%d connections after one was closed, want 1", n)
	}
	for address := range 7 { // all 1024
		if n := len(accepted(129, fmt.Sprintf("198.51.100.%d", address))); n != 128 {
			t.Errorf("%d connections of another address, want 128", n)
		}
	}
	if n := len(accepted(2, "192.0.2.3")); n != 2 { // in place of others
		t.Errorf("%d connections of an address with none, want 2", n)
	}
}

func TestWorkersAndHealth(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.apply("9", "adapted", &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_JOINED_LATE}}})
	h := newHandler(w.Index, isReady)
	ranks := func(worker string, ranks ...int) string {
		var endpoints, listeners []string
		for _, r := range ranks {
			endpoints = append(endpoints, fmt.Sprintf(`"%d":"%s:8000"`, r, worker))
			listeners = append(listeners, fmt.Sprintf(`"%d":{"endpoint":"%s:8000","status":"active"}`, r, worker))
		}
		return `"endpoints":{` + strings.Join(endpoints, ",") + `},"listeners":{` + strings.Join(listeners, ",") + "}}"
	}
	seven := `{"instance_id":7,"source":"zmq","status":"active","model_name":"m","routing_group":"default","block_size":2,` + ranks("7", 0, 1)
	a := `{"instance_id":18446744073709551615,"source":"zmq","status":"active","model_name":"m","routing_group":"default","block_size":2,` + ranks("pod-a", 0)
	b := `{"instance_id":11,"source":"zmq","status":"active","model_name":"m","routing_group":"blue","block_size":2,` + ranks("pod-b", 0)
	nine := `{"instance_id":9,"source":"zmq","status":"pending","model_name":"adapted","routing_group":"default","block_size":2,` +
		`"endpoints":{"0":"9:8000"},"listeners":{"0":{"endpoint":"9:8000","status":"pending","last_error":"DEGRADED_REASON_JOINED_LATE"}}}`
	for path, want := range map[string]string{
		"/workers": "[" + seven + "," + nine + "," + a + "," + b + "]",
		"/workers?model_name=m&routing_group=blue":    "[" + b + "]",
		"/workers?routing_group=default&model_name=m": "[" + seven + "," + a + "]",
		"/workers?model_name=none":                    "[]",
		"/health":                                     "",
	} {
		if status, got := call(h, http.MethodGet, path, ""); status != http.StatusOK || got != want {
			t.Errorf("%s: got status %d (-want +got):\n%s", path, status, cmp.Diff(want, got))
		}
	}
	starting := newHandler(w.Index, func() string { return "starting" })
	for _, path := range []string{"/workers", "/dump", "/health"} {
		if status, got := call(starting, http.MethodGet, path, ""); status != http.StatusServiceUnavailable || !strings.Contains(got, "starting") {
			t.Errorf("%s before the start: got status %d and %q", path, status, got)
		}
	}
}

// TestDumpHasAllBlocks applies the events of a dump to the sets of blocks of each worker, rank and tier.
func TestDumpHasAllBlocks(t *testing.T) {
	t.Parallel()
	status, got := call(newHandler(newWorld().Index, isReady), http.MethodGet, "/dump", "")
	if status != http.StatusOK {
		t.Fatalf("got status %d", status)
	}
	var parts map[string]struct {
		BlockSize uint32 `json:"block_size"`
		Events    []struct {
			WorkerID    uint64 `json:"worker_id"`
			StorageTier string `json:"storage_tier"`
			Event       struct {
				EventID uint64 `json:"event_id"`
				DPRank  uint32 `json:"dp_rank"`
				Data    struct {
					Stored struct {
						ParentHash *uint64 `json:"parent_hash"`
						Blocks     []struct {
							BlockHash  uint64 `json:"block_hash"`
							TokensHash uint64 `json:"tokens_hash"`
						}
					}
				}
			}
		}
	}
	if err := json.NewDecoder(bytes.NewReader([]byte(got))).Decode(&parts); err != nil {
		t.Fatalf("%v: %s", err, got)
	}
	held := make(map[string]string)
	for key, part := range parts {
		if part.BlockSize != 2 {
			t.Errorf("%s: got block size %d", key, part.BlockSize)
		}
		for _, e := range part.Events {
			parent := "none"
			if p := e.Event.Data.Stored.ParentHash; p != nil {
				parent = fmt.Sprint(*p)
			}
			for _, b := range e.Event.Data.Stored.Blocks {
				held[fmt.Sprintf("%s %d/%d %s", key, e.WorkerID, e.Event.DPRank, e.StorageTier)] += fmt.Sprintf("%d,%d,%d ", b.BlockHash, b.TokensHash, len(parent))
				parent = fmt.Sprint(b.BlockHash)
			}
		}
	}
	blocks := func(from, to int, hashes []uint64) (all string) {
		for n := from; n < to; n++ {
			parent := "none"
			if n > 0 {
				parent = fmt.Sprint(99 + n)
			}
			all += fmt.Sprintf("%d,%d,%d ", 100+n, hashes[n], len(parent))
		}
		return all
	}
	plain := tokensHashes("", "")
	want := map[string]string{
		"m:default 7/0 device":                      blocks(0, 2, plain),
		"m:default 7/0 host_pinned":                 blocks(0, 3, plain),
		"m:default 7/1 device":                      blocks(0, 1, plain),
		"m:default 18446744073709551615/0 disk":     blocks(0, 1, plain),
		"m:default 18446744073709551615/0 external": blocks(1, 4, plain),
		"m:blue 11/0 device":                        blocks(0, 4, plain),
		"adapted:default 9/0 device":                blocks(0, 3, tokensHashes("l", "s")),
	}
	if diff := cmp.Diff(want, held); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
}
