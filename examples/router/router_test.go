package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// viewOf returns a View of engines that hold the first blocks of a prompt. blocks has their number, by engine.
func viewOf(endpoint string, tokens []uint32, blocks map[string]int) *client.View {
	v := client.NewView()
	v.Apply(update(&kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{Epoch: "e"}}))
	addTo(v, endpoint, tokens, blocks)
	return v
}

func update(m *kvcastv1.SubscribeResponse) client.Update {
	return client.Update{Message: m, Position: client.Position{Epoch: "e", Seq: 1}}
}

// addTo adds engines to a View.
func addTo(v *client.View, endpoint string, tokens []uint32, blocks map[string]int) {
	hashes := client.TokensHashes(tokens, 4, "", "")
	for name, n := range blocks {
		events := []*kvcastv1.RouterEvent{{Event: &kvcastv1.RouterEvent_WorkerAdded{
			WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", Endpoint: endpoint, BlockSize: 4},
		}}}
		if n > 0 {
			events = append(events, &kvcastv1.RouterEvent{
				DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE,
				Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: hashes[:n], TokensHashes: hashes[:n], BlockSize: 4}},
			})
		}
		v.Apply(update(&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{{Worker: name, Model: "m", Events: events}}}))
	}
}

func TestChoose(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	for _, tt := range []struct {
		name     string
		policy   policy
		computed map[string]int
		tokens   []uint32
		tried    []string
		failed   []string
		want     string
	}{
		{name: "the longest prefix", tokens: tokens, want: "b"},
		{name: "equal prefixes and load", tokens: []uint32{9}, want: "a"},
		{name: "equal prefixes", computed: map[string]int{"a": 9, "b": 8, "c": 7}, tokens: []uint32{9}, want: "c"},
		{name: "beyond the allowed imbalance", computed: map[string]int{"a": 0, "b": slack + 1, "c": 0}, tokens: tokens, want: "a"},
		{name: "within the allowed imbalance", computed: map[string]int{"a": 1, "b": slack, "c": 0}, tokens: tokens, want: "b"},
		{name: "the last token is always computed", tokens: tokens[:4], want: "a"},
		{name: "a prompt without tokens", computed: map[string]int{"a": 1, "b": 0, "c": 0}, want: "b"},
		{name: "round robin", policy: policyRoundRobin, tokens: tokens, want: "a"},
		{name: "one was tried", tokens: tokens, tried: []string{"b"}, want: "a"},
		{name: "one has failed", tokens: tokens, failed: []string{"b"}, want: "a"},
		{name: "the last one has failed", tokens: tokens, tried: []string{"a", "c"}, failed: []string{"b"}, want: "b"},
		{name: "all were tried", tokens: tokens, tried: []string{"a", "b", "c"}},
	} {
		rt := newRouter(viewOf("h:1", tokens, map[string]int{"a": 1, "b": 3, "c": 0}), nil, nil, cmp.Or(tt.policy, policyPrefix))
		for name, n := range tt.computed {
			rt.computed[name] = n
		}
		tried := make(map[string]bool)
		for _, name := range tt.tried {
			tried[name] = true
		}
		for _, name := range tt.failed {
			rt.failed[name] = time.Now()
		}
		got, err := rt.choose(t.Context(), client.Prompt{Model: "m", Tokens: tt.tokens}, len(tt.tokens), tried)
		if (err != nil) != (tt.want == "") || got.name != tt.want {
			t.Errorf("%s: got %s, error %v; want %s", tt.name, got.name, err, tt.want)
		}
	}
	if _, err := newRouter(client.NewView(), nil, nil, policyPrefix).choose(t.Context(), client.Prompt{Model: "m"}, 1, nil); err == nil {
		t.Error("without an engine: no error")
	}
}

// TestNewEngineStartsWithTheMinimum adds an engine when other engines have computed many tokens.
func TestNewEngineStartsWithTheMinimum(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	rt := newRouter(viewOf("h:1", tokens, map[string]int{"a": 3, "b": 0, "new": 0}), nil, nil, policyPrefix)
	rt.computed = map[string]int{"a": 5_000_000, "b": 4_999_000, "left": 7}
	if got, err := rt.choose(t.Context(), client.Prompt{Model: "m", Tokens: tokens}, len(tokens), nil); err != nil || got.name != "a" {
		t.Errorf("got %s, error %v; want a, which holds the prompt", got.name, err)
	}
	if want := (map[string]int{"a": 5_000_001, "b": 4_999_000, "new": 4_999_000}); !maps.Equal(rt.computed, want) {
		t.Errorf("computed is %v, want %v", rt.computed, want)
	}
}

