package vllm_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// prepared has a directory for each version of vLLM that make vllm has prepared.
const prepared = "../../bin/vllm"

// versionVariable selects a version of vLLM; without it, the newest one that is prepared is tested.
const versionVariable = "KVCAST_VLLM_VERSION"

// engineTimeout bounds the wait for an answer of an engine. It starts in one minute to three on two busy cores.
const engineTimeout = 20 * time.Minute

// newest is the version with which every engine must start.
const newest = "0.32.0"

// version is that of vLLM that is tested.
var version string

// installation returns the absolute path of the version of vLLM to test, and skips the test if none is prepared.
func installation(t *testing.T) string {
	t.Helper()
	pattern := os.Getenv(versionVariable)
	if pattern == "" {
		pattern = "*"
	}
	found, err := filepath.Glob(filepath.Join(prepared, pattern, "pins"))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Skipf("%s is missing: run make vllm to prepare it", filepath.Join(prepared, pattern))
	}
	dir, err := filepath.Abs(filepath.Dir(found[len(found)-1]))
	if err != nil {
		t.Fatal(err)
	}
	version = filepath.Base(dir)
	return dir
}

// engineConfig is what testdata/engine.py is started with.
type engineConfig struct {
	Model    string            `json:"model"` // in models of the installation
	Adapters map[string]string `json:"adapters,omitempty"`
	Events   map[string]any    `json:"events"`
	Args     map[string]any    `json:"args"`
	Offload  int               `json:"offload_bytes,omitempty"` // of host memory; 0 for no connector
	Files    map[string]string `json:"files,omitempty"`         // settings of a tier of files below the host memory
	Mooncake string            `json:"mooncake,omitempty"`      // the directory of Mooncake's package; empty for no connector
	Needs    string            `json:"needs,omitempty"`         // a module without which the test is skipped; versions before newest may also fail with the first prompt
	env      []string
}

// prompt is a request to an engine.
type prompt struct {
	Tokens     []uint32 `json:"token_ids"`
	Embeddings int      `json:"embeddings,omitempty"` // instead of tokens
	Salt       string   `json:"cache_salt,omitempty"`
	LoRA       string   `json:"lora,omitempty"`
	MaxTokens  int      `json:"max_tokens"`
	ReportMode string   `json:"report_mode,omitempty"`
}

// output is the outcome of a prompt.
type output struct {
	Cached int      `json:"cached"` // tokens
	Device int      `json:"device"` // tokens that were in device memory
	Tokens []uint32 `json:"token_ids"`
}

// state is an answer of an engine.
type state struct {
	Seq         int64               `json:"seq"`  // of the last batch published, -1 for none
	Pool        map[string][]uint64 `json:"pool"` // hashes of the cached blocks by attention group
	Preemptions int                 `json:"preemptions"`
	Outputs     []output            `json:"outputs"`
	Reset       bool                `json:"reset"`
	Error       string              `json:"error"`

	// Of the first answer.
	Bound      float64  `json:"bound"`  // when the publisher's socket was bound, in seconds since the Unix epoch
	Groups     []string `json:"groups"` // kinds of attention groups
	BlockSizes []int    `json:"block_sizes"`
	Fields     []string `json:"fields"` // of stores
	// PlainAdapters is whether a block's hash has the adapter's name as it has a cache salt: equal ones have the same blocks.
	PlainAdapters bool   `json:"plain_adapters"`
	RandomHashes  bool   `json:"random_hashes"` // whether block hashes differ after a restart, unless PYTHONHASHSEED is set
	ReportMode    bool   `json:"report_mode"`   // whether there is kv_cache_report_mode
	Lacks         string `json:"lacks"`         // the only field, if it lacks Needs
}

// engine is a process of testdata/engine.py.
type engine struct {
	t       *testing.T
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan []byte // closed when the engine has exited
	log     string      // file with its standard error
	state   state       // of the last answer
	first   state       // the first answer
	fails   bool        // may fail before its first answer to a prompt
	main    string      // the attention group that decides what is reused
	stopped bool
}

// startEngine starts an engine, waits until it is ready, and stops it with the test.
func startEngine(t *testing.T, cfg engineConfig) *engine {
	t.Helper()
	e := launchEngine(t, cfg)
	e.awaitReady()
	return e
}

// launchEngine starts an engine without waiting for it.
func launchEngine(t *testing.T, cfg engineConfig) *engine {
	t.Helper()
	dir := installation(t)
	cfg.Model = filepath.Join(dir, "models", cfg.Model)
	adapters := make(map[string]string)
	for name, adapter := range cfg.Adapters {
		adapters[name] = filepath.Join(dir, "models", adapter)
	}
	cfg.Adapters = adapters
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "engine.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	e := &engine{t: t, answers: make(chan []byte), log: file.Name(), fails: cfg.Needs != "" && version != newest}
	e.cmd = exec.Command(filepath.Join(dir, "venv/bin/python"), "testdata/engine.py", string(text)) //nolint:noctx // stop ends it
	e.cmd.Env = environment(append(cfg.env, "VLLM_ENABLE_V1_MULTIPROCESSING=0")...)
	e.cmd.Stderr = file
	out, outErr := e.cmd.StdoutPipe()
	var inErr error
	e.in, inErr = e.cmd.StdinPipe()
	if err := errors.Join(outErr, inErr, e.cmd.Start()); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(e.answers)
		for lines := bufio.NewReader(out); ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			e.answers <- line
		}
	}()
	t.Cleanup(e.stop)
	return e
}

