package routers_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// lmcacheCoordinator is LMCache's coordinator, and the parts of chunks in memory that all instances share, by hash and rank.
type lmcacheCoordinator struct {
	t           *testing.T
	port        int
	incarnation int
	seq         int
	stop        func()
	held        map[string]bool
}

// start starts the coordinator anew, with an empty directory.
func (c *lmcacheCoordinator) start() {
	c.t.Helper()
	if c.stop != nil {
		c.stop()
	}
	consumer, stop := startEndingConsumer(c.t, lmcache, "testdata/lmcache_coordinator.py", lmcachePackage, fmt.Sprint(c.port))
	consumer.ask(map[string]any{}, new(struct{}))
	c.stop, c.held = stop, make(map[string]bool)
	c.incarnation++
	c.seq = 0
}

// report reports that an instance has stored or deleted the parts of a chunk that some ranks have.
func (c *lmcacheCoordinator) report(kind, hash string, more map[string]any, ranks ...int) {
	c.t.Helper()
	c.seq++
	var entries []map[string]any
	for _, rank := range ranks {
		key := map[string]any{"chunk_hash_hex": hash, "model_name": "m", "kv_rank": rank}
		for name, value := range more {
			key[name] = value
		}
		entries = append(entries, map[string]any{"key": key, "size_bytes": 1})
		if more == nil {
			c.held[fmt.Sprint(hash, rank)] = kind == "store"
		}
	}
	text, err := json.Marshal(map[string]any{"batches": []any{map[string]any{
		"instance_id": "i", "incarnation": c.incarnation, "seq": c.seq, "event_type": kind, "tier": "l2", "backend": "fs", "shared": true, "entries": entries,
	}}})
	if err != nil {
		c.t.Fatal(err)
	}
	response, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/events", c.port), "application/json", bytes.NewReader(text)) //nolint:noctx // of a process that the test ends
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	var answer struct{ Applied int }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || answer.Applied != 1 {
		c.t.Fatalf("%s: %v, applied %d", response.Status, err, answer.Applied)
	}
}

// TestPoolEqualsLMCachesDirectory has engines that load from memory that the servers of LMCache share, of which their coordinator knows. The server stores chunks in its own memory first, of
// which kvcast learns what they contain, and evicts them; they are stored in shared memory with all parts or some, deleted, and the coordinator and kvcast restart.
func TestPoolEqualsLMCachesDirectory(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	need(t, lmcache, lmcachePackage)
	server := &lmcacheServer{t: t, transport: "zmq", port: harness.FreePort(t), reap: 60}
	server.start()
	coordinator := &lmcacheCoordinator{t: t, port: harness.FreePort(t)}
	coordinator.start()
	engines := []*engine{newEngine(t, 1), newEngine(t, 2), newEngine(t, 3)}
	w := newPoolWorld(t, engines, "m", fmt.Sprintf("{name: shared, model: m, sources: [{connect: \"lmcache-coordinator://127.0.0.1:%d\"}]}\n  - {name: lm, model: m, sources: [{connect: \"lmcache://127.0.0.1:%d\"}]}",
		coordinator.port, server.port), "--journal", "file:"+t.TempDir())
	random := engines[0].random
	change := func(n int) {
		t.Helper()
		w.steps(n)
		for range n {
			prompt := promptOf(engines[0].randomPath())
			server.store(prompt)
			w.awaitRead("lm", server.request(map[string]any{}))
			for i, hash := range server.hashes(prompt) {
				coordinator.report("store", hash, map[string]any{"model_name": "another"}, 0, 1)
				coordinator.report("store", hash, map[string]any{"cache_salt": "s"}, 0, 1)
				switch random.IntN(5) {
				case 0:
					coordinator.report("store", hash, nil, 0) // the other rank's part may be there, or not
				case 1:
					coordinator.report("delete", hash, nil, random.IntN(2))
				default:
					coordinator.report("store", hash, nil, 0, 1)
				}
				if random.IntN(2) == 0 {
					server.evict(prompt, i)
				}
			}
		}
	}
	check := func(when string) {
		t.Helper()
		longest := 0
		for range 20 {
			prompt, tokens := promptOf(engines[0].randomPath()), 0
			for _, hash := range server.hashes(prompt) {
				if !coordinator.held[hash+"0"] || !coordinator.held[hash+"1"] {
					break
				}
				tokens += chunkTokens
			}
			longest = max(longest, tokens)
			want := []string{}
			if tokens > 0 {
				pools := []client.PoolPrefix{{Pool: "shared", Tokens: tokens, Blocks: tokens / chunkTokens, Trust: kvcastv1.Trust_TRUST_DEGRADED, Reasons: []kvcastv1.DegradedReason{
					kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER,
				}}}
				want = []string{fmt.Sprintf("e1 %v", pools), fmt.Sprintf("e2 %v", pools)}
			}
			await(t, fmt.Sprintf("the matches of %v %s", prompt, when), "", func() string {
				got := []string{}
				for _, m := range w.match(prompt) {
					if len(m.Pools) > 0 {
						got = append(got, fmt.Sprintf("%s %v", m.Worker, m.Pools))
					}
				}
				slices.Sort(got)
				return cmp.Diff(want, got)
			})
		}
		t.Logf("%s: at most %d tokens of a prompt", when, longest)
	}
	change(10)
	check("at the start")
	change(10)
	check("after changes")
	w.restart()
	change(5)
	check("after a restart of kvcast")
	coordinator.start()
	change(10)
	check("after a restart of the coordinator")
}
