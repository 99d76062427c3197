package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"

	"github.com/kvcast/kvcast/client"
)

const (
	// maxBody bounds a request in bytes. It allows millions of tokens.
	maxBody = 64 << 20
	// slack and spread bound the imbalance between engines. If the least loaded engine has computed n tokens, an
	// engine with more than n + n/spread + slack gets no request. Without a bound, an engine that holds the common
	// prefix of all prompts would get all requests.
	slack  = 65_536
	spread = 20
)

// policy is how the router chooses an engine.
type policy string

const (
	// policyPrefix matches prompts with the View, policyMatch with the server's MatchPrefixes.
	policyPrefix     policy = "prefix"
	policyMatch      policy = "match"
	policyRoundRobin policy = "round-robin"
)

// router sends each completion request to an engine by its policy.
type router struct {
	view    *client.View
	matcher *client.Matcher // with policyMatch
	policy  policy
	proxy   *httputil.ReverseProxy

	mu       sync.Mutex     // guards all below
	computed map[string]int // prompt tokens that were not cached, by worker
	next     int            // next engine of round robin
}

func newRouter(view *client.View, matcher *client.Matcher, p policy) *router {
	return &router{
		view: view, matcher: matcher, policy: p, computed: make(map[string]int),
		proxy: &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(r.In.Context().Value(engineKey{}).(*url.URL))
			r.SetXForwarded()
		}},
	}
}

// engineKey is the context key of a request's engine.
type engineKey struct{}

// completion has the fields of a request that the router reads.
type completion struct {
	Model  string          `json:"model"`
	Prompt json.RawMessage `json:"prompt"`
}

var errNoEngine = errors.New("there is no engine of this model")

func (rt *router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !rt.view.Status().Ready {
		http.Error(w, "the caches are not known yet; try again", http.StatusServiceUnavailable)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxBody))
	if err != nil {
		http.Error(w, fmt.Sprintf("read request: %v", err), http.StatusRequestEntityTooLarge)
		return
	}
	var c completion
	_ = json.Unmarshal(body, &c) // the engine reports invalid JSON
	// This router does not tokenize text. A prompt of text is routed as if no engine held a block of it.
	var tokens []uint32
	_ = json.Unmarshal(c.Prompt, &tokens)
	name, endpoint, err := rt.choose(req.Context(), c.Model, tokens)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	target, err := url.Parse("http://" + endpoint)
	if err != nil {
		http.Error(w, fmt.Sprintf("endpoint of %s: %v", name, err), http.StatusBadGateway)
		return
	}
	w.Header().Set("X-Engine", name)
	req = req.WithContext(context.WithValue(req.Context(), engineKey{}, target))
	req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	rt.proxy.ServeHTTP(w, req)
}

// engine is an engine that serves a request's model.
type engine struct {
	name, endpoint string
	cached         int // tokens of the prompt in its cache
}

// choose returns the name and endpoint of the engine for a prompt.
func (rt *router) choose(ctx context.Context, model string, tokens []uint32) (name, endpoint string, err error) {
	engines, err := rt.engines(ctx, model, tokens)
	if err != nil {
		return "", "", err
	}
	if len(engines) == 0 {
		return "", "", errNoEngine
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.updateComputed(engines)
	best := engines[rt.next%len(engines)]
	rt.next++
	if rt.policy != policyRoundRobin {
		best = rt.longestPrefix(engines)
	}
	rt.computed[best.name] += len(tokens) - best.cached
	return best.name, best.endpoint, nil
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

// engines returns the engines of a model, ordered by name. cached is the longest prefix over the worker's dp ranks.
func (rt *router) engines(ctx context.Context, model string, tokens []uint32) ([]engine, error) {
	matches, err := rt.matches(ctx, client.Prompt{Model: model, Tokens: tokens})
	if err != nil {
		return nil, err
	}
	cached := make(map[string]int)
	for _, m := range matches {
		cached[m.Worker] = max(cached[m.Worker], m.Tokens)
	}
	var out []engine
	for _, w := range rt.view.Workers() {
		if endpoint := w.Added.GetEndpoint(); endpoint != "" && w.Model == model {
			out = append(out, engine{w.Name, endpoint, cached[w.Name]})
		}
	}
	return out, nil
}

// matches returns the dp ranks that hold prefixes of a prompt. The server's answer is not older than the View.
func (rt *router) matches(ctx context.Context, p client.Prompt) ([]client.Match, error) {
	if rt.policy != policyMatch || len(p.Tokens) == 0 {
		return rt.view.Match(p), nil
	}
	res, err := rt.matcher.Match(ctx, client.MatchRequest{Prompts: []client.Prompt{p}, After: rt.view.Status().Position})
	if err != nil {
		return nil, fmt.Errorf("match prompt: %w", err)
	}
	return res.Matches[0], nil
}
