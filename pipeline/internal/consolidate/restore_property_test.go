package consolidate

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

const (
	drawnSources   = 3
	drawnHashes    = 10 // block hashes are less than this
	drawnMaxBlocks = 6
)

// bounded is a tracker whose budget of blocks other workers share.
type bounded struct {
	*Tracker
	blocks, attributes *budget.Budget
	counts             Counts
}

func newBounded(limit int64) *bounded {
	b := &bounded{blocks: budget.New("blocks", limit), attributes: budget.New("attribute_bytes", 600)}
	b.Tracker = New(drawnSources, drawnMaxBlocks, b.blocks, b.attributes, &b.counts)
	return b
}

// drawnStep is a call of a tracker, or a change of what other workers use. It returns the result as text.
type drawnStep func(*bounded) string

// drawStep draws the next step. Small numbers are drawn most often. Removes take account of announcements only
// when all children are counted.
func drawStep(t *rapid.T) (text string, step drawnStep) {
	source := rapid.IntRange(0, drawnSources-1).Draw(t, "source")
	hash := rapid.Uint64Range(0, drawnHashes-1)
	switch n := rapid.IntRange(0, 39).Draw(t, "step"); {
	case n < 16:
		e := drawStored(t, hash)
		op := rapid.SampledFrom([]copies.Op{copies.Add, copies.AddUnsure, copies.AddNothing}).Draw(t, "op")
		return fmt.Sprintf("store %d %+v %d", source, e, op), func(b *bounded) string { b.Store(source, &e, op); return "" }
	case n < 28:
		h := hash.Draw(t, "hash")
		op := rapid.SampledFrom([]copies.Op{copies.Remove, copies.RemoveAnnounced, copies.RemoveAll, copies.RemoveDownTo, copies.RemoveDownTo + 2}).Draw(t, "op")
		return fmt.Sprint("remove ", source, h, op), func(b *bounded) string {
			op := op
			if op == copies.RemoveAnnounced && !b.CountChildren(source) {
				op = copies.Remove
			}
			b.Remove(source, h, op)
			return ""
		}
	case n < 30:
		return fmt.Sprint("count children ", source), func(b *bounded) string { return fmt.Sprint(b.CountChildren(source)) }
	case n < 33:
		units := rapid.Int64Range(-10, 10).Draw(t, "units")
		return fmt.Sprint("other workers ", units), func(b *bounded) string {
			if used := b.blocks.Used() - b.units(); used+units >= 0 {
				b.blocks.Adjust(units)
			}
			return ""
		}
	case n < 36:
		return fmt.Sprint("gap ", source), func(b *bounded) string { return fmt.Sprint(b.Gap(source)) }
	case n < 37:
		hashes := rapid.SliceOfNDistinct(hash, 1, 3, func(h uint64) uint64 { return h }).Draw(t, "hashes")
		slices.Sort(hashes)
		return fmt.Sprint("remove blocks ", hashes), func(b *bounded) string { b.RemoveBlocks(hashes); return "" }
	case n < 39:
		return fmt.Sprint("clear ", source), func(b *bounded) string { return fmt.Sprint(b.ClearSource(source)) }
	default:
		return "reset", func(b *bounded) string { b.Reset(); return "" }
	}
}

func drawStored(t *rapid.T, hash *rapid.Generator[uint64]) wire.Event {
	e := wire.Event{Kind: wire.KindStored, BlockHashes: rapid.SliceOfN(hash, 0, 4).Draw(t, "hashes")}
	if rapid.Bool().Draw(t, "has parent") {
		e.HasParent, e.Parent = true, hash.Draw(t, "parent")
	}
	if rapid.IntRange(0, 3).Draw(t, "hash-only") < 3 {
		for range e.BlockHashes {
			e.TokensHashes = append(e.TokensHashes, rapid.Uint64Range(0, 2).Draw(t, "tokens"))
		}
		e.LoRAName = rapid.SampledFrom([]string{"", "", "", "adapter", "other adapter"}).Draw(t, "LoRA")
		e.CacheSalt = rapid.SampledFrom([]string{"", "", "", "\xff"}).Draw(t, "salt")
	}
	return e
}

// apply makes a step and returns everything that can be seen of the tracker afterwards.
func (b *bounded) apply(step drawnStep) observation {
	result := step(b)
	return b.observe(result)
}

