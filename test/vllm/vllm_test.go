package vllm_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	exact    = kvcastv1.Trust_TRUST_EXACT
	upper    = kvcastv1.Trust_TRUST_UPPER_BOUND
	degraded = kvcastv1.Trust_TRUST_DEGRADED
)

// args returns arguments of LLM.
func args(blocks int, more map[string]any) map[string]any {
	all := map[string]any{
		"block_size":              blockSize, // the CPU's attention takes multiples of 32
		"num_gpu_blocks_override": blocks, "max_model_len": 1024, "max_num_seqs": 8,
	}
	for name, value := range more {
		all[name] = value
	}
	return all
}

// requests returns the number of requests of a scenario.
func requests(quick int) int { return testclass.Size(quick, 5*quick) }

// TestLlama has the scenarios of an engine with one attention group and room for replays of all its batches.
func TestLlama(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	e := startEngine(t, engineConfig{
		Model: "llama", Adapters: map[string]string{"a": "adapter-a", "b": "adapter-b"}, Events: at.events(),
		Args: args(120, map[string]any{"enable_lora": true, "max_lora_rank": 8, "max_loras": 2, "enable_prompt_embeds": true}),
	})
	k := startRelay(t, at.worker()...)
	warmUp(t, e, k)

	s := newScenario(t, "plain", e, k)
	s.run(newWorkload(1), requests(25))

	s = newScenario(t, "eviction: more prompts than blocks", e, k)
	s.run(newWorkload(2), requests(80))

	s = newScenario(t, "cache_salt: three tenants", e, k)
	w := newWorkload(3)
	w.salts = []string{"", "tenant-a", "tenant-b"}
	s.run(w, requests(60))

	s = newScenario(t, "LoRA: two adapters", e, k)
	w = newWorkload(4)
	w.loras = []string{"", "a", "b"}
	s.run(w, requests(60))

	s = newScenario(t, "LoRA with cache_salt", e, k)
	w = newWorkload(5)
	w.salts, w.loras = []string{"", "tenant-a", "a"}, []string{"", "a", "b"}
	if e.first.PlainAdapters {
		t.Logf("left out: a salt with the name of an adapter: vLLM %s reuses the blocks of one for the other", version)
		w.salts[2] = "tenant-b"
	}
	s.run(w, requests(60))

	s = newScenario(t, "reset_prefix_cache, after the next step", e, k)
	w = newWorkload(6)
	for range 3 {
		s.run(w, requests(10))
		e.reset()
		if got := len(e.hashes()); got != 0 {
			t.Errorf("the engine has %d blocks after a reset", got)
		}
		// The event comes with the next step: kvcast cannot know before.
		before, _ := k.match(k.await(e), w.chats[len(w.chats)-1])
		s.note = fmt.Sprintf("before that step %s with %d tokens of 0", before, before.tokens)
		e.generate(prompt{Tokens: w.tokens(2 * blockSize), MaxTokens: 1})
		s.comparePool()
	}

	s = newScenario(t, "prompt embeddings between prompts", e, k)
	w = newWorkload(7)
	for n := range 5 {
		e.generate(prompt{Embeddings: (n%2 + 2) * blockSize, MaxTokens: 2})
		s.comparePool()
		s.run(w, requests(4))
	}

	lateStart(t, e, at)
	crashes(t, e, at)

	if !e.first.ReportMode {
		t.Logf("left out: vLLM %s has no kv_cache_report_mode", version)
		return
	}
	s = newScenario(t, "kv_cache_report_mode full, mixed", e, k, exact, degraded)
	w = newWorkload(8)
	for range requests(60) {
		p := w.next()
		if w.rng.IntN(2) == 0 {
			p.ReportMode = "full"
		}
		w.answered(p, s.request(p))
	}
	e.reset()
	e.generate(prompt{Tokens: w.tokens(2 * blockSize), MaxTokens: 1})
	s.comparePool()
	s.note = "after a reset " + k.trust().String()
}

// warmUp sends a first request, whose batch shows that the replay socket is the engine's, and returns the hash of one of its blocks: that of the same tokens in all engines.
func warmUp(t *testing.T, e subject, k *relay) (hash uint64) {
	t.Helper()
	k.await(e)
	before := e.hashes()
	e.generate(prompt{Tokens: newWorkload(99).tokens(3*blockSize + 5), MaxTokens: 2})
	k.await(e)
	for _, hash = range e.hashes() {
		if !slices.Contains(before, hash) {
			return hash
		}
	}
	t.Fatal("the engine has stored nothing")
	return 0
}

// lateStart reads an engine that has had requests.
func lateStart(t *testing.T, e *engine, at ports) {
	t.Helper()
	k := startRelay(t, at.worker()...)
	s := newScenario(t, "late start, replay of all batches", e, k, exact, degraded)
	s.comparePool()
	s.run(newWorkload(20), requests(15))
	if got := k.trust(); got.trust != whole(e) {
		t.Errorf("late start: the rank is %s; want %s after a live batch", got, whole(e))
	}
}

