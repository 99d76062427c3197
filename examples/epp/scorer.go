package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/datalayer"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"

	"github.com/kvcast/kvcast/client"
)

// scorerType is the type of the scorer in the picker's configuration.
const scorerType = "kvcast-scorer"

// scorer gives each pod the share of the prompt that it holds, or is expected to hold, by kvcast.
type scorer struct {
	name    plugin.TypedName
	matcher *client.Matcher
	timeout time.Duration // of the tokenization and the match together
}

// newScorer returns a scorer with the parameters kvcast, the addresses of kvcast's servers, and timeout, 100ms by default. After it, pods have no score.
func newScorer(name string, parameters json.RawMessage, handle plugin.Handle) (plugin.Plugin, error) {
	p := struct{ Kvcast, Timeout string }{Timeout: "100ms"}
	if len(parameters) > 0 {
		if err := json.Unmarshal(parameters, &p); err != nil {
			return nil, fmt.Errorf("%s: parameters: %w", name, err)
		}
	}
	timeout, err := time.ParseDuration(p.Timeout)
	if err != nil || timeout <= 0 {
		return nil, fmt.Errorf("%s: timeout %q is not allowed: want a duration such as 100ms", name, p.Timeout)
	}
	if p.Kvcast == "" {
		return nil, fmt.Errorf("%s: kvcast is missing: want the address of its gRPC port, such as kvcast:50051", name)
	}
	c, err := client.New(p.Kvcast, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("%s: kvcast %q: %w", name, p.Kvcast, err)
	}
	s := &scorer{name: plugin.TypedName{Type: scorerType, Name: name}, matcher: c.NewMatcher(), timeout: timeout}
	context.AfterFunc(handle.Context(), s.matcher.Close)
	return s, nil
}

func (s *scorer) TypedName() plugin.TypedName         { return s.name }
func (s *scorer) Category() scheduling.ScorerCategory { return scheduling.Affinity }

func (s *scorer) prompt(r *scheduling.LLMRequest) client.Prompt {
	p := client.Prompt{Model: r.TargetModel, Tokens: r.TokenizedPrompt.TokenIDs, ExcludeLastToken: true} // which is computed always
	switch {
	case r.Body == nil:
	case r.Body.Completions != nil:
		p.Salt = r.Body.Completions.CacheSalt
	case r.Body.ChatCompletions != nil:
		p.Salt = r.Body.ChatCompletions.CacheSalt
	}
	return p
}

// Score asks kvcast for the prefixes that the endpoints hold. Without tokens, or an answer, no endpoint has a score.
func (s *scorer) Score(ctx context.Context, _ *scheduling.CycleState, r *scheduling.LLMRequest, endpoints []scheduling.Endpoint) map[scheduling.Endpoint]float64 {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	scores := make(map[scheduling.Endpoint]float64)
	matches, err := s.match(ctx, r, endpoints)
	if err != nil {
		log.FromContext(ctx).Error(err, "kvcast gives no scores")
		return scores
	}
	for _, e := range endpoints {
		if m, ok := bestOf(matches, e.GetMetadata()); ok {
			scores[e] = min(1, float64(max(m.Tokens, m.ExpectedTokens))/float64(len(r.TokenizedPrompt.TokenIDs)))
		}
	}
	return scores
}

func (s *scorer) match(ctx context.Context, r *scheduling.LLMRequest, endpoints []scheduling.Endpoint) ([]client.Match, error) {
	if r.TokenizedPrompt == nil { // no plugin has tokenized it
		tokens, err := tokenize(ctx, r, endpoints)
		if err != nil {
			return nil, err
		}
		r.TokenizedPrompt = &scheduling.TokenizedPrompt{TokenIDs: tokens}
	}
	if len(r.TokenizedPrompt.TokenIDs) == 0 {
		return nil, nil
	}
	res, err := s.matcher.Match(ctx, client.MatchRequest{Prompts: []client.Prompt{s.prompt(r)}})
	if err != nil {
		return nil, err
	}
	return res.Matches[0], nil
}

// bestOf returns the best match of an endpoint: of a worker that has its address, or that kvcast has discovered as its pod.
func bestOf(matches []client.Match, e *datalayer.EndpointMetadata) (client.Match, bool) {
	for _, m := range matches { // the best is the first
		if m.Endpoint == net.JoinHostPort(e.Address, e.Port) || m.Endpoint == "" && m.Worker == e.NamespacedName.Namespace+"/"+e.PodName {
			return m, true
		}
	}
	return client.Match{}, false
}

// PreRequest notes in kvcast where the request is sent, for requests with the same prefix that come before the engine's events.
func (s *scorer) PreRequest(ctx context.Context, r *scheduling.LLMRequest, result *scheduling.SchedulingResult) {
	chosen := result.ProfileResults[result.PrimaryProfileName]
	if chosen == nil || len(chosen.TargetEndpoints) == 0 || r.TokenizedPrompt == nil || len(r.TokenizedPrompt.TokenIDs) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	e := chosen.TargetEndpoints[0].GetMetadata()
	worker := e.NamespacedName.Namespace + "/" + e.PodName
	if err := s.matcher.NoteRouted(ctx, client.Routed{Worker: worker, Prompt: s.prompt(r)}); err != nil {
		log.FromContext(ctx).Error(err, "the routed prompt was not noted in kvcast")
	}
}

// tokenize has an endpoint tokenize the request, with vLLM's POST /tokenize.
func tokenize(ctx context.Context, r *scheduling.LLMRequest, endpoints []scheduling.Endpoint) ([]uint32, error) {
	if r.Body == nil || len(endpoints) == 0 {
		return nil, errors.New("the request has no body that was read")
	}
	request := map[string]any{"model": r.TargetModel}
	body, _ := r.Body.Payload.(scheduling.PayloadMap)
	for _, field := range []string{"prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"} {
		if v, ok := body[field]; ok {
			request[field] = v
		}
	}
	text, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	e := endpoints[0].GetMetadata()
	url := "http://" + net.JoinHostPort(e.Address, e.Port) + "/tokenize"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	var answer struct{ Tokens []uint32 }
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, res.Status)
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, maxTokensBytes)).Decode(&answer); err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return answer.Tokens, nil
}

// maxTokensBytes bounds the answer of an engine.
const maxTokensBytes = 16 << 20
