package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kvcast/kvcast/client"
)

const (
	// tokenizeTimeout bounds the call of an engine that tokenizes a prompt.
	tokenizeTimeout = 5 * time.Second
	// bytesPerToken is about how many bytes of text a token has, if no engine tokenizes it.
	bytesPerToken = 4
)

// completion has the fields of a request that the router reads, of completions and of chat completions.
type completion struct {
	Model     string          `json:"model"`
	Prompt    json.RawMessage `json:"prompt"`
	Messages  json.RawMessage `json:"messages"`
	CacheSalt string          `json:"cache_salt"`
}

// read returns the prompt of a request, with its tokens if they can be known, and its length in tokens, or about that.
func (rt *router) read(ctx context.Context, body []byte) (client.Prompt, int) {
	var c completion
	_ = json.Unmarshal(body, &c) // the engine reports invalid JSON
	p := client.Prompt{Model: c.Model, Salt: c.CacheSalt}
	var text string
	var texts []string
	var lists [][]uint32
	switch {
	case rt.policy == policyRoundRobin: // nothing is matched
	case len(c.Messages) > 0:
		p.Tokens = rt.tokenize(ctx, c.Model, body)
	case json.Unmarshal(c.Prompt, &p.Tokens) == nil:
	case json.Unmarshal(c.Prompt, &text) == nil:
		p.Tokens = rt.tokenizeText(ctx, c.Model, text)
	case json.Unmarshal(c.Prompt, &lists) == nil && len(lists) > 0:
		p.Tokens = lists[0] // one engine computes all prompts of a request, so the first one decides
	case json.Unmarshal(c.Prompt, &texts) == nil && len(texts) > 0:
		p.Tokens = rt.tokenizeText(ctx, c.Model, texts[0])
	}
	length := len(p.Tokens)
	if length == 0 {
		length = len(body) / bytesPerToken
	}
	return p, length
}

func (rt *router) tokenizeText(ctx context.Context, model, text string) []uint32 {
	body, err := json.Marshal(map[string]any{"model": model, "prompt": text})
	if err != nil {
		return nil
	}
	return rt.tokenize(ctx, model, body)
}

// tokenize returns the tokens of a text or a chat, which the first engine that answers tokenizes: POST /tokenize of vLLM reads the fields
// of a chat completion. It returns nil if none does.
func (rt *router) tokenize(ctx context.Context, model string, body []byte) []uint32 {
	for _, w := range rt.view.Workers() {
		if endpoint := w.Added.GetEndpoint(); endpoint != "" && w.Model == model {
			if tokens, err := rt.tokenizeAt(ctx, endpoint, body); err == nil {
				return tokens
			}
		}
	}
	return nil
}

func (rt *router) tokenizeAt(ctx context.Context, endpoint string, body []byte) ([]uint32, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, endpointURL(endpoint, "/tokenize"), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := rt.caller.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	err = json.NewDecoder(io.LimitReader(res.Body, maxBody)).Decode(&answer)
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("tokenize at %s: %s", endpoint, res.Status)
	}
	return answer.Tokens, err
}
