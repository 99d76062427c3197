package index_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// filled returns an index of a worker with blocks: conversations of 64 blocks, each stored block by block in turn.
func filled(blocks int) *index.Index {
	const conversations = 64
	x := index.New()
	rank := uint32(0)
	mix := func(n uint64) uint64 { return n * 0x9e3779b97f4a7c15 }
	for first := 0; first < blocks; first += conversations * conversations {
		for i := range conversations {
			for c := range conversations {
				n := uint64(first + c*conversations + i)
				s := &kvcastv1.Stored{BlockHashes: []uint64{mix(n)}, TokensHashes: []uint64{mix(n) + 1}, BlockSize: 16}
				if i > 0 {
					parent := mix(n - 1)
					s.ParentHash = &parent
				}
				x.ApplyEntry(&kvcastv1.Entry{Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{{
					DpRank: &rank, Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: s},
				}}})
			}
		}
	}
	return x
}

func BenchmarkSnapshot(b *testing.B) {
	for _, blocks := range []int{100_000, 1_000_000} {
		x := filled(blocks)
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			bytes := 0
			for b.Loop() {
				s, _ := x.Snapshot("w")
				for piece := range s.Blocks(b.Context(), 0xff) {
					bytes += len(piece)
					s.Reuse(piece)
				}
			}
			b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/float64(blocks), "ns/block")
			b.ReportMetric(float64(bytes)/float64(b.N)/float64(blocks), "B/block")
		})
	}
}
