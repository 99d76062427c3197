package client_test

import (
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// mixed returns a well-distributed hash of a number.
func mixed(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// storeChain stores blocks of a worker in chains of the given length. The contents of the blocks are numbered from
// contents+1; equal numbers are equal contents.
func storeChain(v *client.View, worker string, contents uint64, blocks, length int) {
	for at := 0; at < blocks; at += length {
		var tokens []uint64
		for i := range min(length, blocks-at) {
			tokens = append(tokens, mixed(contents+uint64(at+i)+1))
		}
		v.Apply(entries(stored(worker, contents+uint64(at), tokens)))
	}
}

// stored returns an entry that stores a chain of blocks. The block hashes differ between workers and follow from
// first.
func stored(worker string, first uint64, tokens []uint64) *kvcastv1.Entry {
	s := &kvcastv1.Stored{BlockSize: 16, TokensHashes: tokens}
	for i := range tokens {
		s.BlockHashes = append(s.BlockHashes, mixed(first+uint64(i)+1)^mixed(uint64(worker[1])))
	}
	return &kvcastv1.Entry{Worker: worker, Events: []*kvcastv1.RouterEvent{{
		DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: s},
	}}}
}

// heap returns the bytes in use after a garbage collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// viewLoads are contents of a View with 4 workers.
var viewLoads = []struct {
	name   string
	shared bool // all workers hold the same blocks
}{{"Distinct", false}, {"Shared", true}}

const (
	loadBlocks  = 1_000_000 // blocks per worker
	loadWorkers = 4
)

func fillView(v *client.View, shared bool, blocks int) {
	for w := range loadWorkers {
		contents := uint64(w) << 40
		if shared {
			contents = 0
		}
		storeChain(v, fmt.Sprintf("w%d", w), contents, blocks, 100)
	}
}

// BenchmarkViewMemory measures the bytes per block and worker. Each of 4 workers has a million blocks.
func BenchmarkViewMemory(b *testing.B) {
	for _, l := range viewLoads {
		b.Run(l.name, func(b *testing.B) {
			for b.Loop() {
				before := heap()
				v := startedView()
				fillView(v, l.shared, loadBlocks)
				b.ReportMetric(float64(heap()-before)/(loadBlocks*loadWorkers), "bytes/block")
				runtime.KeepAlive(v)
			}
		})
	}
}

const (
	promptBlocks  = 1_000
	promptWorkers = 64
)

// promptLoads are distributions of a prompt of 1,000 blocks over 64 workers.
var promptLoads = []struct {
	name string
	hold func(worker int) int // number of the prompt's blocks that a worker holds
}{
	{"AllHoldAll", func(int) int { return promptBlocks }},
	{"EachHoldsLess", func(w int) int { return promptBlocks - w*promptBlocks/promptWorkers }},
	{"OneHoldsAll", func(w int) int { return max(1, promptBlocks*(1-min(w, 1))) }},
}

// BenchmarkMatch matches a prompt of 1,000 blocks with 64 workers that also hold 100,000 other blocks each. The
// prompt is given as hashes, or in Tokens as 16,000 tokens.
func BenchmarkMatch(b *testing.B) {
	for _, l := range promptLoads {
		v := startedView()
		for w := range promptWorkers {
			name := fmt.Sprintf("w%c", 'A'+w)
			storeChain(v, name, uint64(w+1)<<40, 100_000, 100)
			storeChain(v, name, 0, l.hold(w), promptBlocks)
		}
		prompt := make([]uint64, promptBlocks)
		for i := range prompt {
			prompt[i] = mixed(uint64(i) + 1)
		}
		b.Run(l.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if found := v.Match(client.Prompt{TokensHashes: prompt}); len(found) != promptWorkers || found[0].Blocks != promptBlocks {
					b.Fatalf("%d found, the longest %d", len(found), found[0].Blocks)
				}
			}
		})
		if l.name != "AllHoldAll" {
			continue
		}
		tokens := make([]uint32, promptBlocks*16)
		for i := range tokens {
			tokens[i] = uint32(mixed(uint64(i)))
		}
		for w := range promptWorkers {
			v.Apply(entries(stored(fmt.Sprintf("w%c", 'A'+w), 1<<60, client.TokensHashes(tokens, 16, "", ""))))
		}
		b.Run("Tokens", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if found := v.Match(client.Prompt{Tokens: tokens}); len(found) != promptWorkers || found[0].Blocks != promptBlocks {
					b.Fatalf("%d found", len(found))
				}
			}
		})
	}
}

// BenchmarkApply stores and removes 16 blocks of one worker per entry. The View has 8 workers.
func BenchmarkApply(b *testing.B) {
	v := startedView()
	for w := range 8 {
		storeChain(v, fmt.Sprintf("w%d", w), uint64(w)<<40, 200_000, 100)
	}
	var updates []client.Update
	for i := range 1000 {
		store, remove := &kvcastv1.Stored{BlockSize: 16}, &kvcastv1.Removed{}
		for j := range 16 {
			n := uint64(i*16+j) + 1<<50
			store.BlockHashes, store.TokensHashes = append(store.BlockHashes, mixed(n)), append(store.TokensHashes, mixed(n+1))
		}
		remove.BlockHashes = store.BlockHashes
		for _, ev := range []*kvcastv1.RouterEvent{
			{Event: &kvcastv1.RouterEvent_Stored{Stored: store}}, {Event: &kvcastv1.RouterEvent_Removed{Removed: remove}},
		} {
			ev.DpRank, ev.Tier = proto.Uint32(0), kvcastv1.Tier_TIER_DEVICE
			updates = append(updates, entries(&kvcastv1.Entry{Worker: "w0", Events: []*kvcastv1.RouterEvent{ev}}))
		}
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		v.Apply(updates[n%len(updates)])
		n++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(16*n), "ns/block")
}