// environment returns the environment of vLLM: one thread, a GB for blocks, and no network.
func environment(more ...string) []string {
	return append(append(os.Environ(),
		"VLLM_WORKER_MULTIPROC_METHOD=fork", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
		"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "PYTHONDONTWRITEBYTECODE=1"), more...)
}

// awaitReady waits until the engine takes requests.
func (e *engine) awaitReady() {
	e.t.Helper()
	e.receive()
	if e.state.Lacks != "" {
		e.t.Skipf("vLLM %s lacks %s", version, e.state.Lacks)
	}
	e.first = e.state
	main := slices.IndexFunc(e.state.Groups, func(kind string) bool {
		return strings.Contains(kind, "FullAttention") || strings.Contains(kind, "MLA")
	})
	e.main = fmt.Sprint(max(main, 0))
}

// ask sends a request, and waits for the answer.
func (e *engine) ask(request any) {
	e.t.Helper()
	text, err := json.Marshal(request)
	if err == nil {
		_, err = e.in.Write(append(text, '\n'))
	}
	if err != nil {
		e.t.Fatalf("ask the engine: %v\n%s", err, e.logTail())
	}
	e.receive()
}

func (e *engine) receive() {
	e.t.Helper()
	timeout := time.NewTimer(engineTimeout)
	defer timeout.Stop()
	select {
	case line, ok := <-e.answers:
		if !ok && e.fails {
			lines := strings.Split(strings.TrimSpace(e.logTail()), "\n")
			e.t.Skipf("vLLM %s cannot run this model: %s", version, lines[len(lines)-1])
		}
		if !ok {
			e.t.Fatalf("vLLM %s has ended:\n%s", version, e.logTail())
		}
		e.state = state{}
		if err := json.Unmarshal(line, &e.state); err != nil {
			e.t.Fatalf("decode %q: %v", line, err)
		}
		if e.state.Error != "" && e.fails {
			e.t.Skipf("vLLM %s cannot run this model: %s", version, e.state.Error)
		}
		if e.state.Error != "" {
			e.t.Fatalf("the engine has failed: %s\n%s", e.state.Error, e.logTail())
		}
	case <-timeout.C:
		e.t.Fatalf("the engine has not answered in %v:\n%s", engineTimeout, e.logTail())
	}
}

// generate implements subject.
func (e *engine) generate(prompts ...prompt) []output {
	e.t.Helper()
	e.ask(map[string]any{"generate": prompts})
	e.fails = false
	return e.state.Outputs
}

// reset resets the prefix cache.
func (e *engine) reset() {
	e.t.Helper()
	e.ask(map[string]any{"reset": false})
	if !e.state.Reset { // a connector may keep blocks until the next step
		e.generate(prompt{Tokens: newWorkload(97).tokens(blockSize / 2), MaxTokens: 2})
		e.ask(map[string]any{"reset": false})
	}
	if !e.state.Reset {
		e.t.Fatalf("the engine has not reset its prefix cache:\n%s", e.logTail())
	}
}

// seq implements subject.
func (e *engine) seq() int64 { return e.state.Seq }

// hashes implements subject.
func (e *engine) hashes() []uint64 {
	list := slices.Clone(e.state.Pool[e.main])
	slices.Sort(list)
	return list
}

// boundAt returns the time at which the publisher's socket was bound.
func (e *engine) boundAt() time.Time { return time.UnixMicro(int64(e.first.Bound * 1e6)) }

// tells implements subject.
func (e *engine) tells(field string) bool { return slices.Contains(e.first.Fields, field) }

// logTail returns the end of what the engine has written.
func (e *engine) logTail() string {
	text, err := os.ReadFile(e.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-8000):])
}

// kill ends the engine with SIGKILL.
func (e *engine) kill() {
	e.t.Helper()
	if err := e.cmd.Process.Kill(); err != nil {
		e.t.Fatal(err)
	}
	e.wait()
}

// stop ends the engine.
func (e *engine) stop() {
	if e.stopped {
		return
	}
	_ = e.in.Close()
	ended := time.AfterFunc(engineTimeout, func() { _ = e.cmd.Process.Kill() })
	defer ended.Stop()
	e.wait()
}

func (e *engine) wait() {
	for range e.answers {
	}
	_ = e.cmd.Wait()
	e.stopped = true
}