// serveEngine starts an HTTP server, and returns its address.
func serveEngine(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	engine := httptest.NewServer(handler)
	t.Cleanup(func() {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		engine.Close()
	})
	return strings.TrimPrefix(engine.URL, "http://")
}

// ask sends a request to a router and returns the response.
func ask(t *testing.T, rt *router, method, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	rt.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body)))
	return w
}

func TestRequestsAreForwardedUnchanged(t *testing.T) {
	engine := serveEngine(t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		_, _ = io.WriteString(w, req.Method+" "+req.RequestURI+" "+string(body))
	})
	view := viewOf(engine, []uint32{1, 2, 3, 4}, map[string]int{"a": 1})
	for _, tt := range []struct {
		view         *client.View
		method, body string
		status       int
		response     string
	}{
		{view, "POST", `{"model": "m", "prompt": [1, 2, 3, 4], "x": 1}`, 200, `POST /v1/completions?q=1 {"model": "m", "prompt": [1, 2, 3, 4], "x": 1}`},
		{view, "POST", `{"model": "m", "prompt": "text"}`, 200, `"text"`},
		{view, "POST", `{"model": "another", "prompt": [1]}`, 502, "no engine of this model"},
		{view, "GET", ``, 405, "Method Not Allowed"},
		{client.NewView(), "POST", `{}`, 503, "not known yet"},
	} {
		w := ask(t, newRouter(tt.view, nil, nil, policyPrefix), tt.method, "/v1/completions?q=1", tt.body)
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.response) {
			t.Errorf("%s: got %d %q, want %d %q", tt.body, w.Code, w.Body, tt.status, tt.response)
		}
	}
}

// TestPromptsAreTokenized sends prompts in each form to engines of which b holds the prefix. Text has the tokens of its bytes.
func TestPromptsAreTokenized(t *testing.T) {
	tokens := []uint32{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i'}
	var asked atomic.Value
	engine := serveEngine(t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		if req.URL.Path == "/tokenize" {
			asked.Store(string(body))
			_ = json.NewEncoder(w).Encode(map[string]any{"count": len(tokens), "tokens": tokens})
		}
	})
	rt := newRouter(viewOf(engine, tokens, map[string]int{"a": 0, "b": 2}), nil, nil, policyPrefix)
	for _, tt := range []struct{ path, body, tokenized string }{
		{"/v1/completions", `{"model": "m", "prompt": [97,98,99,100,101,102,103,104,105]}`, ""},
		{"/v1/completions", `{"model": "m", "prompt": [[97,98,99,100,101],[1]]}`, ""},
		{"/v1/completions", `{"model": "m", "prompt": "abcdefghi"}`, `{"model":"m","prompt":"abcdefghi"}`},
		{"/v1/completions", `{"model": "m", "prompt": ["abcdefghi", "x"]}`, `{"model":"m","prompt":"abcdefghi"}`},
		{"/v1/chat/completions", `{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": []}`, `{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": []}`},
	} {
		asked.Store("")
		if w := ask(t, rt, "POST", tt.path, tt.body); w.Code != 200 || w.Header().Get("X-Engine") != "b" || asked.Load() != tt.tokenized {
			t.Errorf("%s: got %d from %s, tokenized %s", tt.body, w.Code, w.Header().Get("X-Engine"), asked.Load())
		}
	}
}

// TestTextIsBalancedWithoutATokenizer sends long and short chats to engines that do not tokenize.
func TestTextIsBalancedWithoutATokenizer(t *testing.T) {
	engine := serveEngine(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/tokenize" {
			http.NotFound(w, req)
		}
	})
	rt := newRouter(viewOf(engine, []uint32{1}, map[string]int{"a": 0, "b": 0, "c": 0}), nil, nil, policyPrefix)
	n := make(map[string]int)
	for range 12 {
		w := ask(t, rt, "POST", "/v1/chat/completions", `{"model": "m", "messages": [{"role": "user", "content": "`+strings.Repeat("x ", 500)+`"}]}`)
		n[w.Header().Get("X-Engine")]++
	}
	if want := (map[string]int{"a": 4, "b": 4, "c": 4}); !maps.Equal(n, want) {
		t.Errorf("requests by engine: %v, want %v", n, want)
	}
}

