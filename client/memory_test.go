//go:build !race

package client_test

import (
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// maxBlockBytes is what a block of a worker may take, and maxWaitingBytes what one
	// may that waits for its parent.
	maxBlockBytes   = 80
	maxWaitingBytes = 125
)

// TestViewMemory measures at many sizes, as tables grow by steps.
func TestViewMemory(t *testing.T) {
	for _, l := range viewLoads {
		t.Run(l.name, func(t *testing.T) {
			for blocks := 40_000; blocks < 120_000; blocks += 7_000 {
				before := heap()
				v := begun()
				fillView(v, l.shared, blocks)
				each := float64(heap()-before) / float64(blocks*loadWorkers)
				runtime.KeepAlive(v)
				if each > maxBlockBytes {
					t.Errorf("%d blocks: %.1f bytes for each, want %d at most", blocks, each, maxBlockBytes)
				}
			}
		})
	}
}

// TestMemoryOfBlocksThatWait stores blocks whose parents are not known.
func TestMemoryOfBlocksThatWait(t *testing.T) {
	for blocks := 40_000; blocks < 120_000; blocks += 7_000 {
		before := heap()
		v := begun()
		for n := range uint64(blocks) {
			e := stored("w0", n, []uint64{n})
			e.Events[0].GetStored().ParentHash = proto.Uint64(mixed(n + 1<<50))
			v.Apply(entries(e))
		}
		each := float64(heap()-before) / float64(blocks)
		if w := v.Workers(); w[0].Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE].Blocks != uint64(blocks) {
			t.Errorf("got %+v, want %d blocks", w, blocks)
		}
		if each > maxWaitingBytes {
			t.Errorf("%d blocks: %.1f bytes for each, want %d at most", blocks, each, maxWaitingBytes)
		}
	}
}

// TestClearingTakesNoMemory has entries of what engines may send, at no cost to them.
func TestClearingTakesNoMemory(t *testing.T) {
	const times, most = 150_000, 16 << 20
	for name, e := range map[string]*kvcastv1.Entry{
		"nothing":     clearing(times),
		"a block":     clearing(times, 7),
		"the block 0": clearing(times, 0), // which tables keep apart
	} {
		v := begun()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		v.Apply(entries(e))
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > most {
			t.Errorf("%s: %d bytes allocated, want %d at most", name, got, most)
		}
		if w := v.Workers(); len(w) != 1 || len(w[0].Ranks) != 1 || w[0].Ranks[0] != (client.Rank{}) || client.Indexed(v) != 0 {
			t.Errorf("%s: got %+v and %d sequence hashes, want an empty rank", name, w, client.Indexed(v))
		}
	}
}

// TestMatchAllocatesWhatItReturns and nothing else.
func TestMatchAllocatesWhatItReturns(t *testing.T) {
	v := begun()
	tokens := []uint64{1, 2, 3}
	for _, name := range []string{"wa", "wb", "wc"} {
		v.Apply(entries(stored(name, 0, tokens)))
	}
	got := testing.AllocsPerRun(1000, func() { v.Match(client.Prompt{TokensHashes: tokens}) })
	if got > 1 {
		t.Errorf("%v allocations, want 1", got)
	}
}
