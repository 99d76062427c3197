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
	// maxBody is the largest request taken, in bytes: a prompt of some millions of
	// tokens.
	maxBody = 64 << 20
	// slack and spread bound how unevenly engines are loaded for the sake of their
	// caches: none is given requests that has had, beyond the least, slack tokens and a
	// spread of those that the least has had. Without a bound all would go to the one
	// engine that has what all prompts begin with.
	slack  = 65_536
	spread = 20
)

// policy is how requests are spread over engines.
type policy string

const (
	policyPrefix     policy = "prefix"
	policyRoundRobin policy = "round-robin"
)

// router sends each completion to the engine that has the longest prefix of its
// prompt, by what the View says that engines hold.
type router struct {
	view   *client.View
	policy policy
	proxy  *httputil.ReverseProxy

	mu    sync.Mutex
	given map[string]int // prompt tokens that had to be computed, by worker; guarded by mu
	turn  int            // of round robin; guarded by mu
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

// engineKey is where a request's context has the engine it goes to.
type engineKey struct{}

// completion is what the router reads of a request; the engine reads the rest.
type completion struct {
	Model  string          `json:"model"`
	Prompt json.RawMessage `json:"prompt"`
}

// errNoEngine is what a request gets that no engine could have.
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
	// What is no JSON, such as an empty body, is the engine's to refuse.
	_ = json.Unmarshal(body, &c)
	// A prompt may be text, which would have to be cut into tokens as the model does.
	// This router does not, and sees a prompt of which nobody has anything.
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

// engine is one that a request may go to.
type engine struct {
	name, endpoint string
	cached         int // tokens of the prompt
}

// choose returns the name and the endpoint of the engine for a prompt.
func (rt *router) choose(model string, tokens []uint32) (name, endpoint string, err error) {
	engines := rt.engines(model, tokens)
	if len(engines) == 0 {
		return "", "", errNoEngine
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.meet(engines)
	best := engines[rt.turn%len(engines)]
	rt.turn++
	if rt.policy == policyPrefix {
		best = rt.longest(engines)
	}
	rt.given[best.name] += len(tokens) - best.cached
	return best.name, best.endpoint, nil
}

// meet has engines that were not known begin with what the least of the others of the
// model has been given: they would get every request until they have caught up. Those
// that have left are forgotten. mu is held.
func (rt *router) meet(engines []engine) {
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

// longest returns the engine that has most of the prompt, of those that have not been
// given too much; of equal ones the one that has been given least. mu is held.
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

// engines lists the engines of a model, by name, with what each has of the prompt. A
// worker with several dp ranks behind one endpoint counts as the best of them.
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