// TestUnreachableEngineIsReplaced has an engine that does not listen, and one that closes the connection before it answers.
func TestUnreachableEngineIsReplaced(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5}
	for name, first := range map[string]string{
		"it does not listen": "127.0.0.1:1",
		"it ends":            serveEngine(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
	} {
		second := serveEngine(t, func(w http.ResponseWriter, req *http.Request) {
			_, _ = io.Copy(w, req.Body)
		})
		view := viewOf(first, tokens, map[string]int{"a": 1})
		addTo(view, second, tokens, map[string]int{"b": 0})
		rt := newRouter(view, nil, nil, policyPrefix)
		body := `{"model": "m", "prompt": [1, 2, 3, 4, 5]}`
		for range 2 {
			if w := ask(t, rt, "POST", "/v1/completions", body); w.Code != 200 || w.Header().Get("X-Engine") != "b" || w.Body.String() != body {
				t.Errorf("%s: got %d %s from %s", name, w.Code, w.Body, w.Header().Get("X-Engine"))
			}
		}
		if got := ask(t, rt, "GET", "/metrics", "").Body.String(); !strings.Contains(got, `router_unreachable_total{worker="a"} 1`+"\n") || !strings.Contains(got, `router_requests_total{worker="b"} 2`+"\n") {
			t.Errorf("%s: got\n%s", name, got)
		}
		// An engine is tried again if no other is left.
		w := ask(t, newRouter(viewOf(first, tokens, map[string]int{"a": 1}), nil, nil, policyPrefix), "POST", "/v1/completions", body)
		if w.Code != 502 || !strings.Contains(w.Body.String(), "engine a: ") {
			t.Errorf("%s: got %d %s", name, w.Code, w.Body)
		}
	}
}

// stream asks a router for a streamed completion.
func stream(t *testing.T, url string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(`{"model": "m", "prompt": [1], "stream": true}`))
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// TestEngineThatEndsInMidResponse sends part of a stream: the client must notice that it is incomplete.
func TestEngineThatEndsInMidResponse(t *testing.T) {
	engine := serveEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	front := httptest.NewServer(newRouter(viewOf(engine, []uint32{1}, map[string]int{"a": 0}), nil, nil, policyPrefix))
	defer front.Close()
	res := stream(t, front.URL)
	defer func() { _ = res.Body.Close() }()
	if body, err := io.ReadAll(res.Body); !errors.Is(err, io.ErrUnexpectedEOF) || string(body) != "data: {}\n\n" {
		t.Errorf("got %q, error %v, want an error", body, err)
	}
}

// TestStreamIsNotHeldBack receives the first event while the engine has not sent the second.
func TestStreamIsNotHeldBack(t *testing.T) {
	received := make(chan struct{})
	engine := serveEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-received
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	front := httptest.NewServer(newRouter(viewOf(engine, []uint32{1}, map[string]int{"a": 0}), nil, nil, policyPrefix))
	defer front.Close()
	res := stream(t, front.URL)
	defer func() { _ = res.Body.Close() }()
	first := make([]byte, len("data: 1\n\n"))
	if _, err := io.ReadFull(res.Body, first); err != nil {
		t.Fatal(err)
	}
	close(received)
	if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Errorf("got %q, error %v", rest, err)
	}
}

func TestModelsAndHealth(t *testing.T) {
	rt := newRouter(viewOf("h:1", []uint32{1}, map[string]int{"a": 0, "b": 0}), nil, nil, policyPrefix)
	if got, want := ask(t, rt, "GET", "/v1/models", "").Body.String(), `{"data":[{"id":"m","object":"model","owned_by":"kvcast"}],"object":"list"}`+"\n"; got != want {
		t.Errorf("models: got %s", got)
	}
	for want, view := range map[int]*client.View{
		200: viewOf("h:1", []uint32{1}, map[string]int{"a": 0}), 503: client.NewView(),
	} {
		if w := ask(t, newRouter(view, nil, nil, policyPrefix), "GET", "/health", ""); w.Code != want {
			t.Errorf("health: got %d %s, want %d", w.Code, w.Body, want)
		}
	}
	if w := ask(t, newRouter(viewOf("", []uint32{1}, map[string]int{"a": 0}), nil, nil, policyPrefix), "GET", "/health", ""); w.Code != 503 {
		t.Errorf("health without an endpoint: got %d", w.Code)
	}
}

// TestUsageIsReported has an engine that tells what it reused, in each form.
func TestUsageIsReported(t *testing.T) {
	response := ""
	engine := serveEngine(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/v1/completions" {
			_, _ = io.WriteString(w, response)
		}
	})
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	rt := newRouter(viewOf(engine, tokens, map[string]int{"a": 2}), nil, nil, policyPrefix)
	long := strings.Repeat(`data: {"choices": []}`+"\n\n", 10_000)
	for _, tt := range []struct {
		response       string
		prompt, cached int // sums
	}{
		{`{"usage": {"prompt_tokens": 9}}`, 0, 0}, // it may not tell
		{`{"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}`, 0, 0},
		{`{"choices": [{"text": "\"prompt_tokens\": 7"}], "usage": {"prompt_tokens": 9, "total_tokens": 10, "prompt_tokens_details": {"audio_tokens": null, "cached_tokens": 8}}}`, 9, 8},
		{`{"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}`, 18, 8}, // nothing was cached
		{long + `data: {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}` + "\n\ndata: [DONE]\n\n", 27, 12},
		{long, 27, 12},
	} {
		response = tt.response
		if w := ask(t, rt, "POST", "/v1/completions", `{"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}`); w.Body.String() != tt.response {
			t.Errorf("got %d %.100s", w.Code, w.Body)
		}
		if got := rt.served["a"]; got.prompt != tt.prompt || got.cached != tt.cached {
			t.Errorf("%.100s: got %+v, want %d and %d", tt.response, got, tt.prompt, tt.cached)
		}
	}
}

