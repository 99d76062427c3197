package routers_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// dynamoRequest and dynamoAnswer are those of the program with Dynamo's crate.
type dynamoRequest struct {
	Tokens    []uint32        `json:"tokens"`
	BlockSize int             `json:"block_size"`
	Tiered    json.RawMessage `json:"tiered,omitempty"`
	Dump      json.RawMessage `json:"dump,omitempty"`
}

type dynamoAnswer struct {
	Hashes     []int64        `json:"hashes"`
	Device     map[string]int `json:"device"`
	HostPinned map[string]int `json:"host_pinned"`
	Dump       map[string]int `json:"dump"`
	Rejected   int            `json:"rejected"`
}

// TestDynamosCrateReadsTheAnswers hashes prompts with Dynamo's crate, asks kvcast for them, and reads the answers and a dump with the
// crate's types. The crate's own index, which has applied the dump, finds the same prefixes, if the engines have the same hashes
// for the same blocks: that index knows a block by the hash of the first engine that has it, and rejects blocks that follow it at
// an engine with another hash. kvcast's answers do not depend on it.
func TestDynamosCrateReadsTheAnswers(t *testing.T) {
	testclass.Peers(t)
	need(t, dynamo)
	for name, hashes := range map[string]uint64{"same hashes": 1, "other hashes": 2} {
		t.Run(name, func(t *testing.T) { testDynamo(t, hashes) })
	}
}

func testDynamo(t *testing.T, hashes uint64) {
	t.Helper()
	engines := []*engine{newEngine(t, 1), newEngine(t, 2)}
	engines[1].hashes = hashes
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	text := "egress:\n  dynamo:\n    listen: 127.0.0.1:0\n    worker_ids: [{worker: e1, id: 18446744073709551615}, {worker: e2, id: 2}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--config", file}
	for _, e := range engines {
		args = append(args, "--worker", fmt.Sprintf("name=%s,model=m,connect=%s,replay=%s", e.name, e.sockets.Endpoint, e.sockets.Replay))
		for range 60 {
			e.step()
		}
	}
	// Blocks in a further tier: the first two of a prompt in the device, the other two in the host's memory.
	prompt := []uint32{50, 51, 52, 53, 54, 55, 56, 57}
	hash := []uint64{1 << 50, 2 << 50, 3 << 50, 4 << 50}
	if _, err := engines[0].publisher.Publish(
		wire.Event{Kind: wire.KindStored, BlockHashes: hash[:2], Tokens: prompt[:4], BlockSize: blockSize, Medium: "GPU"},
		wire.Event{Kind: wire.KindStored, BlockHashes: hash[2:], HasParent: true, Parent: hash[1], Tokens: prompt[4:], BlockSize: blockSize, Medium: "CPU"},
	); err != nil {
		t.Fatal(err)
	}
	engines[1].flush()
	p, err := harness.StartProcess(harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	port, err := p.Logged(regexp.MustCompile(`msg=serving dynamo=(\S+)`))
	if err != nil {
		t.Fatal(err)
	}
	program := startConsumer(t, dynamo)
	dump := request(t, http.MethodGet, "http://"+port+"/dump", nil)
	ask := func(tokens []uint32) (answer dynamoAnswer) {
		t.Helper()
		program.ask(dynamoRequest{Tokens: tokens, BlockSize: blockSize}, &answer)
		body, err := json.Marshal(map[string]any{"block_hashes": answer.Hashes, "model_name": "m", "routing_group": "default"})
		if err != nil {
			t.Fatal(err)
		}
		tiered := request(t, http.MethodPost, "http://"+port+"/query_tiered_by_hash", body)
		program.ask(dynamoRequest{Tokens: tokens, BlockSize: blockSize, Tiered: tiered, Dump: dump}, &answer)
		return answer
	}
	found, rejected := 0, 0
	for _, tokens := range prompts() {
		answer, want := ask(tokens), make(map[string]int)
		for _, e := range engines {
			path, n := uint64(0), 0
			for i := 0; i < len(tokens); i += blockSize {
				if path = path*4 + uint64(tokens[i]); !e.held[path] {
					break
				}
				n++
			}
			if n > 0 {
				want[map[string]string{"e1": "18446744073709551615/0", "e2": "2/0"}[e.name]] = n
				found++
			}
		}
		isDumpWrong := hashes == 1 && fmt.Sprint(answer.Dump) != fmt.Sprint(want)
		if fmt.Sprint(answer.Device) != fmt.Sprint(want) || isDumpWrong || len(answer.HostPinned) > 0 {
			t.Errorf("%v: got %v, by the dump %v, want %v", tokens, answer.Device, answer.Dump, want)
		}
		rejected += answer.Rejected
	}
	if found == 0 || (rejected > 0) != (hashes != 1) {
		t.Errorf("%d prefixes are found, and %d events of dumps are rejected by the crate's index", found, rejected)
	}
	answer := ask(prompt)
	if fmt.Sprint(answer.Device, answer.HostPinned) != "map[18446744073709551615/0:2] map[18446744073709551615/0:2]" {
		t.Errorf("a prompt in two tiers: got %v in the device, and %v after it in the host's memory", answer.Device, answer.HostPinned)
	}
}

