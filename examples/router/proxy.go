package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/client"
)

// request is a completion request on its way to an engine.
type request struct {
	body   []byte
	prompt client.Prompt
	length int // of the prompt in tokens, or about that if its tokens are not known
	tried  map[string]bool
	engine engine // that is being tried, or has answered
}

// requestKey is the context key of a *request.
type requestKey struct{}

func requestOf(ctx context.Context) *request { return ctx.Value(requestKey{}).(*request) }

// complete sends a completion request to an engine.
func (rt *router) complete(w http.ResponseWriter, req *http.Request) {
	if !rt.view.Status().Ready {
		http.Error(w, "the caches are not known yet; try again", http.StatusServiceUnavailable)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxBody))
	if err != nil {
		http.Error(w, fmt.Sprintf("read request: %v", err), http.StatusRequestEntityTooLarge)
		return
	}
	r := &request{body: body, tried: make(map[string]bool)}
	r.prompt, r.length = rt.read(req.Context(), body)
	rt.proxy.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), requestKey{}, r)))
}

// newProxy returns the proxy for completion requests.
func (rt *router) newProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetXForwarded() }, // RoundTrip sets the address
		Transport:      rt,
		ModifyResponse: rt.answered,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, err.Error(), http.StatusBadGateway)
		},
	}
}

// RoundTrip implements http.RoundTripper. It sends a request to the engine of the router's choice. If that cannot be reached, or ends the
// connection before it has answered, RoundTrip tries others: requests change nothing.
func (rt *router) RoundTrip(req *http.Request) (*http.Response, error) {
	r := requestOf(req.Context())
	var failures []error
	for {
		e, err := rt.choose(req.Context(), r.prompt, r.length, r.tried)
		if err != nil {
			return nil, errors.Join(append(failures, err)...)
		}
		r.engine, r.tried[e.name] = e, true
		rt.noteRouted(req.Context(), r.prompt, &e)
		to := req.Clone(req.Context())
		to.URL.Scheme, to.URL.Host, to.Host = "http", e.endpoint, ""
		to.Body, to.ContentLength = io.NopCloser(bytes.NewReader(r.body)), int64(len(r.body))
		if e.ranked && e.ranks > 1 {
			to.Header.Set("X-Data-Parallel-Rank", strconv.FormatUint(uint64(e.best), 10)) // vLLM's choice of a dp rank
		}
		res, err := http.DefaultTransport.RoundTrip(to)
		if err == nil || req.Context().Err() != nil {
			return res, err
		}
		rt.unreachable(e.name)
		failures = append(failures, fmt.Errorf("engine %s: %w", e.name, err))
	}
}

// answered makes a response name its engine, and reads from it what the engine has reused.
func (rt *router) answered(res *http.Response) error {
	r := requestOf(res.Request.Context())
	res.Header.Set("X-Engine", r.engine.name)
	if res.StatusCode == http.StatusOK && res.Header.Get("Content-Encoding") == "" {
		res.Body = &observed{ReadCloser: res.Body, ended: func(tail []byte) { rt.completed(r, tail) }}
	}
	return nil
}

// observed is the body of a response. It calls ended with its last bytes when it is read to its end.
type observed struct {
	io.ReadCloser
	tail  []byte
	ended func(tail []byte)
}

// maxTail bounds the bytes that observed keeps. The usage is within the last few hundred.
const maxTail = 16 << 10

func (o *observed) Read(b []byte) (int, error) {
	n, err := o.ReadCloser.Read(b)
	o.tail = append(o.tail, b[:n]...)
	if len(o.tail) > 2*maxTail {
		o.tail = slices.Delete(o.tail, 0, len(o.tail)-maxTail)
	}
	if errors.Is(err, io.EOF) && o.ended != nil {
		o.ended(o.tail)
		o.ended = nil
	}
	return n, err
}

// What a response says about its prompt. The last match is that of the whole response.
var (
	promptTokens = regexp.MustCompile(`"prompt_tokens"\s*:\s*(\d+)`)
	cachedTokens = regexp.MustCompile(`"prompt_tokens_details"\s*:\s*\{[^{}]*"cached_tokens"\s*:\s*(\d+)`)
)

// lastNumber returns the number in the last match of an expression.
func lastNumber(re *regexp.Regexp, text []byte) (n int, ok bool) {
	all := re.FindAllSubmatch(text, -1)
	if len(all) == 0 {
		return 0, false
	}
	n, err := strconv.Atoi(string(all[len(all)-1][1]))
	return n, err == nil
}

// completed counts a completed request, and reports what the engine has reused. A streamed response has a usage only if its request
// asks for it (stream_options.include_usage).
func (rt *router) completed(r *request, tail []byte) {
	prompt, known := lastNumber(promptTokens, tail)
	cached, told := lastNumber(cachedTokens, tail)
	e := &r.engine
	rt.mu.Lock()
	rt.tells[e.name] = rt.tells[e.name] || told
	told = known && rt.tells[e.name] // engines that tell leave out a 0
	t := rt.totals(e.name)
	t.requests++
	if told {
		t.prompt += prompt
		t.cached += cached
	}
	rt.mu.Unlock()
	// Without tokens, nothing was predicted; with several dp ranks and no match, the rank is not known.
	if told && rt.reporter != nil && len(r.prompt.Tokens) > 0 && (e.ranked || e.ranks <= 1) {
		e.outcome.Reused = cached
		rt.reporter.Report(e.outcome)
	}
}

// models answers with the models that have engines, in OpenAI's form.
func (rt *router) models(w http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		OwnedBy string `json:"owned_by"`
	}
	all := []model{}
	for _, worker := range rt.view.Workers() {
		m := model{ID: worker.Model, Object: "model", OwnedBy: "kvcast"}
		if worker.Added.GetEndpoint() != "" && !slices.Contains(all, m) {
			all = append(all, m)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": all})
}

// health answers 200 if there is an engine to send requests to.
func (rt *router) health(w http.ResponseWriter, _ *http.Request) {
	if !rt.view.Status().Ready {
		http.Error(w, "the caches are not known yet", http.StatusServiceUnavailable)
		return
	}
	for _, worker := range rt.view.Workers() {
		if worker.Added.GetEndpoint() != "" {
			_, _ = io.WriteString(w, "ok\n")
			return
		}
	}
	http.Error(w, "there is no engine with an endpoint", http.StatusServiceUnavailable)
}

// unreachable remembers that an engine cannot be reached.
func (rt *router) unreachable(worker string) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.failed[worker] = time.Now()
	rt.totals(worker).failures++
}

// endpointURL returns the address of a path at an endpoint.
func endpointURL(endpoint, path string) string {
	return (&url.URL{Scheme: "http", Host: endpoint, Path: path}).String()
}