// conversations returns a trace in which each prompt of a conversation repeats the earlier prompts.
func conversations(t *testing.T, number, turns int) *workload.Trace {
	t.Helper()
	var lines strings.Builder
	for turn := range turns {
		for c := range number {
			ids := []string{"0"} // the common prefix of all prompts
			for n := range turn + 1 {
				ids = append(ids, strconv.Itoa(1+c*turns+n))
			}
			fmt.Fprintf(&lines, `{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": [%s]}`+"\n",
				len(ids)*workload.TraceBlock, strings.Join(ids, ","))
		}
	}
	trace, err := workload.ReadTrace("conversations", strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// TestDemoEndsWithItsSubscription uses a gRPC server without kvcast's service.
func TestDemoEndsWithItsSubscription(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g, served := grpc.NewServer(), make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	defer func() {
		g.Stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	program := filepath.Join(t.TempDir(), "kvcast")
	script := fmt.Sprintf("#!/bin/sh\necho 'msg=serving grpc=%s admin=' >&2\n", l.Addr())
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	var refused *client.Error
	if _, _, err := measure(t.Context(), program, demoRun{policyPrefix, 1}, conversations(t, 1, 1)); !errors.As(err, &refused) || refused.Code != codes.Unimplemented {
		t.Errorf("got error %v, want UNIMPLEMENTED", err)
	} else if n := strings.Count(err.Error(), refused.Error()); n != 1 {
		t.Errorf("got error %v, which contains the cause %d times", err, n)
	}
}

// TestDemo runs the demo with a kvcast process.
func TestDemo(t *testing.T) {
	testclass.Process(t)
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	hit := make(map[demoRun]uint64)
	for _, r := range []demoRun{{policyRoundRobin, 1}, {policyPrefix, 1}, {policyMatch, 1}, {policyRouted, 1}, {policyMatch, 35}, {policyRouted, 35}} {
		// 7 conversations, so that round robin over 4 engines spreads each conversation.
		stats, predictions, err := measure(t.Context(), program, r, conversations(t, 7, 5))
		if err != nil {
			t.Fatal(err)
		}
		want := uint64(7 * 5)
		if r.policy == policyRoundRobin { // nothing is predicted
			want = 0
		}
		if r.together == 1 && (predictions.GetExact() != want || predictions.GetUnder() != 0) || predictions.GetOver() != 0 {
			t.Errorf("%v: predictions are %v", r, predictions)
		}
		for _, s := range stats {
			hit[r] += s.HitTokens
		}
	}
	// Each later prompt hits all earlier prompts of its conversation.
	least := uint64(7 * (2 + 3 + 4 + 5) * workload.TraceBlock)
	if prefix, random := hit[demoRun{policyPrefix, 1}], hit[demoRun{policyRoundRobin, 1}]; prefix < least || random > least/2 {
		t.Errorf("policy prefix hits %d tokens, want at least %d; round robin hits %d, want at most half as many", prefix, least, random)
	}
	for _, r := range []demoRun{{policyMatch, 1}, {policyRouted, 1}, {policyRouted, 35}} {
		if hit[r] != hit[demoRun{policyPrefix, 1}] {
			t.Errorf("%v hits %d tokens, want %d, as policy prefix one at a time", r, hit[r], hit[demoRun{policyPrefix, 1}])
		}
	}
	if got := hit[demoRun{policyMatch, 35}]; got > least/2 { // the server knows of no block before the last prompt was routed
		t.Errorf("policy match hits %d tokens with all at a time, want at most half of %d", got, least)
	}
	var out strings.Builder
	if err := run(t.Context(), []string{"-demo", program, "-requests", "8"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := regexp.MustCompile(`(?m)^(round-robin|prefix|match|routed) +hit rate +[0-9.]+ %: \d+ of \d+ prompt tokens`).FindAllString(out.String(), -1); len(got) != len(demoRuns)+len(demoBursts) {
		t.Errorf("got\n%s", &out)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}
