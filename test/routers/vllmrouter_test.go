package routers_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// completions answers requests in the place of an engine: each completion with the address of the server that has computed the prefill, which is its
// own, or the one that vLLM's router names in the id of a request for a decode. It returns the server's address.
func completions(t *testing.T) string {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"object": "list", "data": [{"id": "m", "object": "model"}]}`))
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		prefill := address
		if _, named, ok := strings.Cut(r.Header.Get("X-Request-Id"), "___prefill_addr_"); ok {
			prefill, _, _ = strings.Cut(named, "___")
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"id": "1", "object": "text_completion", "model": "m", "choices": []any{map[string]any{"index": 0, "text": prefill, "finish_reason": "stop"}},
		})
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: harness.Timeout}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-served); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return address
}

// routerOfVLLM is a running program vllm-router.
type routerOfVLLM struct {
	t   *testing.T
	url string
}

// startRouterOfVLLM starts a router, which ends with the test.
func startRouterOfVLLM(t *testing.T, args ...string) *routerOfVLLM {
	t.Helper()
	port := harness.FreePort(t)
	args = append([]string{"--host", "127.0.0.1", "--port", fmt.Sprint(port), "--prometheus-port", fmt.Sprint(harness.FreePort(t))}, args...)
	cmd := exec.CommandContext(harness.Context(t), vllmRouter, args...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the log of vLLM's router:\n%s", log.String())
		}
	})
	r := &routerOfVLLM{t, fmt.Sprintf("http://127.0.0.1:%d", port)}
	harness.WaitFor(t, func() bool {
		status, _ := r.call(http.MethodGet, "/health", nil)
		return status == http.StatusOK
	})
	return r
}

// call sends a request, and returns the status and the body; 0 if there is no answer.
func (r *routerOfVLLM) call(method, path string, body []byte) (status int, answer []byte) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(harness.Context(r.t), method, r.url+path, bytes.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, b.Bytes()
}

// route returns the address of the server that the router has compute the prefill of a prompt and of one token more: it expects no engine to reuse
// a prompt's last token.
func (r *routerOfVLLM) route(prompt []uint32) string {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": append(slices.Clone(prompt), 0), "max_tokens": 1})
	if err != nil {
		r.t.Fatal(err)
	}
	status, text := r.call(http.MethodPost, "/v1/completions", body)
	var answer struct {
		Choices []struct{ Text string }
	}
	if err := json.Unmarshal(text, &answer); err != nil || status != http.StatusOK || len(answer.Choices) != 1 {
		r.t.Fatalf("route %v: status %d: %s", prompt, status, text)
	}
	return answer.Choices[0].Text
}

// publishedAlone starts a world in which kvcast publishes each worker at an endpoint of its own, without a topic, and a server in the place of each
// engine. It returns the addresses of these servers, and the endpoints, both in the order of the engines.
func publishedAlone(t *testing.T) (w *world, servers, endpoints []string) {
	t.Helper()
	zmq := "    topic: \"\"\n    publishers:\n"
	for number := range 2 {
		endpoints = append(endpoints, fmt.Sprintf("tcp://127.0.0.1:%d", harness.FreePort(t)))
		zmq += fmt.Sprintf("      - {worker: e%d, bind: %q}\n", number+1, endpoints[number])
		servers = append(servers, completions(t))
	}
	return newWorldWith(t, zmq), servers, endpoints
}

// TestVLLMsRouterEqualsTheEngines has vLLM's own router, from the start and late, choose engines by the events that kvcast publishes. Each prompt
// must go to an engine that holds the longest prefix.
func TestVLLMsRouterEqualsTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, vllmRouter)
	w, servers, endpoints := publishedAlone(t)
	args := []string{"--policy", "kv_aware", "--kv-event-block-size", fmt.Sprint(blockSize), "--kv-event-model", "m", "--worker-urls"}
	for _, s := range servers {
		args = append(args, "http://"+s)
	}
	for i, s := range servers {
		args = append(args, "--kv-event-source", "http://"+s+"="+endpoints[i])
	}
	all := []*routerOfVLLM{startRouterOfVLLM(t, args...)}
	check := func(when string) {
		t.Helper()
		for i, r := range all {
			chosen := make(map[string]int)
			await(t, fmt.Sprintf("router %d %s", i, when), nil, func() (wrong []string) {
				clear(chosen)
				for _, prompt := range prompts() {
					best, others := w.longest(prompt)
					if len(others) == 0 {
						continue // it may choose either
					}
					at := slices.Index(servers, r.route(prompt))
					chosen[w.engines[at].name]++
					if !slices.Contains(best, w.engines[at].name) {
						wrong = append(wrong, fmt.Sprintf("%v: %s, not %v", prompt, w.engines[at].name, best))
					}
				}
				return wrong
			})
			if len(chosen) != len(w.engines) {
				t.Errorf("router %d %s: it has chosen %v, want each of the engines", i, when, chosen)
			}
		}
	}
	w.live(func() { all = append(all, startRouterOfVLLM(t, args...)) }, check)
}

// longest returns the names of the engines that hold the longest prefix of a prompt, and of the others.
func (w *world) longest(prompt []uint32) (best, others []string) {
	length := func(e *engine) (n int) {
		path := uint64(0)
		for ; n*blockSize < len(prompt); n++ {
			if path = path*4 + uint64(prompt[n*blockSize]); !e.held[path] {
				break
			}
		}
		return n
	}
	longest := length(slices.MaxFunc(w.engines, func(a, b *engine) int { return length(a) - length(b) }))
	for _, e := range w.engines {
		if length(e) == longest {
			best = append(best, e.name)
		} else {
			others = append(others, e.name)
		}
	}
	return best, others
}

// TestVLLMsRouterChoosesForPrefill has vLLM's own router choose the engine that computes a prefill for another one. Its blocks have 16 tokens then.
func TestVLLMsRouterChoosesForPrefill(t *testing.T) {
	testclass.Peers(t)
	need(t, vllmRouter)
	const size = 16
	w, servers, endpoints := publishedAlone(t)
	args := []string{"--vllm-pd-disaggregation", "--policy", "round_robin", "--prefill-policy", "kv_aware", "--decode", "http://" + completions(t)}
	for i, s := range servers {
		args = append(args, "--prefill", "http://"+s, "--pd-kv-events", "http://"+s+"="+endpoints[i])
	}
	var all [][]uint32
	for number, e := range w.engines {
		prompt := make([]uint32, 2*size)
		for i := range prompt {
			prompt[i] = uint32(100*number + i)
		}
		all = append(all, prompt)
		if _, err := e.publisher.Publish(wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Tokens: prompt, BlockSize: size, Medium: "GPU"}); err != nil {
			t.Fatal(err)
		}
	}
	r := startRouterOfVLLM(t, args...)
	await(t, "each prompt", servers, func() (got []string) {
		for i, prompt := range all {
			w.engines[i].flush() // the first batch may have been lost
			got = append(got, r.route(prompt))
		}
		return got
	})
}
