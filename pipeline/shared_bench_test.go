package pipeline_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/pipeline"
)

// newSharedLane makes a lane of two sources whose caches are empty.
func newSharedLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := newLane(tb, blocks)
	l.pipeline.RemoveWorker("vllm-0", feed.RemovedDiscovery)
	l.lane = l.pipeline.AddWorker(feed.Worker{Name: "vllm-0", Model: "Qwen/Qwen3-0.6B", Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}})
	return l
}

// second sends the first source's last batch by the second source, with other block hashes.
func (l *benchLane) second() {
	l.batch.Source = 1
	rename := func(hashes []uint64) {
		for i := range hashes {
			hashes[i] ^= 1 << 63
		}
	}
	parent := l.batch.Events[0].Parent
	l.batch.Events[0].Parent ^= 1 << 63
	for _, e := range l.batch.Events {
		rename(e.BlockHashes)
	}
	l.lane.Batch(&l.batch)
	for _, e := range l.batch.Events {
		rename(e.BlockHashes)
	}
	l.batch.Events[0].Parent = parent
	l.batch.Source = 0
}

// newSteadySharedLane makes a lane of two sources whose caches are full.
func newSteadySharedLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := newSharedLane(tb, blocks)
	// The first block has no parent, so that sequence hashes are known.
	l.batch.Events[0].HasParent = false
	for range 2 * poolBlocks / blocks {
		l.step()
		l.second()
		l.batch.Events[0].HasParent = true
	}
	return l
}

func benchmarkSharedLane(b *testing.B, blocks int) {
	for _, sources := range []int{1, 2} {
		b.Run(fmt.Sprint("sources=", sources), func(b *testing.B) {
			l := newSteadySharedLane(b, blocks)
			b.ReportAllocs()
			for b.Loop() {
				l.step()
				if sources == 2 {
					l.second()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*sources), "ns/batch")
		})
	}
}

// BenchmarkSharedLaneB1 and B2 are BenchmarkLaneB1 and B2 for a worker with two sources.
// Either one source sends all batches, and every block is emitted, or both store the same
// blocks under different hashes.
func BenchmarkSharedLaneB1(b *testing.B) { benchmarkSharedLane(b, 16) }

func BenchmarkSharedLaneB2(b *testing.B) { benchmarkSharedLane(b, 1) }

// BenchmarkLastRemove measures the last remove of a block, and its store by both sources
// again, in lanes of increasing size. The cost is constant except for cache misses.
func BenchmarkLastRemove(b *testing.B) {
	for _, known := range []int{10_000, 100_000, 1_000_000, 4_000_000} {
		b.Run(fmt.Sprint("known=", known), func(b *testing.B) {
			l := filledSharedLane(b, known-1)
			remove, store := batch(remove(1)).Batch, batch(store(1)).Batch
			b.ReportAllocs()
			for b.Loop() {
				for source := range 2 {
					store.Source = source
					l.lane.Batch(store)
				}
				for source := range 2 {
					remove.Source = source
					l.lane.Batch(remove)
				}
			}
		})
	}
}

// filledSharedLane makes a lane with a number of blocks, all stored by both sources.
func filledSharedLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := newSharedLane(tb, 100)
	l.batch.Events = l.batch.Events[:1] // no block is evicted
	l.batch.Events[0].HasParent = false
	for range blocks / l.blocks {
		l.step()
		l.second()
		l.batch.Events[0].HasParent = true
	}
	return l
}

// BenchmarkSharedMemory reports the bytes per block that two sources store under different
// names: in the table, and outside it.
func BenchmarkSharedMemory(b *testing.B) {
	for _, blocks := range []int{100_000, 1_000_000, 1_300_000, 1_800_000} {
		b.Run(fmt.Sprint("blocks=", blocks), func(b *testing.B) {
			var perBlock float64
			for b.Loop() {
				perBlock = sharedBytesPerBlock(b, blocks)
			}
			b.ReportMetric(perBlock, "B/block")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func sharedBytesPerBlock(tb testing.TB, blocks int) float64 {
	tb.Helper()
	before := heap()
	l := filledSharedLane(tb, blocks)
	bytes := heap() - before
	runtime.KeepAlive(l)
	return float64(bytes) / float64(blocks)
}

// BenchmarkSharedGapLatency reports how long single calls block a lane of 4,000,000 blocks
// of two sources: the slowest store of 100 blocks while filling it, a gap, and a clear of
// one source.
func BenchmarkSharedGapLatency(b *testing.B) {
	for b.Loop() {
		l := newSharedLane(b, 100)
		l.batch.Events = l.batch.Events[:1]
		l.batch.Events[0].HasParent = false
		var worst, gap, restart time.Duration
		longest := func(d *time.Duration, f func()) {
			start := time.Now()
			f()
			*d = max(*d, time.Since(start))
		}
		for l.next < pipeline.DefaultMaxBlocksPerRank {
			longest(&worst, l.step)
			l.second()
			l.batch.Events[0].HasParent = true
		}
		longest(&gap, func() { l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten}) })
		longest(&restart, func() { l.lane.Restarted(feed.Restart{}) })
		b.ReportMetric(float64(worst.Microseconds()), "µs/worst-store")
		b.ReportMetric(float64(gap.Microseconds()), "µs/gap")
		b.ReportMetric(float64(restart.Microseconds()), "µs/restart")
	}
	b.ReportMetric(0, "ns/op")
}
