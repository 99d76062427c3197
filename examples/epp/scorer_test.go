package main

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/datalayer"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
)

func endpoint(t *testing.T, address string) scheduling.Endpoint {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return scheduling.NewEndpoint(&datalayer.EndpointMetadata{
		NamespacedName: types.NamespacedName{Namespace: "llm", Name: "pod-" + host}, PodName: "pod-" + host, Address: host, Port: port,
	}, new(datalayer.Metrics), nil)
}

func open(t *testing.T, kvcast string) *scorer {
	t.Helper()
	parameters, err := json.Marshal(map[string]string{"kvcast": kvcast, "timeout": "10s"})
	if err != nil {
		t.Fatal(err)
	}
	p, err := newScorer("kv", parameters, plugin.NewEppHandle(t.Context(), nil))
	if err != nil {
		t.Fatal(err)
	}
	return p.(*scorer)
}

// TestScoresOfAServer asks the kvcast at KVCAST_ADDR for the scores of prompts, which KVCAST_SCORES has with the wanted ones, by endpoint.
func TestScoresOfAServer(t *testing.T) {
	addr := os.Getenv("KVCAST_ADDR")
	if addr == "" {
		t.Skip("KVCAST_ADDR is not set: make routers sets it")
	}
	var prompts []struct {
		Tokens []uint32
		Want   map[string]float64
	}
	if err := json.Unmarshal([]byte(os.Getenv("KVCAST_SCORES")), &prompts); err != nil || len(prompts) == 0 {
		t.Fatalf("KVCAST_SCORES: %v", err)
	}
	s := open(t, addr)
	for _, p := range prompts {
		var endpoints []scheduling.Endpoint
		for address := range p.Want {
			endpoints = append(endpoints, endpoint(t, address))
		}
		r := &scheduling.LLMRequest{TargetModel: "m", TokenizedPrompt: &scheduling.TokenizedPrompt{TokenIDs: p.Tokens}}
		got := make(map[string]float64)
		for e, score := range s.Score(t.Context(), nil, r, endpoints) {
			got[net.JoinHostPort(e.GetMetadata().Address, e.GetMetadata().Port)] = math.Round(1000*score) / 1000
		}
		want := maps.Clone(p.Want)
		maps.DeleteFunc(want, func(_ string, score float64) bool { return score == 0 })
		if !maps.Equal(got, want) {
			t.Errorf("%v: got scores %v, want %v", p.Tokens, got, want)
		}
	}
}

func TestScorerIsRefused(t *testing.T) {
	for parameters, want := range map[string]string{
		`{}`:                                  "kv: kvcast is missing: want the address of its gRPC port, such as kvcast:50051",
		`{"kvcast": "k:1", "timeout": "0s"}`:  `kv: timeout "0s" is not allowed: want a duration such as 100ms`,
		`{"kvcast": "k:1", "timeout": "now"}`: `kv: timeout "now" is not allowed: want a duration such as 100ms`,
		`[]`:                                  "kv: parameters: ",
	} {
		if _, err := newScorer("kv", json.RawMessage(parameters), plugin.NewEppHandle(t.Context(), nil)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got error %v, want %s", parameters, err, want)
		}
	}
}

// TestNoScoresWithoutAnswers has no kvcast, and engines that tokenize or fail.
func TestNoScoresWithoutAnswers(t *testing.T) {
	asked := ""
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var request map[string]any
		_ = json.NewDecoder(r.Body).Decode(&request)
		text, _ := json.Marshal(request)
		asked = r.URL.Path + " " + string(text)
		_, _ = w.Write([]byte(`{"count": 3, "tokens": [1, 2, 3]}`))
	}))
	defer engine.Close()
	s := open(t, "127.0.0.1:1")
	s.timeout /= 100
	r := &scheduling.LLMRequest{TargetModel: "m", Body: &scheduling.LLMRequestBody{
		Completions: &scheduling.CompletionsRequest{CacheSalt: "s"}, Payload: scheduling.PayloadMap{"prompt": "a b c", "max_tokens": 7},
	}}
	e := endpoint(t, engine.Listener.Addr().String())
	if got := s.Score(context.Background(), nil, r, []scheduling.Endpoint{e}); len(got) > 0 {
		t.Errorf("without kvcast: got %v", got)
	}
	if want := `/tokenize {"model":"m","prompt":"a b c"}`; asked != want {
		t.Errorf("an engine was asked for %s, want %s", asked, want)
	}
	if p := s.prompt(r); len(p.Tokens) != 3 || p.Salt != "s" || p.Model != "m" {
		t.Errorf("got prompt %+v", p)
	}
	other := &scheduling.LLMRequest{TargetModel: "m", Body: r.Body}
	if got := s.Score(context.Background(), nil, other, []scheduling.Endpoint{endpoint(t, "127.0.0.1:1")}); len(got) > 0 || other.TokenizedPrompt != nil {
		t.Errorf("an engine that does not tokenize: got %v of %v", got, other.TokenizedPrompt)
	}
	s.PreRequest(context.Background(), other, &scheduling.SchedulingResult{})
	s.PreRequest(context.Background(), r, &scheduling.SchedulingResult{PrimaryProfileName: "default", ProfileResults: map[string]*scheduling.ProfileRunResult{
		"default": {TargetEndpoints: []scheduling.Endpoint{e}},
	}})
}