// request returns the body of an answer.
func request(t *testing.T, method, url string, body []byte) []byte {
	t.Helper()
	req, err := http.NewRequestWithContext(harness.Context(t), method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d, error %v: %s", url, resp.StatusCode, err, text)
	}
	return text
}

// dynamosIndexer is Dynamo's standalone indexer, which reads publishers of kvcast.
type dynamosIndexer struct {
	t       *testing.T
	address string
}

// startDynamosIndexer starts an indexer that reads a publisher for each engine, as worker n for the engine n.
func startDynamosIndexer(t *testing.T, publishers map[uint64][2]int) *dynamosIndexer {
	t.Helper()
	port := harness.FreePort(t)
	startConsumer(t, dynamo, strconv.Itoa(port))
	d := &dynamosIndexer{t, fmt.Sprintf("http://127.0.0.1:%d", port)}
	harness.WaitFor(t, func() bool { return d.call(http.MethodGet, "/health", nil, nil) == http.StatusOK })
	for number, at := range publishers {
		body := map[string]any{
			"instance_id": number, "model_name": "m", "block_size": blockSize,
			"endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", at[0]), "replay_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", at[1]),
		}
		if status := d.call(http.MethodPost, "/register", body, nil); status != http.StatusCreated {
			t.Fatalf("register an engine: status %d", status)
		}
	}
	return d
}

// call sends a request, and returns the status; 0 if there is no answer.
func (d *dynamosIndexer) call(method, path string, body, answer any) int {
	d.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		d.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(harness.Context(d.t), method, d.address+path, bytes.NewReader(text))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	defer func() { _ = resp.Body.Close() }()
	if answer != nil {
		if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
			d.t.Fatalf("%s: %v", path, err)
		}
	}
	return resp.StatusCode
}

// hashes returns the blocks that the indexer holds, by worker.
func (d *dynamosIndexer) hashes() map[uint64][]uint64 {
	d.t.Helper()
	var dump map[string]struct {
		Events []struct {
			WorkerID uint64 `json:"worker_id"`
			Event    struct {
				Data struct {
					Stored struct {
						Blocks []struct {
							BlockHash uint64 `json:"block_hash"`
						} `json:"blocks"`
					} `json:"stored"`
				} `json:"data"`
			} `json:"event"`
		} `json:"events"`
	}
	d.call(http.MethodGet, "/dump", nil, &dump)
	all := map[uint64][]uint64{1: {}, 2: {}}
	for _, partition := range dump {
		for _, e := range partition.Events {
			for _, b := range e.Event.Data.Stored.Blocks {
				all[e.WorkerID] = append(all[e.WorkerID], b.BlockHash)
			}
		}
	}
	for _, list := range all {
		slices.Sort(list)
	}
	return all
}

// TestDynamosIndexerEqualsTheEngines has Dynamo's standalone indexer read kvcast as if it were two engines, from the start and late.
func TestDynamosIndexerEqualsTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, dynamo)
	publishers, zmq := make(map[uint64][2]int), "    publishers:\n"
	for number := range uint64(2) {
		at := [2]int{harness.FreePort(t), harness.FreePort(t)}
		publishers[number+1] = at
		zmq += fmt.Sprintf("      - {worker: e%d, bind: \"tcp://127.0.0.1:%d\", replay: \"tcp://127.0.0.1:%d\"}\n", number+1, at[0], at[1])
	}
	w := newWorld(t, zmq)
	w.engines[1].hashes = w.engines[0].hashes // it knows a block by the hash of the first engine that has it
	all := []*dynamosIndexer{startDynamosIndexer(t, publishers)}
	check := func(when string) {
		t.Helper()
		want := make(map[uint64][]uint64)
		for _, e := range w.engines {
			want[e.number] = w.hashes()[topic(e)]
		}
		for i, d := range all {
			await(t, fmt.Sprintf("indexer %d %s", i, when), want, func() map[uint64][]uint64 {
				for _, e := range w.engines {
					e.touch() // a gap is seen when the next batch comes
				}
				return d.hashes()
			})
		}
	}
	w.live(func() { all = append(all, startDynamosIndexer(t, publishers)) }, check)
}
