package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httputil"
	"sync"
	"time"

	"github.com/kvcast/kvcast/client"
)

var errNoEngine = errors.New("there is no engine of this model")

const (
	// maxBody bounds a request in bytes. It allows millions of tokens.
	maxBody = 64 << 20
	// slack and spread bound the imbalance between engines. If the least loaded engine has computed n tokens, an
	// engine with more than n + n/spread + slack gets no request. Without a bound, an engine that holds the common
	// prefix of all prompts would get all requests.
	slack  = 65_536
	spread = 20
	// avoidFor is how long an engine that cannot be reached gets no requests, if there are others.
	avoidFor = 5 * time.Second
)

// policy is how the router chooses an engine.
type policy string

const (
	// policyPrefix matches prompts with the View, policyMatch with the server's MatchPrefixes. policyRouted does that too, and tells the server where each
	// prompt was sent, so that requests that come before the engine's events have the blocks that it will hold.
	policyPrefix     policy = "prefix"
	policyMatch      policy = "match"
	policyRouted     policy = "routed"
	policyRoundRobin policy = "round-robin"
)

// router is the handler of the routes: it sends each completion request to an engine by its policy.
type router struct {
	*http.ServeMux
	view     *client.View
	matcher  *client.Matcher  // with policyMatch and policyRouted
	reporter *client.Reporter // gets what engines have reused; nil: nothing is reported
	policy   policy
	proxy    *httputil.ReverseProxy
	caller   *http.Client // for calls of the router's own

	mu       sync.Mutex           // guards all below
	computed map[string]int       // prompt tokens that were not cached, by worker
	failed   map[string]time.Time // when an engine was last unreachable, by worker
	tells    map[string]bool      // workers that have told how many tokens they reused
	served   map[string]*totals   // by worker
	next     int                  // next engine of round robin
}

func newRouter(view *client.View, matcher *client.Matcher, reporter *client.Reporter, p policy) *router {
	rt := &router{
		ServeMux: http.NewServeMux(), view: view, matcher: matcher, reporter: reporter, policy: p,
		caller:   &http.Client{Timeout: tokenizeTimeout},
		computed: make(map[string]int), failed: make(map[string]time.Time), tells: make(map[string]bool), served: make(map[string]*totals),
	}
	rt.proxy = rt.newProxy()
	rt.HandleFunc("GET /health", rt.health)
	rt.HandleFunc("GET /metrics", rt.metrics)
	rt.HandleFunc("GET /v1/models", rt.models)
	rt.HandleFunc("POST /v1/completions", rt.complete)
	rt.HandleFunc("POST /v1/chat/completions", rt.complete)
	return rt
}

// engine is an engine that serves a request's model.
type engine struct {
	name, endpoint string
	cached         int // tokens of the prompt in its cache, or expected there
	// best is the dp rank with the longest prefix, if ranked.
	best   uint32
	ranked bool
	ranks  int // number of dp ranks
	// outcome is the prediction for best.
	outcome client.Outcome
}

