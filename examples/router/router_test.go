package main

import (
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
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// viewOf returns a View of engines that hold the first blocks of a prompt. blocks has their number, by engine.
func viewOf(endpoint string, tokens []uint32, blocks map[string]int) *client.View {
	v := client.NewView()
	apply := func(m *kvcastv1.SubscribeResponse) {
		v.Apply(client.Update{Message: m, Position: client.Position{Epoch: "e", Seq: 1}})
	}
	apply(&kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{Epoch: "e"}})
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
		apply(&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{{Worker: name, Model: "m", Events: events}}})
	}
	return v
}

func TestChoose(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	for _, tt := range []struct {
		name     string
		policy   policy
		computed map[string]int
		tokens   []uint32
		want     string
	}{
		{"the longest prefix", policyPrefix, nil, tokens, "b"},
		{"equal prefixes and load", policyPrefix, nil, []uint32{9}, "a"},
		{"equal prefixes", policyPrefix, map[string]int{"a": 9, "b": 8, "c": 7}, []uint32{9}, "c"},
		{"beyond the allowed imbalance", policyPrefix, map[string]int{"a": 0, "b": slack + 1, "c": 0}, tokens, "a"},
		{"within the allowed imbalance", policyPrefix, map[string]int{"a": 1, "b": slack, "c": 0}, tokens, "b"},
		{"a prompt of text", policyPrefix, map[string]int{"a": 1, "b": 0, "c": 0}, nil, "b"},
		{"round robin", policyRoundRobin, nil, tokens, "a"},
	} {
		rt := newRouter(viewOf("h:1", tokens, map[string]int{"a": 1, "b": 3, "c": 0}), nil, tt.policy)
		for name, n := range tt.computed {
			rt.computed[name] = n
		}
		if got, _, err := rt.choose(t.Context(), "m", tt.tokens); err != nil || got != tt.want {
			t.Errorf("%s: got %s, error %v; want %s", tt.name, got, err, tt.want)
		}
	}
	if _, _, err := newRouter(client.NewView(), nil, policyPrefix).choose(t.Context(), "m", tokens); err == nil {
		t.Error("without an engine: no error")
	}
}

// TestNewEngineStartsWithTheMinimum adds an engine when other engines have computed many tokens.
func TestNewEngineStartsWithTheMinimum(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	rt := newRouter(viewOf("h:1", tokens, map[string]int{"a": 3, "b": 0, "new": 0}), nil, policyPrefix)
	rt.computed = map[string]int{"a": 5_000_000, "b": 4_999_000, "left": 7}
	if got, _, err := rt.choose(t.Context(), "m", tokens); err != nil || got != "a" {
		t.Errorf("got %s, error %v; want a, which holds the prompt", got, err)
	}
	if want := (map[string]int{"a": 5_000_000, "b": 4_999_000, "new": 4_999_000}); !maps.Equal(rt.computed, want) {
		t.Errorf("computed is %v, want %v", rt.computed, want)
	}
}

func TestRequestsAreForwardedUnchanged(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		_, _ = io.WriteString(w, req.Method+" "+req.RequestURI+" "+string(body))
	}))
	defer engine.Close()
	view := viewOf(strings.TrimPrefix(engine.URL, "http://"), []uint32{1, 2, 3, 4}, map[string]int{"a": 1})
	for _, tt := range []struct {
		view         *client.View
		method, body string
		status       int
		response     string
	}{
		{view, "POST", `{"model": "m", "prompt": [1, 2, 3, 4], "x": 1}`, 200, `POST /v1/completions?q=1 {"model": "m", "prompt": [1, 2, 3, 4], "x": 1}`},
		{view, "POST", `{"model": "m", "prompt": "text"}`, 200, `"text"`},
		{view, "POST", `{"model": "another", "prompt": [1]}`, 502, "no engine of this model"},
		{client.NewView(), "POST", `{}`, 503, "not known yet"},
	} {
		w := httptest.NewRecorder()
		newRouter(tt.view, nil, policyPrefix).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), tt.method, "/v1/completions?q=1", strings.NewReader(tt.body)))
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.response) {
			t.Errorf("%s: got %d %q, want %d %q", tt.body, w.Code, w.Body, tt.status, tt.response)
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
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
	if _, err := measure(t.Context(), program, policyPrefix, conversations(t, 1, 1)); !errors.As(err, &refused) || refused.Code != codes.Unimplemented {
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
	hit := make(map[policy]uint64)
	for _, p := range []policy{policyRoundRobin, policyPrefix, policyMatch} {
		// 7 conversations, so that round robin over 4 engines spreads each conversation.
		stats, err := measure(t.Context(), program, p, conversations(t, 7, 5))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range stats {
			hit[p] += s.HitTokens
		}
	}
	// Each later prompt hits all earlier prompts of its conversation.
	if least := uint64(7 * (2 + 3 + 4 + 5) * workload.TraceBlock); hit[policyPrefix] < least || hit[policyRoundRobin] > least/2 {
		t.Errorf("policy prefix hits %d tokens, want at least %d; round robin hits %d, want at most half as many",
			hit[policyPrefix], least, hit[policyRoundRobin])
	}
	if hit[policyMatch] != hit[policyPrefix] {
		t.Errorf("policy match hits %d tokens, want %d, as policy prefix", hit[policyMatch], hit[policyPrefix])
	}
	var out strings.Builder
	if err := run(t.Context(), []string{"-demo", program, "-requests", "8"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if got := regexp.MustCompile(`(?m)^(round-robin|prefix|match) +hit rate +[0-9.]+ %: \d+ of \d+ prompt tokens`).FindAllString(out.String(), -1); len(got) != 3 {
		t.Errorf("got\n%s", &out)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}
