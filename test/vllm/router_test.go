package vllm_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// routed is a row of the table of routing policies.
type routed struct {
	policy         string
	prompt, cached int            // tokens
	engines        map[string]int // requests by engine
	predictions    *kvcastv1.Accuracy
}

func (r *routed) hitRate() float64 { return 100 * float64(r.cached) / float64(r.prompt) }

func (r *routed) columns() []string {
	return []string{
		r.policy, fmt.Sprint(r.prompt), fmt.Sprint(r.cached), fmt.Sprintf("%.1f %%", r.hitRate()),
		fmt.Sprintf("%d, %d", r.engines["engine-0"], r.engines["engine-1"]),
		fmt.Sprintf("%d, %d, %d", r.predictions.GetExact(), r.predictions.GetOver(), r.predictions.GetUnder()),
	}
}

// TestRouter has the example router in front of two engines: conversations with each policy, and an engine that ends in mid-response.
func TestRouter(t *testing.T) {
	testclass.Peers(t)
	var engines []*served
	var workers []string
	for n := range 2 {
		at := freePorts(t)
		s := launchServed(t, at, 1, 300)
		engines = append(engines, s)
		workers = append(workers, "--worker", fmt.Sprintf("name=engine-%d,model=%s,block_size=%d,connect=tcp://127.0.0.1:%d,replay=tcp://127.0.0.1:%d,endpoint=%s",
			n, model, blockSize, at.publish, at.replay, strings.TrimPrefix(s.url, "http://")))
	}
	for _, s := range engines {
		s.awaitReady()
	}
	k := startRelay(t, workers...)
	harness.WaitFor(t, func() bool { return allLive(k) })
	var rows []*routed
	for _, policy := range []string{"round-robin", "prefix", "match"} {
		for _, s := range engines {
			s.forget()
		}
		before := accuracy(k)
		router := startRouter(t, k, policy)
		row := &routed{policy: policy, engines: make(map[string]int)}
		converse(row, router)
		router.stop()
		row.predictions = accuracy(k)
		row.predictions.Exact -= before.GetExact()
		row.predictions.Over -= before.GetOver()
		row.predictions.Under -= before.GetUnder()
		rows = append(rows, row)
		t.Logf("done: %s", strings.Join(row.columns(), " | "))
	}
	table.mu.Lock()
	table.routed = append(table.routed, rows...)
	table.mu.Unlock()
	for _, row := range rows[1:] {
		if row.hitRate() < rows[0].hitRate()+5 {
			t.Errorf("policy %s: hit rate %.1f %%; want 5 %% more than round robin's %.1f %%", row.policy, row.hitRate(), rows[0].hitRate())
		}
		if n := row.predictions.GetExact() + row.predictions.GetUnder(); row.predictions.GetOver() > 0 || n == 0 {
			t.Errorf("policy %s: %v; want some, and none too long", row.policy, row.predictions)
		}
		if a, b := row.engines["engine-0"], row.engines["engine-1"]; 4*min(a, b) < a+b {
			t.Errorf("policy %s: the engines had %d and %d requests; want at least a quarter each", row.policy, a, b)
		}
	}
	loseEngine(t, k, engines)
}

// allLive reports whether kvcast reads all sources of both workers.
func allLive(k *relay) bool {
	list, err := k.client.ListWorkers(harness.Context(k.t), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		k.t.Fatal(err)
	}
	live := 0
	for _, w := range list.GetWorkers() {
		if k.source(w).GetState() == kvcastv1.SourceState_SOURCE_STATE_LIVE {
			live++
		}
	}
	return live == 2
}

// accuracy returns how right the predictions for all workers were, by what routers have reported.
func accuracy(k *relay) *kvcastv1.Accuracy {
	k.t.Helper()
	list, err := k.client.ListWorkers(harness.Context(k.t), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		k.t.Fatal(err)
	}
	all := new(kvcastv1.Accuracy)
	for _, w := range list.GetWorkers() {
		for _, r := range w.GetRanks() {
			all.Exact += r.GetAccuracy().GetExact()
			all.Over += r.GetAccuracy().GetOver()
			all.Under += r.GetAccuracy().GetUnder()
		}
	}
	return all
}

// forget empties the prefix cache. The event comes with the next step.
func (s *served) forget() {
	s.t.Helper()
	s.post("/reset_prefix_cache", nil)
	s.post("/v1/completions", map[string]any{"model": model, "prompt": newWorkload(98).tokens(blockSize), "max_tokens": 1})
}

func (s *served) post(path string, body any) {
	s.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		s.t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.url+path, bytes.NewReader(text))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if _, err := s.do(request); err != nil {
		s.t.Fatalf("%v\n%s", err, s.logTail())
	}
}

// router is a process of the example router.
type router struct {
	t    *testing.T
	url  string
	stop func()
}

var routerLine = regexp.MustCompile(`msg=serving http=(\S+)`)

// startRouter starts the router, waits until it knows the engines, and stops it with the test.
func startRouter(t *testing.T, k *relay, policy string) *router {
	t.Helper()
	program, err := harness.Router()
	if err != nil {
		t.Fatal(err)
	}
	addr, err := k.process.Addr()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--kvcast", addr, "--listen", "127.0.0.1:0", "--policy", policy) //nolint:noctx // stop ends it
	log, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	r := &router{t: t}
	lines := bufio.NewReader(log)
	r.stop = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it reports what it has not reported yet
		_, _ = io.Copy(io.Discard, lines)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the router has ended with %v", err)
		}
	})
	t.Cleanup(r.stop)
	for r.url == "" {
		line, err := lines.ReadString('\n')
		if found := routerLine.FindStringSubmatch(line); found != nil {
			r.url = "http://" + found[1]
		} else if err != nil {
			t.Fatalf("start the router: %v: %s", err, line)
		}
	}
	harness.WaitFor(t, func() bool {
		status, _, _ := r.call(http.MethodGet, "/health", nil)
		return status == http.StatusOK
	})
	return r
}

