package pipeline_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// cache is the cache of one of a worker's sources: prefixes of prompts, each written as the
// contents of its blocks. Names differ by source, and may differ by incarnation.
type cache struct {
	source, incarnation int
	blocks              map[string]int // copies by prefix
	// named are its current and former names of prefixes, as long as any cache has them.
	named map[string]uint64
}

// name returns the source's name of a prefix.
func (c *cache) name(names map[uint64]string, prefix string) uint64 {
	h := uint64(c.source+1)<<32 + uint64(c.incarnation)<<48
	for _, b := range []byte(prefix) {
		h = h*31 + uint64(b)
	}
	names[h], c.named[prefix] = prefix, h
	return h
}

// stored returns the event that a source sends when it caches a prompt from a block on, with
// the name of that block's parent.
func (c *cache) stored(names map[uint64]string, prompt string, from int, parent uint64) wire.Event {
	e := wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 1}
	if from > 0 {
		e.HasParent, e.Parent = true, parent
	}
	for i := from; i < len(prompt); i++ {
		e.BlockHashes = append(e.BlockHashes, c.name(names, prompt[:i+1]))
		e.TokensHashes = append(e.TokensHashes, uint64(prompt[i]))
		c.blocks[prompt[:i+1]]++
	}
	return e
}

// union returns the prefixes that any of the caches has.
func union(caches []*cache) map[string]int {
	all := make(map[string]int)
	for _, c := range caches {
		for prefix := range c.blocks {
			all[prefix] = 1
		}
	}
	return all
}

// wrongParents returns the blocks stored with a wrong parent, or with a name of the parent
// that the router does not have.
func wrongParents(entries []*kvcastv1.Entry, names map[uint64]string, present map[uint64]bool) (wrong []string) {
	for _, entry := range entries {
		for _, e := range entry.GetEvents() {
			s := e.GetStored()
			if s == nil {
				continue
			}
			first := names[s.GetBlockHashes()[0]]
			parent := s.GetParentHash()
			if s.ParentHash != nil != (len(first) > 1) || s.ParentHash != nil && (names[parent] != first[:len(first)-1] || !present[parent]) {
				wrong = append(wrong, fmt.Sprintf("%s (%d) after %q (%d), present %t", first, s.GetBlockHashes()[0], names[parent], parent, present[parent]))
			}
		}
	}
	return wrong
}

// TestRouterStateIsTheUnionOfTheSources draws two or three caches with different names for
// the same prompts, and no loss: a router has exactly the union of their prefixes, each once
// and after its parent. A cache may continue a block that it has evicted itself, by any name
// that a cache has used, as long as another cache has it.
func TestRouterStateIsTheUnionOfTheSources(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := newSubject(pipeline.Config{MaxBlocks: rapid.IntRange(1, 4).Draw(t, "max blocks")})
		if err != nil {
			t.Fatal(err)
		}
		engines := []feed.Engine{feed.EngineVLLM, feed.EngineKVBM, feed.EngineTRTLLM}[:rapid.IntRange(2, 3).Draw(t, "sources")]
		sharing("", engines...).on(s)
		caches, names := make([]*cache, len(engines)), make(map[uint64]string)
		for i := range caches {
			caches[i] = &cache{source: i, blocks: make(map[string]int), named: make(map[string]uint64)}
		}
		r := newRouter()
		for step := range rapid.IntRange(1, 40).Draw(t, "steps") {
			c := caches[rapid.IntRange(0, len(caches)-1).Draw(t, "source")]
			var next call
			switch rapid.IntRange(0, 11).Draw(t, "step") {
			case 0:
				c.blocks = make(map[string]int)
				next = batch(cleared())
			case 1:
				c.blocks = make(map[string]int)
				if rapid.Bool().Draw(t, "other names") {
					c.incarnation++
				}
				next = restarted(0)
			case 2, 3, 4, 5:
				all := sortedKeys(c.blocks)
				if len(all) == 0 {
					continue
				}
				prefix := rapid.SampledFrom(all).Draw(t, "removed")
				if c.blocks[prefix]--; c.blocks[prefix] == 0 {
					delete(c.blocks, prefix)
				}
				next = batch(remove(c.name(names, prefix)))
			default:
				prompt := rapid.StringMatching("[ab]{1,5}").Draw(t, "prompt")
				// It may begin after any block that some cache has, under any name that a
				// cache has used.
				froms, parents := []int{0}, []uint64{0}
				for from := range len(prompt) - 1 {
					for _, other := range caches {
						if h := other.named[prompt[:from+1]]; h != 0 {
							froms, parents = append(froms, from+1), append(parents, h)
						}
					}
				}
				i := rapid.IntRange(0, len(froms)-1).Draw(t, "parent")
				next = batch(c.stored(names, prompt, froms[i], parents[i]))
			}
			switch {
			case next.Batch != nil:
				next.Batch.Source = c.source
			case next.Restarted != nil:
				next.Restarted.Source = c.source
			}
			before := len(s.journal.all()[testWorker])
			next.on(s)
			r.apply(s.journal.all())
			want, got := union(caches), make(map[string]int)
			for _, c := range caches {
				maps.DeleteFunc(c.named, func(prefix string, _ uint64) bool { return want[prefix] == 0 })
			}
			present := r.blocks[place{testWorker, 0, kvcastv1.Tier_TIER_DEVICE}]
			if wrong := wrongParents(s.journal.all()[testWorker][before:], names, present); wrong != nil {
				t.Fatalf("parents in step %d: %q", step, wrong)
			}
			for h := range present {
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