// observation is everything that can be seen of a tracker after a call.
type observation struct {
	Result  string
	Changes []Change
	Removed []uint64
	Len     int
	Names   []int
	Found   map[uint64][]int
	// Known are the hashes that resolve and that sources have, by source.
	Known []string
	// Used are units of blocks and bytes of attributes.
	Used  [2]int64
	State string
}

func (b *bounded) observe(result string) observation {
	changes, removed := b.Drain()
	o := observation{
		Result: result, Changes: append([]Change(nil), changes...), Removed: append([]uint64(nil), removed...),
		Len: b.Len(), Names: b.Names(), Used: [2]int64{b.blocks.Used(), b.attributes.Used()}, State: string(b.AppendState(nil)),
	}
	var all []uint64
	for hash := range uint64(drawnHashes) {
		all = append(all, hash)
		for source := range drawnSources {
			o.Known = append(o.Known, fmt.Sprintf("source %d, hash %d: %t %t", source, hash, b.Resolves(source, hash), b.Has(source, hash)))
		}
	}
	o.Found = b.Lookup(all...)
	return o
}

// TestRestoredTrackerDecidesAsTheOriginal makes random calls, restores the state into another tracker, records further
// calls and replays them on the restored tracker, while its bounds are tighter. From then on both trackers must
// behave the same under the same bounds.
func TestRestoredTrackerDecidesAsTheOriginal(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]int64{0, 12, 20}).Draw(t, "limit")
		original := newBounded(limit)
		for range rapid.SampledFrom([]int{20, 50, 5}).Draw(t, "steps before the state") {
			_, step := drawStep(t)
			original.apply(step)
		}

		restored := newBounded(limit)
		var err error
		restored.Tracker, err = Restore(original.AppendState(nil), drawnSources, 1, restored.blocks, restored.attributes, &restored.counts)
		if err != nil {
			t.Fatal(err)
		}
		checkTracker(t, restored.Tracker)
		var recorder Recorder
		original.RecordTo(&recorder, 7)
		full := max(limit, 0)
		restored.blocks.Adjust(full)
		original.counts, restored.counts = Counts{}, Counts{}
		for range rapid.IntRange(0, 3).Draw(t, "entries") {
			for range rapid.IntRange(0, 10).Draw(t, "recorded steps") {
				_, step := drawStep(t)
				original.apply(step)
			}
			calls := recorder.Calls()
			if err := Replay(calls, func(rank uint32) *Tracker {
				if rank != 7 {
					t.Fatalf("replay on rank %d", rank)
				}
				return restored.Tracker
			}); err != nil {
				t.Fatal(err)
			}
		}
		original.recorder, original.checks = nil, nil
		checkTracker(t, restored.Tracker)
		if diff := cmp.Diff(original.counts, restored.counts); diff != "" {
			t.Fatalf("counts of the replay (-want +got):\n%s", diff)
		}
		if got, want := restored.blocks.Used()-full, restored.units(); got != want {
			t.Fatalf("the restored tracker has %d units, and reserved %d", want, got)
		}

		restored.maxBlocks = drawnMaxBlocks
		restored.blocks.Adjust(original.blocks.Used() - restored.blocks.Used())
		none := func(*bounded) string { return "" }
		if diff := cmp.Diff(original.apply(none), restored.apply(none)); diff != "" {
			t.Fatalf("after the replay (-original +restored):\n%s", diff)
		}
		for range rapid.IntRange(0, 30).Draw(t, "steps on both") {
			text, step := drawStep(t)
			if diff := cmp.Diff(original.apply(step), restored.apply(step)); diff != "" {
				t.Fatalf("%s (-original +restored):\n%s", text, diff)
			}
			checkTracker(t, restored.Tracker)
		}
		if original.counts != restored.counts {
			t.Fatalf("counts: got %+v, want %+v", restored.counts, original.counts)
		}
		for _, b := range []*bounded{original, restored} {
			b.blocks.Adjust(-(b.blocks.Used() - b.units()))
			if b.Reset(); b.blocks.Used() != 0 || b.attributes.Used() != 0 {
				t.Fatalf("reserved after a reset: %d units, %d bytes", b.blocks.Used(), b.attributes.Used())
			}
		}
	})
}
