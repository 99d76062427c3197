package pipeline_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// cache is what one source of a worker holds: prompts' prefixes, each written as
// the contents of its blocks. Each source has names of its own for them.
type cache struct {
	source int
	held   map[string]int // how often
}

// name is what the source calls a prefix.
func (c *cache) name(names map[uint64]string, prefix string) uint64 {
	h := uint64(c.source+1) << 32
	for _, b := range []byte(prefix) {
		h = h*31 + uint64(b)
	}
	names[h] = prefix
	return h
}

// stored is the event that a source sends when it caches a prompt from a block on.
func (c *cache) stored(names map[uint64]string, prompt string, from int) wire.Event {
	e := wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 1}
	if from > 0 {
		e.HasParent, e.Parent = true, c.name(names, prompt[:from])
	}
	for i := from; i < len(prompt); i++ {
		e.BlockHashes = append(e.BlockHashes, c.name(names, prompt[:i+1]))
		e.TokensHashes = append(e.TokensHashes, uint64(prompt[i]))
		c.held[prompt[:i+1]]++
	}
	return e
}

// TestRouterHoldsTheUnionOfTheSources has two or three caches that call the same
// prompts by other names, and nothing that is lost: a router has, each once, the
// prefixes that any of them holds.
func TestRouterHoldsTheUnionOfTheSources(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := newSubject(pipeline.Config{MaxBlocks: rapid.IntRange(1, 4).Draw(t, "max blocks")})
		if err != nil {
			t.Fatal(err)
		}
		engines := []ingest.Engine{ingest.EngineVLLM, ingest.EngineKVBM, ingest.EngineTRTLLM}[:rapid.IntRange(2, 3).Draw(t, "sources")]
		sharing("", engines...).on(s)
		caches, names := make([]*cache, len(engines)), make(map[uint64]string)
		for i := range caches {
			caches[i] = &cache{i, make(map[string]int)}
		}
		r := &router{holdings: make(holdings), applied: make(map[string]int)}
		for step := range rapid.IntRange(1, 40).Draw(t, "steps") {
			c := caches[rapid.IntRange(0, len(caches)-1).Draw(t, "source")]
			var next call
			switch rapid.IntRange(0, 11).Draw(t, "step") {
			case 0:
				c.held = make(map[string]int)
				next = batch(cleared())
			case 1:
				c.held = make(map[string]int)
				next = restarted(0)
			case 2, 3, 4, 5:
				all := sortedKeys(c.held)
				if len(all) == 0 {
					continue
				}
				prefix := rapid.SampledFrom(all).Draw(t, "removed")
				if c.held[prefix]--; c.held[prefix] == 0 {
					delete(c.held, prefix)
				}
				next = batch(remove(c.name(names, prefix)))
			default:
				prompt := rapid.StringMatching("[ab]{1,5}").Draw(t, "prompt")
				from := 0
				for from < len(prompt)-1 && c.held[prompt[:from+1]] > 0 {
					from++
				}
				next = batch(c.stored(names, prompt, from))
			}
			switch {
			case next.Batch != nil:
				next.Batch.Source = c.source
			case next.Restarted != nil:
				next.Restarted.Source = c.source
			}
			next.on(s)
			r.apply(s.journal.all())
			want, got := make(map[string]int), make(map[string]int)
			for _, c := range caches {
				for prefix := range c.held {
					want[prefix] = 1
				}
			}
			for h := range r.holdings[place{testWorker, 0, kvcastv1.Tier_TIER_DEVICE}] {
				got[names[h]]++
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("prefixes after step %d (-want +got):\n%s", step, diff)
			}
		}
		if err := s.journal.err(); err != nil {
			t.Fatal(err)
		}
	})
}

func sortedKeys(m map[string]int) []string { return slices.Sorted(maps.Keys(m)) }
