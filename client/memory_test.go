package client_test

import (
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// maxBlockBytes bounds the memory of a block, and maxOrphanBytes of a block whose parent is unknown.
	maxBlockBytes  = 80
	maxOrphanBytes = 125
)

// TestViewMemory measures Views of several sizes, since tables grow in steps.
func TestViewMemory(t *testing.T) {
	testclass.WithoutRace(t)
	for _, l := range viewLoads {
		t.Run(l.name, func(t *testing.T) {
			for blocks := 40_000; blocks < 120_000; blocks += 7_000 {
				before := heap()
				v := startedView()
				fillView(v, l.shared, blocks)
				each := float64(heap()-before) / float64(blocks*loadWorkers)
				runtime.KeepAlive(v)
				if each > maxBlockBytes {
					t.Errorf("%d blocks: %.1f bytes per block, want at most %d", blocks, each, maxBlockBytes)
				}
			}
		})
	}
}

// TestOrphanMemory stores blocks whose parents are unknown.
func TestOrphanMemory(t *testing.T) {
	testclass.WithoutRace(t)
	for blocks := 40_000; blocks < 120_000; blocks += 7_000 {
		before := heap()
		v := startedView()
		for n := range uint64(blocks) {
			e := stored("w0", n, []uint64{n})
			e.Events[0].GetStored().ParentHash = proto.Uint64(mixed(n + 1<<50))
			v.Apply(entries(e))
		}
		each := float64(heap()-before) / float64(blocks)
		if w := v.Workers(); w[0].Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE].Blocks != uint64(blocks) {
			t.Errorf("got %+v, want %d blocks", w, blocks)
		}
		if each > maxOrphanBytes {
			t.Errorf("%d blocks: %.1f bytes per block, want at most %d", blocks, each, maxOrphanBytes)
		}
	}
}

// TestClearingUsesNoMemory clears a rank 150,000 times in one entry, as an engine could send it at low cost.
func TestClearingUsesNoMemory(t *testing.T) {
	testclass.WithoutRace(t)
	const times, most = 150_000, 32 << 20
	for name, e := range map[string]*kvcastv1.Entry{
		"nothing":     clearing(times),
		"a block":     clearing(times, 7),
		"the block 0": clearing(times, 0), // tables store the key 0 separately
	} {
		v := startedView()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v.Apply(entries(e))
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > most {
			t.Errorf("%s: %d bytes allocated, want at most %d", name, got, most)
		}
		if w := v.Workers(); len(w) != 1 || len(w[0].Ranks) != 1 || w[0].Ranks[0].Blocks != (client.Rank{}).Blocks {
			t.Errorf("%s: got %+v, want an empty rank", name, w)
		}
	}
}

// TestMatchAllocatesOnlyItsResult counts the allocations of Match, and of AppendMatches with memory to reuse.
func TestMatchAllocatesOnlyItsResult(t *testing.T) {
	testclass.WithoutRace(t)
	v := startedView()
	tokens := []uint64{1, 2, 3}
	for _, name := range []string{"wa", "wb", "wc"} {
		v.Apply(entries(stored(name, 0, tokens)))
	}
	got := testing.AllocsPerRun(1000, func() { v.Match(client.Prompt{TokensHashes: tokens}) })
	if got > 1 {
		t.Errorf("%v allocations, want 1", got)
	}
	var all []client.Match
	got = testing.AllocsPerRun(1000, func() { all = v.AppendMatches(all[:0], client.Prompt{TokensHashes: tokens}) })
	if got > 0 || len(all) != 3 {
		t.Errorf("%v allocations for %d matches, want none for 3", got, len(all))
	}
}
