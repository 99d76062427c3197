package vllm_test

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	benchBlocks = 32 // of an event
	benchSize   = 16 // tokens a block
)

// stored returns a chain of blocks, as an entry of an engine has them.
func stored(r *rand.Rand) *kvcastv1.RouterEvent {
	s := &kvcastv1.Stored{BlockSize: benchSize}
	for range benchBlocks {
		s.BlockHashes = append(s.BlockHashes, r.Uint64())
		for range benchSize {
			s.TokenIds = append(s.TokenIds, r.Uint32N(150_000))
		}
	}
	s.TokensHashes = kvblock.AppendTokensHashes(nil, s.TokenIds, benchSize, kvblock.Seed("", ""), false, nil)
	return &kvcastv1.RouterEvent{Tier: 1, Event: &kvcastv1.RouterEvent_Stored{Stored: s}}
}

// BenchmarkStream publishes a store of 32 blocks of 16 tokens, and their removal.
func BenchmarkStream(b *testing.B) {
	s := vllm.NewStream("w", 0, "kv@w@m", wire.FormMap, 1)
	store := stored(rand.New(rand.NewPCG(1, 2)))
	remove := &kvcastv1.RouterEvent{Tier: store.GetTier(), Event: &kvcastv1.RouterEvent_Removed{
		Removed: &kvcastv1.Removed{BlockHashes: store.GetStored().GetBlockHashes()},
	}}
	b.ReportAllocs()
	for b.Loop() {
		for _, e := range []*kvcastv1.RouterEvent{store, remove} {
			s.Apply(e)
			s.Batch(1)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*benchBlocks), "ns/block")
}

// BenchmarkHeld measures the memory of a stream for a block that consumers hold.
func BenchmarkHeld(b *testing.B) {
	const chains = 1_000_000 / benchBlocks
	for b.Loop() {
		before := heap()
		s := vllm.NewStream("w", 0, "kv@w@m", wire.FormMap, 1)
		r := rand.New(rand.NewPCG(1, 2))
		for range chains {
			s.Apply(stored(r))
			s.Batch(1)
		}
		b.ReportMetric(float64(heap()-before)/float64(len(s.Held())), "bytes/block")
	}
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