// crashes kills kvcast while an engine goes on, and starts it again.
func crashes(t *testing.T, e *engine, at ports) {
	t.Helper()
	for _, journal := range []string{"memory", "file:" + t.TempDir()} {
		k := startRelay(t, append(at.worker(), "--journal", journal)...)
		name := "kill -9 of kvcast, journal " + journal[:min(len(journal), 6)]
		if journal != "memory" {
			name = "kill -9 of kvcast, journal file:DIR"
		}
		s := newScenario(t, name, e, k, exact, degraded)
		w := newWorkload(21)
		for range 3 {
			s.run(w, requests(6))
			k.crash()
			for range 5 {
				p := w.next()
				w.answered(p, e.generate(p)[0].Tokens)
			}
			k.start()
			s.comparePool()
		}
		s.run(w, requests(6))
		if got := k.trust(); got.trust != whole(e) {
			t.Errorf("%s: the rank is %s; want %s after a live batch", name, got, whole(e))
		}
	}
}

// TestSmallBuffer has the scenarios of an engine with few blocks and a short replay buffer.
func TestSmallBuffer(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	const bufferSteps = 8
	events := at.events()
	events["buffer_steps"] = bufferSteps
	cfg := engineConfig{Model: "llama", Events: events, Args: args(40, nil)}
	e := startEngine(t, cfg)
	proxy := harness.NewProxy(t, fmt.Sprintf("127.0.0.1:%d", at.publish))
	k := startRelay(t, "--worker", fmt.Sprintf("name=e,model=%s,connect=tcp://%s,replay=tcp://127.0.0.1:%d", model, proxy.Addr(), at.replay))
	hash := warmUp(t, e, k)

	s := newScenario(t, "preemption: eight requests, 40 blocks", e, k)
	w := newWorkload(30)
	for range requests(5) {
		var together []prompt
		for range 8 {
			together = append(together, prompt{Tokens: w.tokens(5*blockSize + w.rng.IntN(blockSize)), MaxTokens: 70})
		}
		e.generate(together...)
		s.comparePool()
		for _, p := range together[:3] {
			p.MaxTokens = 1
			s.request(p)
		}
	}
	if s.note = fmt.Sprintf("%d preemptions", e.state.Preemptions); e.state.Preemptions == 0 {
		t.Error("no request was preempted")
	}

	s = newScenario(t, "batches lost, within buffer_steps", e, k, exact, degraded) // SOURCE_DOWN for a moment
	proxy.Retarget("")
	proxy.Cut()
	w = newWorkload(31)
	lose(e, w, bufferSteps/2)
	proxy.Retarget(fmt.Sprintf("127.0.0.1:%d", at.publish))
	s.comparePool()
	s.run(w, requests(15))
	if got := k.trust(); got.trust != whole(e) {
		t.Errorf("the rank is %s after lost batches were replayed; want %s", got, whole(e))
	}

	s = newScenario(t, "batches lost, beyond buffer_steps", e, k, degraded)
	proxy.Retarget("")
	proxy.Cut()
	lose(e, w, 4*bufferSteps)
	proxy.Retarget(fmt.Sprintf("127.0.0.1:%d", at.publish))
	k.await(e)
	if got := k.trust(); !slices.Contains(got.reasons, kvcastv1.DegradedReason_DEGRADED_REASON_GAP) {
		t.Errorf("the rank is %s; want DEGRADED GAP", got)
	}
	s.run(newWorkload(31), requests(25))
	e.reset()
	e.generate(prompt{Tokens: w.tokens(2 * blockSize), MaxTokens: 1})
	s.comparePool()
	s.note = "after a reset " + k.trust().String()

	lose(e, w, 2*bufferSteps) // the clear is not replayed any more
	late := startRelay(t, at.worker()...)
	s = newScenario(t, "late start, beyond buffer_steps", e, late, degraded)
	s.run(w, requests(15))
	late.stop()

	restart(t, e, cfg, k, hash)
}

// lose has an engine publish at least so many batches.
func lose(e *engine, w *workload, batches int64) {
	e.t.Helper()
	for end := e.state.Seq + batches; e.state.Seq < end; {
		p := w.next()
		p.MaxTokens = 1
		w.answered(p, e.generate(p)[0].Tokens)
	}
}

// blindLimit is how long kvcast may need to read a restarted engine: the time between two attempts to connect is at most 2 s, plus what a busy machine needs.
const blindLimit = 20 * time.Second

