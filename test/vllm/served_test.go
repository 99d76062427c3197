package vllm_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// served is vllm serve, with a process for each rank, and testdata/probe.py in them.
type served struct {
	t      *testing.T
	cmd    *exec.Cmd
	url    string
	log    string // file with its output
	probes string // directory of RANK.json
	ended  chan struct{}
}

// launchServed starts vllm serve with a number of ranks and of blocks, and stops it with the test.
func launchServed(t *testing.T, at ports, ranks, blocks int) *served {
	t.Helper()
	dir := installation(t)
	s := &served{t: t, url: fmt.Sprintf("http://127.0.0.1:%d", harness.FreePort(t)), log: filepath.Join(t.TempDir(), "serve.log"), probes: t.TempDir(), ended: make(chan struct{})}
	events, err := json.Marshal(at.events())
	if err != nil {
		t.Fatal(err)
	}
	events = append([]byte(`{"enable_kv_cache_events": true, "publisher": "zmq", `), events[1:]...)
	file, err := os.Create(s.log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	s.cmd = exec.Command(filepath.Join(dir, "venv/bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", filepath.Join(dir, "models/llama"), //nolint:noctx // stop ends it
		"--host", "127.0.0.1", "--port", s.url[len("http://127.0.0.1:"):], "--served-model-name", model, "--data-parallel-size", strconv.Itoa(ranks),
		"--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--block-size", strconv.Itoa(blockSize), "--num-gpu-blocks-override", strconv.Itoa(blocks),
		"--max-model-len", "2048", "--max-num-seqs", "8", "--enable-prompt-tokens-details", "--kv-events-config", string(events))
	s.cmd.Stdout, s.cmd.Stderr = file, file
	s.cmd.Env = environment("KVCAST_PROBE="+s.probes, "PYTHONPATH="+plugin(t), "VLLM_SERVER_DEV_MODE=1") // for /reset_prefix_cache
	s.cmd.SysProcAttr = ownGroup()
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.ended)
	}()
	t.Cleanup(s.stop)
	return s
}

// awaitReady waits until vllm serve takes requests.
func (s *served) awaitReady() {
	s.t.Helper()
	deadline := time.Now().Add(engineTimeout)
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for {
		if _, err := s.get("/health"); err == nil {
			return
		}
		select {
		case <-poll.C:
		case <-s.ended:
			s.t.Fatalf("vllm serve of vLLM %s has ended:\n%s", version, s.logTail())
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("vllm serve is not ready after %v:\n%s", engineTimeout, s.logTail())
		}
	}
}

// plugin returns a directory for PYTHONPATH in which testdata/probe.py is a plugin of vLLM.
func plugin(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile("testdata/probe.py")
	if err != nil {
		t.Fatal(err)
	}
	info := filepath.Join(dir, "kvcast_probe-1.dist-info")
	if err := os.Mkdir(info, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		filepath.Join(dir, "kvcast_probe.py"):   string(text),
		filepath.Join(info, "METADATA"):         "Metadata-Version: 2.1\nName: kvcast-probe\nVersion: 1\n",
		filepath.Join(info, "entry_points.txt"): "[vllm.general_plugins]\nkvcast_probe = kvcast_probe:plugin\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func (s *served) get(path string) ([]byte, error) {
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	return s.do(request)
}

func (s *served) do(request *http.Request) ([]byte, error) {
	client := http.Client{Timeout: engineTimeout}
	defer client.CloseIdleConnections()
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", request.Method, request.URL.Path, response.Status, body)
	}
	return body, err
}

func (s *served) logTail() string {
	text, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-8000):])
}

// servedRank is a dp rank of vllm serve. It implements subject.
type servedRank struct {
	*served
	rank int
}

func (r servedRank) generate(prompts ...prompt) []output {
	r.t.Helper()
	var outputs []output
	for _, p := range prompts {
		body, err := json.Marshal(map[string]any{"model": model, "prompt": p.Tokens, "max_tokens": p.MaxTokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
		if err != nil {
			r.t.Fatal(err)
		}
		request, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.url+"/v1/completions", bytes.NewReader(body))
		if err != nil {
			r.t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(r.rank))
		body, err = r.do(request)
		if err != nil {
			r.t.Fatalf("%v\n%s", err, r.logTail())
		}
		var answer struct {
			Choices []struct {
				Tokens []uint32 `json:"token_ids"`
			} `json:"choices"`
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
		}
		if err := json.Unmarshal(body, &answer); err != nil || len(answer.Choices) != 1 {
			r.t.Fatalf("decode %s: %v", body, err)
		}
		outputs = append(outputs, output{Cached: answer.Usage.Details.Cached, Tokens: answer.Choices[0].Tokens})
	}
	return outputs
}

// probe returns what the engine's process has written with its last batch.
func (r servedRank) probe() state {
	r.t.Helper()
	last := state{Seq: -1}
	text, err := os.ReadFile(filepath.Join(r.probes, fmt.Sprintf("%d.json", r.rank)))
	if os.IsNotExist(err) {
		return last
	}
	if err == nil {
		err = json.Unmarshal(text, &last)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return last
}

func (r servedRank) seq() int64 { return r.probe().Seq }

func (r servedRank) hashes() []uint64 {
	list := r.probe().Pool["0"]
	slices.Sort(list)
	return list
}

func (r servedRank) tells(field string) bool { return slices.Contains(r.probe().Fields, field) }

// TestDataParallel has vllm serve with two ranks.
func TestDataParallel(t *testing.T) {
	testclass.Peers(t)
	const ranks = 2
	at := ports{harness.FreePorts(t, ranks), harness.FreePorts(t, ranks)}
	server := launchServed(t, at, ranks, 80)
	server.awaitReady()
	sources, err := server.get("/kv_event_sources")
	t.Logf("/kv_event_sources: %s, %v", sources, err)
	k := startRelay(t, "--worker", fmt.Sprintf("name=e,model=%s,connect=tcp://127.0.0.1:%d,replay=tcp://127.0.0.1:%d,dp_size=%d", model, at.publish, at.replay, ranks))
	var rows []*scenario
	for rank := range ranks {
		of := k.ofRank(uint32(rank))
		warmUp(t, servedRank{server, rank}, of)
		rows = append(rows, newScenario(t, fmt.Sprintf("vllm serve, data parallel 2: rank %d", rank), servedRank{server, rank}, of))
	}
	w := newWorkload(80)
	for n := range requests(60) {
		rows[n%ranks].run(w, 1)
	}
}
