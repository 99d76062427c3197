package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// chunkTokens is the number of tokens in a chunk of LMCache: two blocks of the engines.
const chunkTokens = 2 * blockSize

// lmcacheServer is LMCache's server, and the chunks that it has stored.
type lmcacheServer struct {
	t         *testing.T
	transport string
	port      int
	reap      float64 // seconds
	stop      func()
	c         *consumer
	held      map[string]bool // by the tokens up to the end of a chunk
}

// start starts the server anew, with an empty memory.
func (s *lmcacheServer) start() {
	s.t.Helper()
	if s.stop != nil {
		s.stop()
	}
	s.c, s.stop = startEndingConsumer(s.t, lmcache, "testdata/lmcache.py", lmcachePackage, s.transport, fmt.Sprint(s.port), fmt.Sprint(chunkTokens), "2000", fmt.Sprint(s.reap))
	s.held = make(map[string]bool)
	s.request(map[string]any{})
}

// request makes the server do something, and returns the seq of the newest record of its log.
func (s *lmcacheServer) request(request map[string]any) uint64 {
	s.t.Helper()
	var answer struct{ Seq uint64 }
	s.c.ask(request, &answer)
	return answer.Seq
}

// hashes returns the hashes of the chunks of a prompt.
func (s *lmcacheServer) hashes(prompt []uint32) []string {
	s.t.Helper()
	var answer struct{ Hashes []string }
	s.c.ask(map[string]any{"tokens": prompt}, &answer)
	return answer.Hashes
}

func (s *lmcacheServer) store(prompt []uint32) {
	s.t.Helper()
	s.request(map[string]any{"store": true, "tokens": prompt})
	for end := chunkTokens; end <= len(prompt); end += chunkTokens {
		s.held[fmt.Sprint(prompt[:end])] = true
	}
}

func (s *lmcacheServer) evict(prompt []uint32, chunk int) {
	s.t.Helper()
	s.request(map[string]any{"evict": chunk, "tokens": prompt})
	delete(s.held, fmt.Sprint(prompt[:(chunk+1)*chunkTokens]))
}

// prefix returns the number of tokens that an engine can load.
func (s *lmcacheServer) prefix(prompt []uint32) (tokens int) {
	for tokens+chunkTokens <= len(prompt) && s.held[fmt.Sprint(prompt[:tokens+chunkTokens])] {
		tokens += chunkTokens
	}
	return tokens
}

// length returns the number of tokens of a prompt that an engine holds.
func (e *engine) length(prompt []uint32) (tokens int) {
	for path := uint64(0); tokens < len(prompt); tokens += blockSize {
		if path = path*4 + uint64(prompt[tokens]); !e.held[path] {
			break
		}
	}
	return tokens
}

// match returns the matches of a prompt of model m.
func (w *world) match(prompt []uint32) []client.Match {
	w.t.Helper()
	return w.matchOf("m", prompt)
}

// client returns a client of kvcast.
func (w *world) client() *client.Client {
	w.t.Helper()
	addr, err := w.process.Addr()
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// awaitRead waits until kvcast has read a source up to a seq.
func (w *world) awaitRead(worker string, seq uint64) {
	w.t.Helper()
	c := w.client()
	harness.WaitFor(w.t, func() bool {
		all, err := c.Workers(w.t.Context(), nil)
		if err != nil {
			w.t.Fatal(err)
		}
		i := slices.IndexFunc(all, func(s *kvcastv1.WorkerStatus) bool { return s.GetName() == worker })
		return i >= 0 && all[i].GetSources()[0].GetLastSeq() >= seq
	})
}

// matchOf returns the matches of a prompt.
func (w *world) matchOf(model string, prompt []uint32) []client.Match {
	w.t.Helper()
	res, err := w.client().MatchPrefix(w.t.Context(), client.MatchRequest{Prompts: []client.Prompt{{Model: model, Tokens: prompt}}})
	if err != nil {
		w.t.Fatal(err)
	}
	return res.Matches[0]
}

// TestPoolEqualsLMCachesServer has two engines that load from a server of LMCache, and an engine that does not. The test makes the server store and
// evict chunks, of another model too; it ends subscriptions, restarts, and loses events.
func TestPoolEqualsLMCachesServer(t *testing.T) {
	testclass.Peers(t)
	need(t, lmcache, lmcachePackage)
	for _, transport := range []string{"zmq", "grpc"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			poolEqualsLMCachesServer(t, transport)
		})
	}
}

func poolEqualsLMCachesServer(t *testing.T, transport string) {
	t.Helper()
	server := &lmcacheServer{t: t, transport: transport, port: harness.FreePort(t), reap: 1}
	server.start()
	engines := []*engine{newEngine(t, 1), newEngine(t, 2), newEngine(t, 3)}
	w := newPoolWorld(t, engines, "m", fmt.Sprintf("{name: lm, model: m, sources: [{connect: \"lmcache://127.0.0.1:%d\"}]}", server.port))
	check := func(when string, trust kvcastv1.Trust, reasons ...kvcastv1.DegradedReason) {
		t.Helper()
		for range 15 {
			prompt := promptOf(engines[0].randomPath())
			want := []string{}
			for i, e := range engines {
				pools := []client.PoolPrefix(nil)
				if n := server.prefix(prompt); n > 0 && i < 2 {
					pools = []client.PoolPrefix{{Pool: "lm", Tokens: n, Blocks: n / chunkTokens, Trust: trust, Reasons: reasons}}
				}
				if n := e.length(prompt); n > 0 || pools != nil {
					want = append(want, fmt.Sprintf("%s %d %v", e.name, n, pools))
				}
			}
			await(t, fmt.Sprintf("the matches of %v %s", prompt, when), want, func() []string {
				got := []string{}
				for _, m := range w.match(prompt) {
					got = append(got, fmt.Sprintf("%s %d %v", m.Worker, m.Tokens, m.Pools))
				}
				slices.Sort(got)
				return got
			})
		}
	}
	change := func(n int) {
		t.Helper()
		w.steps(n)
		for range n {
			prompt := promptOf(engines[0].randomPath())
			switch engines[0].random.IntN(4) {
			case 0:
				server.evict(prompt, engines[0].random.IntN(len(prompt)/chunkTokens))
			case 1:
				server.request(map[string]any{"store": true, "tokens": prompt, "model": "another"})
			default:
				server.store(prompt)
			}
		}
	}
	const (
		degraded  = kvcastv1.Trust_TRUST_DEGRADED
		connector = kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER
		gap       = kvcastv1.DegradedReason_DEGRADED_REASON_GAP
		late      = kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE
	)
	change(30)
	check("at the start", degraded, connector)
	change(30)
	check("after changes", degraded, connector)
	w.restart()
	change(20)
	check("after a restart of kvcast", degraded, connector)
	server.start()
	change(20)
	check("after a restart of LMCache", degraded, connector)
	for range 2 { // the log, of 2,000 records, no longer has the first
		last := uint64(0)
		for range 300 {
			last = server.request(map[string]any{"store": true, "tokens": promptOf(1<<16 + engines[0].randomPath()), "model": "another"})
		}
		w.awaitRead("lm", last) // before the log has lost these
	}
	change(20)
	check("after records of other models", degraded, connector)
	server.request(map[string]any{"lose": true})
	change(20)
	check("after a loss", degraded, gap, connector)
	w.restart()
	server.held = make(map[string]bool) // of what the log no longer has, kvcast knows nothing
	server.request(map[string]any{"clear": true})
	change(20)
	check("after a restart of kvcast that finds a part of the log", degraded, late, gap, connector)
}
