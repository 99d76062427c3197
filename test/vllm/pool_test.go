package vllm_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// poolWorld is engines that load from a pool, and kvcast, to which they are e0, e1 and so on.
type poolWorld struct {
	t       *testing.T
	relay   *relay
	pool    string
	engines []*engine
	// stored returns the hashes that events have of the blocks that the store has, ascending, and step makes the engines send what they have to say; nil: nothing does.
	stored func() []uint64
	step   func()
	// all has the blocks in all tiers of an engine count, and not only those in device memory.
	all    bool
	row    *scenario
	loaded int // requests for which blocks were loaded
}

func newPoolWorld(t *testing.T, name string, k *relay, pool string, engines ...*engine) *poolWorld {
	t.Helper()
	row := &scenario{t: t, name: name, engine: engines[0], trust: make(map[string]int)}
	table.mu.Lock()
	defer table.mu.Unlock()
	table.rows = append(table.rows, row)
	return &poolWorld{t: t, relay: k, pool: pool, engines: engines, row: row}
}

// request waits until kvcast has the blocks of the store and of the engines, asks it for a prompt, sends it to an engine, and compares.
func (w *poolWorld) request(e *engine, p prompt) []uint32 {
	w.t.Helper()
	w.await()
	answer, err := w.relay.client.MatchPrefix(harness.Context(w.t), &kvcastv1.MatchPrefixRequest{
		Model: "llama", Prompts: []*kvcastv1.Prompt{{TokenIds: p.Tokens, LoraName: p.LoRA, CacheSalt: p.Salt, ExcludeLastToken: true}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	name := fmt.Sprint("e", slices.Index(w.engines, e))
	var predicted prediction
	inPool := 0
	for _, match := range answer.GetPrompts()[0].GetMatches() {
		if match.GetWorker() != name {
			continue
		}
		device, all := w.relay.prediction([]*kvcastv1.PrefixMatch{match})
		if predicted.tokens = device.tokens; w.all {
			predicted.tokens = all.tokens
		}
		for _, pool := range match.GetPools() {
			inPool = int(pool.GetTokens())
			predicted.tokens, predicted.trust, predicted.reasons = max(predicted.tokens, inPool), pool.GetTrust(), pool.GetReasons()
		}
	}
	out := e.generate(p)[0]
	w.row.want = []kvcastv1.Trust{predicted.trust}
	w.row.compare(p, predicted, out.Cached)
	if predicted.tokens != out.Cached {
		w.t.Errorf("request %d (%d tokens, adapter %q, salt %q) of %s: kvcast said %d tokens, of which the store has %d; the engine has reused %d, of which %d were in device memory", w.row.requests,
			len(p.Tokens), p.LoRA, p.Salt, name, predicted.tokens, inPool, out.Cached, out.Device)
	}
	if out.Cached > out.Device {
		w.loaded++
	}
	return out.Tokens
}

// await waits until kvcast has the blocks of the store, and of the engines' device memory.
func (w *poolWorld) await() {
	w.t.Helper()
	state := ""
	defer func() {
		if w.t.Failed() {
			w.t.Logf("kvcast beside the store: %s", state)
		}
	}()
	harness.WaitFor(w.t, func() bool {
		if w.step != nil {
			w.step()
		}
		want, got := w.stored(), w.relay.hashesOf(w.pool, kvcastv1.Tier_TIER_EXTERNAL)
		state = "store: " + difference(want, got)
		equal := slices.Equal(want, got)
		for i, e := range w.engines {
			want, got := e.hashes(), w.relay.hashesOf(fmt.Sprint("e", i), kvcastv1.Tier_TIER_DEVICE)
			state += fmt.Sprintf("; device memory of e%d: %s", i, difference(want, got))
			equal = equal && slices.Equal(want, got)
		}
		return equal
	})
}

// hashOf returns the hash that events have of a block whose digest ends a text.
func hashOf(t *testing.T, text string) uint64 {
	t.Helper()
	hash, err := strconv.ParseUint(text[len(text)-16:], 16, 64)
	if err != nil {
		t.Fatalf("key %q: %v", text, err)
	}
	return hash
}