// restart kills an engine with SIGKILL and starts it again. hash is that of the first engine's warmUp.
func restart(t *testing.T, e *engine, cfg engineConfig, k *relay, hash uint64) {
	t.Helper()
	s := newScenario(t, "kill -9 of the engine", e, k, exact, degraded)
	s.run(newWorkload(40), requests(10))
	e.kill()
	k.awaitState("the end of the connection", func(w *kvcastv1.WorkerStatus) bool {
		return w.GetSources()[0].GetState() != kvcastv1.SourceState_SOURCE_STATE_LIVE
	})
	next := launchEngine(t, cfg)
	live := k.awaitLive()
	next.awaitReady()
	s.engine = next
	select {
	case connected := <-live:
		blind := connected.Sub(next.boundAt())
		if s.note = fmt.Sprintf("read %.1f s after its socket was bound", blind.Seconds()); blind > blindLimit {
			t.Errorf("kvcast needed %v to read a restarted engine; want %v at most", blind, blindLimit)
		}
	case <-time.After(harness.Timeout):
		t.Fatalf("kvcast does not read the restarted engine: %v", k.status())
	}
	if got := warmUp(t, next, k); next.first.RandomHashes {
		t.Logf("block hash %x, and %x before the restart", got, hash)
	} else if got != hash {
		t.Errorf("the block hash of the same tokens is %x, and was %x before the restart; want the same", got, hash)
	}
	s.run(newWorkload(40), requests(15))
	if got := k.trust(); got.trust != whole(next) {
		t.Errorf("the rank is %s after a restart of the engine; want %s", got, whole(next))
	}
}

// TestEngineConnects has an engine that connects to kvcast, as pods of llm-d do, and names its worker in the topic.
func TestEngineConnects(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	e := launchEngine(t, engineConfig{
		Model: "llama", env: []string{"PYTHONHASHSEED=7"}, Args: args(60, nil),
		Events: map[string]any{
			"endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", at.publish), "replay_endpoint": fmt.Sprintf("tcp://*:%d", at.replay),
			"topic": "kv@127.0.0.1@" + model,
		},
	})
	k := startRelay(t, "--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=%d", at.publish, at.replay))
	e.awaitReady()
	e.generate(prompt{Tokens: newWorkload(98).tokens(blockSize + 5), MaxTokens: 2}) // names the worker
	t.Logf("block hash %x with PYTHONHASHSEED=7", warmUp(t, e, k))
	s := newScenario(t, "llm-d: the engine connects to kvcast", e, k)
	s.run(newWorkload(50), requests(50))
}

// followed is the trust in answers for an engine with several attention groups: kvcast computes its hashes, unless they have a random seed.
func followed(e *engine) kvcastv1.Trust {
	if e.first.RandomHashes {
		return upper
	}
	return exact
}

// TestHybrid has an engine with sliding windows beside full attention.
func TestHybrid(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	e := startEngine(t, engineConfig{Model: "gemma3", Events: at.events(), Args: args(160, nil)})
	if len(e.first.Groups) > 1 && !e.tells("kv_cache_spec_kind") {
		t.Skipf("vLLM %s does not tell which of %v a block is of: kvcast follows the first", version, e.first.Groups)
	}
	k := startRelay(t, at.worker()...)
	warmUp(t, e, k)
	want := followed(e)
	if len(e.first.Groups) == 1 { // before stores named groups, vLLM with events had one group for all layers
		want = exact
	}
	s := newScenario(t, "hybrid: Gemma 3, sliding windows", e, k, want)
	s.run(newWorkload(60), requests(80))
	if s.under > 0 {
		t.Errorf("%d answers are below what the engine has reused; want upper bounds", s.under)
	}
	s.note = fmt.Sprintf("%d groups", len(e.first.Groups))
}

// TestMamba has an engine with states of linear attention beside full attention.
func TestMamba(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	e := startEngine(t, engineConfig{
		Model: "qwen3-next", Events: at.events(), Args: args(120, map[string]any{"enable_prefix_caching": true}),
		Needs: "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
	})
	k := startRelay(t, at.worker()...)
	warmUp(t, e, k)
	s := newScenario(t, "hybrid: Qwen3-Next, linear attention", e, k, followed(e))
	s.run(newWorkload(65), requests(60))
	if s.under > 0 {
		t.Errorf("%d answers are below what the engine has reused; want upper bounds", s.under)
	}
	s.note = fmt.Sprintf("block sizes %v", e.first.BlockSizes)
}

// TestOffload has an engine that offloads blocks to host memory, which has room for twice as many blocks as the device.
func TestOffload(t *testing.T) {
	testclass.Peers(t)
	at := freePorts(t)
	e := startEngine(t, engineConfig{Model: "llama", Events: at.events(), Args: args(60, nil), Offload: 2 << 20})
	k := startRelay(t, at.worker()...)
	warmUp(t, e, k)
	s := newScenario(t, "CPU offload, device memory", e, k)
	s.all = newScenario(t, "CPU offload, all tiers", e, k)
	w := newWorkload(70)
	s.run(w, requests(120))
	host := len(k.hashes(kvcastv1.Tier_TIER_HOST_PINNED))
	if s.note = fmt.Sprintf("%d blocks on the host", host); host == 0 {
		t.Error("kvcast has no blocks in host memory")
	}

	s = newScenario(t, "CPU offload, device memory after a reset", e, k)
	s.all = newScenario(t, "CPU offload, all tiers after a reset", e, k, exact, degraded)
	e.reset()
	e.generate(prompt{Tokens: w.tokens(2 * blockSize), MaxTokens: 1}) // with the event
	s.run(w, requests(30))
}