// choose returns the engine for a prompt among those that were not tried.
func (rt *router) choose(ctx context.Context, p client.Prompt, length int, tried map[string]bool) (engine, error) {
	engines, err := rt.candidates(ctx, p)
	if err != nil {
		return engine{}, err
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.updateComputed(engines)
	engines = rt.available(engines, tried)
	if len(engines) == 0 {
		return engine{}, errNoEngine
	}
	best := engines[rt.next%len(engines)]
	rt.next++
	if rt.policy != policyRoundRobin {
		best = rt.longestPrefix(engines)
	}
	rt.computed[best.name] += max(length-best.cached, 0)
	return best, nil
}

// available returns the engines that were not tried, without those that failed in the last seconds, if others are left. The caller must
// hold mu.
func (rt *router) available(engines []engine, tried map[string]bool) (all []engine) {
	var doubtful []engine
	for _, e := range engines {
		switch {
		case tried[e.name]:
		case time.Since(rt.failed[e.name]) < avoidFor:
			doubtful = append(doubtful, e)
		default:
			all = append(all, e)
		}
	}
	if len(all) == 0 {
		return doubtful
	}
	return all
}

// updateComputed adds new engines to computed and deletes removed engines. A new engine starts with the minimum of the
// model's other engines; starting with 0, it would get all requests for some time. The caller must hold mu.
func (rt *router) updateComputed(engines []engine) {
	least := math.MaxInt
	for _, e := range engines {
		if n, ok := rt.computed[e.name]; ok {
			least = min(least, n)
		}
	}
	if least == math.MaxInt {
		least = 0 // all engines are new
	}
	for _, e := range engines {
		if _, ok := rt.computed[e.name]; !ok {
			rt.computed[e.name] = least
		}
	}
	for name := range rt.computed {
		if _, ok := rt.view.Worker(name); !ok {
			delete(rt.computed, name)
			delete(rt.failed, name)
			delete(rt.tells, name)
			delete(rt.served, name)
		}
	}
}

// longestPrefix returns the engine with the longest cached prefix among the engines within the allowed imbalance. If
// prefixes are equal, it returns the engine with the fewest computed tokens. The caller must hold mu.
func (rt *router) longestPrefix(engines []engine) engine {
	least := rt.computed[engines[0].name]
	for _, e := range engines {
		least = min(least, rt.computed[e.name])
	}
	var best engine
	for _, e := range engines {
		if rt.computed[e.name] > least+least/spread+slack {
			continue
		}
		if best.name == "" || e.cached > best.cached || e.cached == best.cached && rt.computed[e.name] < rt.computed[best.name] {
			best = e
		}
	}
	return best
}

// candidates returns the engines of a prompt's model, ordered by name.
func (rt *router) candidates(ctx context.Context, p client.Prompt) ([]engine, error) {
	// An engine computes the last token always, so that it reuses at most the blocks of the prompt without it.
	p.Tokens = p.Tokens[:max(len(p.Tokens)-1, 0)]
	at := rt.view.Status().Position
	matches, at, err := rt.matches(ctx, p, at)
	if err != nil {
		return nil, err
	}
	best := make(map[string]*client.Match) // the first is the best
	for i := range matches {
		if m := &matches[i]; best[m.Worker] == nil {
			best[m.Worker] = m
		}
	}
	var out []engine
	for _, w := range rt.view.Workers() {
		endpoint := w.Added.GetEndpoint()
		if endpoint == "" || w.Model != p.Model {
			continue
		}
		e := engine{name: w.Name, endpoint: endpoint, ranks: len(w.Ranks)}
		if m := best[w.Name]; m != nil {
			e.cached, e.best, e.ranked, e.outcome = max(m.Tokens, m.ExpectedTokens), m.Rank, true, m.Outcome(at, 0)
		} else {
			e.outcome = client.Outcome{Worker: w.Name, Position: at}
			if len(w.Ranks) == 1 {
				e.best, e.outcome.Rank = w.Ranks[0].Rank, w.Ranks[0].Rank
			}
		}
		out = append(out, e)
	}
	return out, nil
}

// matches returns the dp ranks that hold prefixes of a prompt, and the position at which they do. The server's answer is not older than
// the View, whose position is at least at.
func (rt *router) matches(ctx context.Context, p client.Prompt, at client.Position) ([]client.Match, client.Position, error) {
	if rt.policy != policyMatch && rt.policy != policyRouted || len(p.Tokens) == 0 {
		return rt.view.Match(p), at, nil
	}
	res, err := rt.matcher.Match(ctx, client.MatchRequest{Prompts: []client.Prompt{p}, After: at})
	if err != nil {
		return nil, at, fmt.Errorf("match prompt: %w", err)
	}
	return res.Matches[0], res.Position, nil
}

// noteRouted notes at the server that an engine is sent a prompt. Errors are ignored: without the note, later prompts may go to another engine.
func (rt *router) noteRouted(ctx context.Context, p client.Prompt, e *engine) {
	if rt.policy == policyRouted && len(p.Tokens) > 0 && (e.ranked || e.ranks == 1) {
		_ = rt.matcher.NoteRouted(ctx, client.Routed{Worker: e.name, Rank: e.best, Prompt: p})
	}
}
