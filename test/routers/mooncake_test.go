package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// mooncakeStore is a Mooncake master, with clients that store objects.
type mooncakeStore struct {
	t    *testing.T
	http int
	c    *consumer
}

// startMooncake starts a store whose objects have the keys of an engine.
func startMooncake(t *testing.T, engine, keys string) *mooncakeStore {
	t.Helper()
	need(t, mooncake, mooncakePackage, keys)
	s := &mooncakeStore{t: t, http: harness.FreePort(t)}
	s.c = startConsumer(t, mooncake, "testdata/mooncake_store.py", mooncakePackage, fmt.Sprint(harness.FreePort(t)), fmt.Sprint(s.http), keys, engine)
	s.do(map[string]any{"do": "start"})
	return s
}

// do makes the store do what a request says, and returns which of its blocks an engine can load.
func (s *mooncakeStore) do(request map[string]any) []bool {
	s.t.Helper()
	var answer struct{ Held []bool }
	s.c.ask(request, &answer)
	return answer.Held
}

// blocksOf returns the hashes of the blocks of a path.
func blocksOf(e *engine, path uint64) (all []uint64) {
	for n := 1; n <= depth; n++ {
		all = append(all, e.hash(path>>(2*(depth-n))))
	}
	return all
}

// prefix returns the number of tokens that an engine can load, by what the store answers to its lookup.
func (s *mooncakeStore) prefix(blocks []uint64) (tokens int) {
	for _, held := range s.do(map[string]any{"do": "lookup", "blocks": blocks}) {
		if !held {
			break
		}
		tokens += blockSize
	}
	return tokens
}

// TestPoolEqualsAMooncakeStore has two engines that load from a Mooncake store, and one that does not. They store under the keys of vLLM or SGLang, all
// parts of a block or some; the master evicts, loses a client with its objects, and restarts, and so does kvcast.
func TestPoolEqualsAMooncakeStore(t *testing.T) {
	testclass.Peers(t)
	for _, c := range []struct{ engine, keys string }{{"vllm", mooncakeKeysOfVLLM}, {"sglang", mooncakeKeysOfSGLang}} {
		t.Run(c.engine, func(t *testing.T) {
			t.Parallel()
			poolEqualsAMooncakeStore(t, startMooncake(t, c.engine, c.keys))
		})
	}
}

func poolEqualsAMooncakeStore(t *testing.T, store *mooncakeStore) {
	engines := []*engine{newEngine(t, 1), newEngine(t, 2), newEngine(t, 3)}
	engines[1].hashes = engines[0].hashes // engines that share a store have the same hashes
	w := newPoolWorld(t, engines, "org/m", fmt.Sprintf("{name: mc, model: org/m, sources: [{connect: \"mooncake://127.0.0.1:%d\"}]}", store.http))
	random := engines[0].random
	// held returns a path whose blocks an engine that loads from the store holds: it has them to store.
	held := func() uint64 {
		for {
			path := engines[0].randomPath()
			if slices.ContainsFunc(engines[:2], func(e *engine) bool { return e.held[path] }) {
				return path
			}
			w.steps(1)
		}
	}
	change := func(n int) {
		t.Helper()
		w.steps(n)
		for range n {
			request := map[string]any{"do": "put", "blocks": blocksOf(engines[0], held())}
			switch random.IntN(6) {
			case 0:
				request["ranks"] = 1 // the other rank's objects may be there, or not
			case 1:
				request["do"] = "remove"
			}
			store.do(request)
		}
	}
	check := func(when string) {
		t.Helper()
		longest := 0
		for range 10 {
			path := engines[0].randomPath()
			prompt, blocks := promptOf(path), blocksOf(engines[0], path)
			want := func() []string {
				pool, all := store.prefix(blocks), []string{}
				longest = max(longest, pool)
				for i, e := range engines {
					pools := []client.PoolPrefix(nil)
					if pool > 0 && i < 2 {
						pools = []client.PoolPrefix{{Pool: "mc", Tokens: pool, Blocks: pool / blockSize, Trust: kvcastv1.Trust_TRUST_DEGRADED, Reasons: []kvcastv1.DegradedReason{
							kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER,
						}}}
					}
					if n := e.length(prompt); n > 0 || pools != nil {
						all = append(all, fmt.Sprintf("%s %d %v", e.name, n, pools))
					}
				}
				return all
			}
			got := func() (all []string) {
				for _, m := range w.matchOf("org/m", prompt) {
					all = append(all, fmt.Sprintf("%s %d %v", m.Worker, m.Tokens, m.Pools))
				}
				slices.Sort(all)
				return all
			}
			// The store may evict at any time.
			await(t, fmt.Sprintf("the matches of %v %s", prompt, when), "", func() string { return cmp.Diff(want(), got()) })
		}
		t.Logf("%s: the store had at most %d tokens of a prompt", when, longest)
	}
	change(30)
	check("at the start")
	w.steps(60) // the engines evict what the store keeps
	check("after the engines have evicted")
	store.do(map[string]any{"do": "fill"})
	check("after the master has evicted")
	change(20)
	w.restart()
	check("after a restart of kvcast")
	lost := blocksOf(engines[0], held())
	store.do(map[string]any{"do": "clear"})
	store.do(map[string]any{"do": "lose", "blocks": lost})
	check("after a client was lost")
	change(20)
	store.do(map[string]any{"do": "start"})
	check("after a restart of the master")
	change(20)
	check("after the engines have stored again")
}
