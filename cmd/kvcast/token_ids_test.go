package main_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// traffic keeps what connections receive.
type traffic struct {
	mu       sync.Mutex
	received bytes.Buffer // guarded by mu
}

// recordedConn is a connection of traffic.
type recordedConn struct {
	net.Conn
	traffic *traffic
}

func (c recordedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.traffic.mu.Lock()
	defer c.traffic.mu.Unlock()
	_, _ = c.traffic.received.Write(p[:n])
	return n, err
}

func (r *traffic) dial(t *testing.T, addr string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			return recordedConn{c, r}, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// containsTokens reports whether text has two neighbours of tokens in a binary form, or a token in decimal digits.
func containsTokens(text []byte, tokens []uint32) bool {
	for i, a := range tokens[:len(tokens)-1] {
		b := tokens[i+1]
		for _, form := range [][]byte{
			binary.AppendUvarint(binary.AppendUvarint(nil, uint64(a)), uint64(b)),
			binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, a), b),
			binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, a), b),
			binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(a)), uint64(b)),
			binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(a)), uint64(b)),
			binary.BigEndian.AppendUint32(append(binary.BigEndian.AppendUint32([]byte{0xce}, a), 0xce), b), // MessagePack
			[]byte(strconv.FormatUint(uint64(a), 10)),
		} {
			if bytes.Contains(text, form) {
				return true
			}
		}
	}
	return false
}

// TestTokenIDsDoNotLeave searches what leaves a server, in answers, metrics, log and journal, for the token ids that have come
// in. With --emit-token-ids, it finds them.
func TestTokenIDsDoNotLeave(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, emitted := range []bool{false, true} {
		t.Run("emitted="+strconv.FormatBool(emitted), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := publisherOf(t, simulator.SocketConfig{})
			s := serve(t, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint(), "--log-level", "debug",
				"--journal", "file:"+dir, "--emit-token-ids="+strconv.FormatBool(emitted), "--egress-dynamo-listen", "127.0.0.1:0")
			var tokens []uint32
			for i := range uint32(64) {
				tokens = append(tokens, 1_500_000_001+i*7_919_003)
			}
			publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3, 4}, Tokens: tokens, BlockSize: 16},
				wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{4}})
			for _, event := range []wire.Event{ // rejected, and logged
				{Kind: wire.KindStored, BlockHashes: []uint64{5, 6}, Tokens: tokens[:16], BlockSize: 16},
				{Kind: wire.KindStored, BlockHashes: []uint64{7}, Tokens: tokens, BlockSize: 1 << 30},
			} {
				publish(t, p, event)
			}
			s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 3`)
			answers := new(traffic)
			askAll(t, answers.dial(t, s.Address()))
			var metrics string
			for _, path := range []string{"/metrics", "/readyz", "/debug/pprof/goroutine?debug=2", "/debug/pprof/heap"} {
				text, err := s.Get(harness.Context(t), path)
				if err != nil {
					t.Fatal(err)
				}
				metrics += text
			}
			pages := askConsole(t, s)
			dynamo := askDynamo(t, s)
			if err := s.Stop(); err != nil {
				t.Fatal(err)
			}
			answers.mu.Lock()
			defer answers.mu.Unlock()
			for name, text := range map[string][]byte{
				"answers": answers.received.Bytes(), "admin port": []byte(metrics), "console": pages, "Dynamo's port": dynamo,
				"log": []byte(strings.Join(s.Log(), "\n")), "journal": contents(t, dir),
			} {
				if len(text) == 0 {
					t.Errorf("%s: nothing to search", name)
				}
				want := emitted && (name == "answers" || name == "journal")
				if got := containsTokens(text, tokens); got != want {
					t.Errorf("%s: token ids found: %t, want %t", name, got, want)
				}
			}
		})
	}
}

// askAll makes each call of a router.
func askAll(t *testing.T, conn *grpc.ClientConn) {
	t.Helper()
	ctx, router := harness.Context(t), kvcastv1.NewRouterEventServiceClient(conn)
	earliest := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	subscription, err := router.Subscribe(ctx, earliest)
	if err != nil {
		t.Fatal(err)
	}
	for stored := false; !stored; {
		m, err := subscription.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetEntries() {
			for _, ev := range e.GetEvents() {
				stored = stored || ev.GetStored() != nil
			}
		}
	}
	snapshot, err := router.Snapshot(ctx, &kvcastv1.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = snapshot.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	_, statusErr := router.GetStatus(ctx, &kvcastv1.GetStatusRequest{})
	_, workersErr := router.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	_, lookupErr := router.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1, 2, 3}})
	_, subscribersErr := router.ListSubscribers(ctx, &kvcastv1.ListSubscribersRequest{})
	_, matchErr := router.MatchPrefix(ctx, &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{{BlockHashes: []uint64{1, 2, 3}}}})
	inspection := kvcastv1.NewInspectionServiceClient(conn)
	_, entriesErr := inspection.ListEntries(ctx, &kvcastv1.ListEntriesRequest{Limit: 10})
	_, incidentsErr := inspection.ListIncidents(ctx, &kvcastv1.ListIncidentsRequest{})
	_, historyErr := inspection.GetHistory(ctx, &kvcastv1.GetHistoryRequest{})
	_, sharedErr := inspection.ListSharedPrefixes(ctx, &kvcastv1.ListSharedPrefixesRequest{})
	_, chainErr := inspection.GetChain(ctx, &kvcastv1.GetChainRequest{Worker: "w", BlockHash: 3})
	for _, err := range []error{statusErr, workersErr, lookupErr, subscribersErr, matchErr, entriesErr, incidentsErr, historyErr, sharedErr, chainErr} {
		if err != nil {
			t.Error(err)
		}
	}
	replay, err := router.Replay(ctx, &kvcastv1.ReplayRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = replay.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

// httpAnswer sends an HTTP request, and returns the body of the answer, whose status must be 200.
func httpAnswer(t *testing.T, method, url, body string) []byte {
	t.Helper()
	r, err := http.NewRequestWithContext(harness.Context(t), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: got %s %s, error %v", method, url, response.Status, answer, err)
	}
	return answer
}

// askConsole makes the calls of the console's page.
func askConsole(t *testing.T, s *process) (all []byte) {
	t.Helper()
	admin, err := s.Admin()
	if err != nil {
		t.Fatal(err)
	}
	for method, body := range map[string]string{
		"RouterEventService/ListWorkers": "{}", "RouterEventService/MatchPrefix": `{"prompts":[{"block_hashes":["1","2"]}]}`,
		"InspectionService/ListEntries": `{"limit":10}`, "InspectionService/GetChain": `{"worker":"w","block_hash":"3"}`,
		"InspectionService/ListSharedPrefixes": "{}", "InspectionService/ListIncidents": "{}",
	} {
		all = append(all, httpAnswer(t, http.MethodPost, "http://"+admin+"/console/rpc/kvcast.v1."+method, body)...)
	}
	return all
}

var dynamoLine = regexp.MustCompile(`msg=serving dynamo=(\S+)`)

// askDynamo makes the calls of Dynamo's routers.
func askDynamo(t *testing.T, s *process) (all []byte) {
	t.Helper()
	address, err := s.Logged(dynamoLine)
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, httpAnswer(t, http.MethodGet, "http://"+address+"/dump", "")...)
	return append(all, httpAnswer(t, http.MethodGet, "http://"+address+"/workers", "")...)
}

// contents returns the contents of all files below a directory.
func contents(t *testing.T, dir string) (all []byte) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		all = append(all, text...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