// call sends a request, and returns the status of the response, the engine that it names, and its body.
func (r *router) call(method, path string, body any) (status int, engine, text string) {
	r.t.Helper()
	response := r.open(method, path, body)
	defer func() { _ = response.Body.Close() }()
	all, err := io.ReadAll(response.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return response.StatusCode, response.Header.Get("X-Engine"), string(all)
}

// open sends a request, and returns the response, whose body the caller closes.
func (r *router) open(method, path string, body any) *http.Response {
	r.t.Helper()
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			r.t.Fatal(err)
		}
	}
	request, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, bytes.NewReader(text))
	if err != nil {
		r.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		r.t.Fatal(err)
	}
	return response
}

// chunk is a response to a completion, or a part of one that is streamed, with the fields that the test reads.
type chunk struct {
	Choices []struct {
		Text    string `json:"text"`
		Message message
		Delta   message
	} `json:"choices"`
	Usage struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// conversation is a chat with an engine: as messages, as messages whose answers are streamed, or as a text.
type conversation struct {
	form     int
	messages []message
}

// say sends what a user says, counts the response, and adds it to the conversation.
func (c *conversation) say(row *routed, r *router, text string) {
	r.t.Helper()
	c.messages = append(c.messages, message{"user", text})
	body := map[string]any{"model": model, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "messages": c.messages}
	path := "/v1/chat/completions"
	switch c.form {
	case 1:
		body["stream"], body["stream_options"] = true, map[string]any{"include_usage": true}
	case 2:
		path = "/v1/completions"
		delete(body, "messages")
		var all []string
		for _, m := range c.messages {
			all = append(all, m.Content)
		}
		body["prompt"] = strings.Join(all, "\n")
	}
	status, engine, answer := r.call(http.MethodPost, path, body)
	if status != http.StatusOK {
		r.t.Fatalf("%s: status %d: %s", path, status, answer)
	}
	var said string
	for part := range strings.SplitSeq(answer, "\n") {
		part = strings.TrimPrefix(part, "data: ")
		if part == "" || part == "[DONE]" {
			continue
		}
		var ch chunk
		if err := json.Unmarshal([]byte(part), &ch); err != nil {
			r.t.Fatalf("decode %s: %v", part, err)
		}
		for _, choice := range ch.Choices {
			said += choice.Text + choice.Message.Content + choice.Delta.Content
		}
		row.prompt += ch.Usage.Prompt
		row.cached += ch.Usage.Details.Cached
	}
	row.engines[engine]++
	c.messages = append(c.messages, message{"assistant", said})
}

// converse has 18 conversations of six turns each, with four system prompts. Each engine has room for about half of them.
func converse(row *routed, r *router) {
	r.t.Helper()
	rng := rand.New(rand.NewPCG(7, 7))
	words := func(n int) string {
		text := make([]byte, n)
		for i := range text {
			text[i] = "abcdefghijklmnopqrstuvwxyz     "[rng.IntN(31)]
		}
		return string(text)
	}
	var systems []message
	for range 4 {
		systems = append(systems, message{"system", words(200 + rng.IntN(60))})
	}
	var all []*conversation
	for n := range 18 {
		all = append(all, &conversation{form: n % 3, messages: []message{systems[rng.IntN(len(systems))]}})
	}
	for range 6 {
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, c := range all {
			c.say(row, r, words(50+rng.IntN(100)))
		}
	}
}

// loseEngine kills an engine while it streams a response. Its client gets an incomplete response, and all later requests have an answer of the other engine.
func loseEngine(t *testing.T, k *relay, engines []*served) {
	t.Helper()
	r := startRouter(t, k, "match")
	prompt := newWorkload(97).tokens(4 * blockSize)
	response := r.open(http.MethodPost, "/v1/completions", map[string]any{"model": model, "prompt": prompt, "max_tokens": 1200, "ignore_eos": true, "stream": true})
	defer func() { _ = response.Body.Close() }()
	if _, err := bufio.NewReader(response.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	lost := response.Header.Get("X-Engine")
	n := slices.Index([]string{"engine-0", "engine-1"}, lost)
	if n < 0 {
		t.Fatalf("the response names the engine %q", lost)
	}
	engines[n].kill()
	if rest, err := io.ReadAll(response.Body); err == nil || bytes.Contains(rest, []byte("[DONE]")) {
		t.Errorf("the response is complete (error %v) although its engine was killed: %s", err, rest[max(0, len(rest)-300):])
	}
	for range 6 { // the first one finds out
		status, engine, text := r.call(http.MethodPost, "/v1/completions", map[string]any{"model": model, "prompt": prompt, "max_tokens": 2})
		if status != http.StatusOK || engine == lost {
			t.Errorf("after %s was killed: status %d of %s: %s", lost, status, engine, text)
		}
	}
	for path, want := range map[string]string{"/health": "ok", "/v1/models": `"id":"` + model + `"`, "/metrics": `router_requests_total{worker="` + lost} {
		if status, _, text := r.call(http.MethodGet, path, nil); status != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: status %d, %s; want %s", path, status, text, want)
		}
	}
}
