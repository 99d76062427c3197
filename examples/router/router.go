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
	// maxBody is the largest request in bytes. It has room for millions of tokens.
	maxBody = 64 << 20
	// slack and spread bound the imbalance between engines. With least as the fewest
	// tokens given to an engine, none that was given more than least + least/spread + slack
	// gets a request. Without a bound, one engine that holds a prefix common to all prompts
	// would get every request.
	slack  = 65_536
	spread = 20
)

// policy is how the router chooses an engine.
type policy string

const (
	policyPrefix     policy = "prefix"
	policyRoundRobin policy = "round-robin"
)

// router sends each completion to the engine that holds the longest prefix of its prompt
// according to the View.
type router struct {
	view   *client.View
	policy policy
	proxy  *httputil.ReverseProxy

	mu    sync.Mutex
	given map[string]int // prompt tokens to compute, by worker; guarded by mu
	next  int            // engine of round robin; guarded by mu
}

func newRouter(view *client.View, p policy) *router {
	return &router{
		view: view, policy: p, given: make(map[string]int),
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

// errNoEngine means that no engine serves the model.
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
	// A prompt of text, which this router does not tokenize, counts as one that no engine
	// holds.
	var tokens []uint32
	_ = json.Unmarshal(c.Prompt, &tokens)
	name, endpoint, err := rt.choose(c.Model, tokens)
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
	cached         int // tokens of the prompt that it holds
}

// choose returns the name and endpoint of the engine for a prompt.
func (rt *router) choose(model string, tokens []uint32) (name, endpoint string, err error) {
	engines := rt.engines(model, tokens)
	if len(engines) == 0 {
		return "", "", errNoEngine
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.updateGiven(engines)
	best := engines[rt.next%len(engines)]
	rt.next++
	if rt.policy == policyPrefix {
		best = rt.longest(engines)
	}
	rt.given[best.name] += len(tokens) - best.cached
	return best.name, best.endpoint, nil
}

// updateGiven adds new engines and removes those that have left. A new engine starts with
// the least that others of the model were given; from 0, it would get every request until
// it has caught up. mu is held.
func (rt *router) updateGiven(engines []engine) {
	least, known := math.MaxInt, false
	for _, e := range engines {
		if n, ok := rt.given[e.name]; ok {
			least, known = min(least, n), true
		}
	}
	if !known {
		least = 0
	}
	for _, e := range engines {
		if _, ok := rt.given[e.name]; !ok {
			rt.given[e.name] = least
		}
	}
	for name := range rt.given {
		if _, ok := rt.view.Worker(name); !ok {
			delete(rt.given, name)
		}
	}
}

// longest returns the engine with the longest prefix among those within the allowed
// imbalance; of equal ones, that which was given the fewest tokens. mu is held.
func (rt *router) longest(engines []engine) engine {
	least := rt.given[engines[0].name]
	for _, e := range engines {
		least = min(least, rt.given[e.name])
	}
	var best engine
	for _, e := range engines {
		if rt.given[e.name] > least+least/spread+slack {
			continue
		}
		if best.name == "" || e.cached > best.cached || e.cached == best.cached && rt.given[e.name] < rt.given[best.name] {
			best = e
		}
	}
	return best
}

// engines returns the engines of a model, by name. A worker with several dp ranks has the
// longest prefix of any of them.
func (rt *router) engines(model string, tokens []uint32) []engine {
	cached := make(map[string]int)
	for _, m := range rt.view.Match(client.Prompt{Model: model, Tokens: tokens}) {
		cached[m.Worker] = max(cached[m.Worker], m.Tokens)
	}
	var out []engine
	for _, w := range rt.view.Workers() {
		if endpoint := w.Added.GetEndpoint(); endpoint != "" && w.Model == model {
			out = append(out, engine{w.Name, endpoint, cached[w.Name]})
		}
	}
	return out
}
