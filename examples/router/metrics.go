package main

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// totals are the sums over the requests that an engine has completed.
type totals struct {
	requests, failures int
	prompt, cached     int // tokens, of the requests of which the engine has told both
}

// totals returns the totals of an engine. The caller must hold mu.
func (rt *router) totals(worker string) *totals {
	if rt.served[worker] == nil {
		rt.served[worker] = new(totals)
	}
	return rt.served[worker]
}

// metrics answers in the text format of Prometheus.
func (rt *router) metrics(w http.ResponseWriter, _ *http.Request) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	for _, m := range []struct {
		name, help string
		value      func(*totals) int
	}{
		{"router_requests_total", "Completed requests.", func(t *totals) int { return t.requests }},
		{"router_unreachable_total", "Requests that an engine did not answer, and another one got.", func(t *totals) int { return t.failures }},
		{"router_prompt_tokens_total", "Tokens of prompts.", func(t *totals) int { return t.prompt }},
		{"router_cached_tokens_total", "Tokens of prompts that were in the engine's cache.", func(t *totals) int { return t.cached }},
	} {
		_, _ = fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s counter\n", m.name, m.help, m.name)
		for _, name := range slices.Sorted(maps.Keys(rt.served)) {
			_, _ = fmt.Fprintf(w, "%s{worker=%q} %d\n", m.name, name, m.value(rt.served[name]))
		}
	}
}
