package pipeline_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

// nowhere is a journal that discards all entries.
type nowhere struct{ bytes, state int }

func (n *nowhere) Append(_ context.Context, r journal.Record) (journal.Pending, error) {
	n.bytes += len(r.Body)
	n.state += len(r.State)
	return journal.Pending{}, nil
}

// poolBlocks is the usual cache size in blocks of a steady lane's engine. Tables of largePoolBlocks are
// much larger than the processor's caches.
const (
	poolBlocks      = 10_000
	largePoolBlocks = 1_000_000
)

// benchLane is a lane under benchmark. Each batch stores a chain of blocks of 16 tokens and
// evicts as many, which were stored pool blocks earlier.
type benchLane struct {
	pipeline *pipeline.Pipeline
	lane     feed.Lane
	journal  *nowhere
	blocks   int
	pool     uint64
	next     uint64
	batch    feed.Batch
}

// newSteadyLane makes a lane whose cache of poolBlocks is full.
func newSteadyLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := newLane(tb, blocks)
	l.fill()
	return l
}

// fill stores the pool twice, so that the table has evicted blocks.
func (l *benchLane) fill() {
	for range 2 * int(l.pool) / l.blocks {
		l.step()
	}
}

// newLane makes a lane whose cache is empty.
func newLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	return newBoundedLane(tb, blocks, 0)
}

// newBoundedLane makes a lane with a limit of blocks per rank.
func newBoundedLane(tb testing.TB, blocks, maxBlocks int) *benchLane {
	tb.Helper()
	l := &benchLane{journal: &nowhere{}, blocks: blocks, pool: poolBlocks}
	p, err := pipeline.New(pipeline.Config{
		MaxBlocksPerRank: maxBlocks,
		Blocks:           budget.New("blocks", 1<<40), // the benchmark includes its bookkeeping
		AttributeBytes:   budget.New("attribute_bytes", pipeline.DefaultAttributeBytes),
	}, l.journal)
	if err != nil {
		tb.Fatal(err)
	}
	l.pipeline = p
	l.lane = p.AddWorker(feed.Worker{Name: "vllm-0", Model: "Qwen/Qwen3-0.6B"})
	l.batch = feed.Batch{EngineTime: 1, IngestTime: 2, CopyRule: feed.CopyRuleDetected, Events: []wire.Event{
		{
			Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 16, HasParent: true,
			BlockHashes: make([]uint64, blocks), TokensHashes: make([]uint64, blocks), Tokens: make([]uint32, 16*blocks),
		},
		{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: make([]uint64, blocks)},
	}}
	return l
}

// hash returns the hash of the nth block.
func (*benchLane) hash(n uint64) uint64 { return n * 0x9e3779b97f4a7c15 }

func (l *benchLane) step() {
	l.batch.Events[0].Parent = l.hash(l.next - 1)
	for i := range l.blocks {
		for _, e := range l.batch.Events[1:] {
			e.BlockHashes[i] = l.hash(l.next - l.pool)
		}
		l.batch.Events[0].BlockHashes[i] = l.hash(l.next)
		l.batch.Events[0].TokensHashes[i] = l.next
		l.next++
	}
	l.lane.Batch(&l.batch)
}

func benchmarkLane(b *testing.B, blocks int) {
	for _, pool := range []uint64{poolBlocks, largePoolBlocks} {
		b.Run(fmt.Sprint("pool=", pool), func(b *testing.B) {
			l := newLane(b, blocks)
			l.pool = pool
			l.fill()
			l.journal.bytes = 0
			b.ReportAllocs()
			for b.Loop() {
				l.step()
			}
			b.ReportMetric(float64(l.journal.bytes)/float64(b.N), "journal-B/op")
		})
	}
}

// BenchmarkLaneB1 measures batches that each store 16 blocks of 16 tokens and evict 16.
func BenchmarkLaneB1(b *testing.B) { benchmarkLane(b, 16) }

// BenchmarkLaneB2 measures batches that each store one block and evict another.
func BenchmarkLaneB2(b *testing.B) { benchmarkLane(b, 1) }

// BenchmarkAnnouncing is B1 with an engine that announces reused blocks: each batch
// announces the 16 blocks that the one before stored, stores 16 that continue them, and
// evicts the 16 oldest, children first.
func BenchmarkAnnouncing(b *testing.B) {
	l := newSteadyLane(b, 16)
	again := l.batch.Events[0]
	again.HasParent = false
	again.BlockHashes, again.TokensHashes = make([]uint64, 16), make([]uint64, 16)
	l.batch.Events = append([]wire.Event{again}, l.batch.Events...)
	remove := &l.batch.Events[2]
	b.ReportAllocs()
	for b.Loop() {
		store := &l.batch.Events[1]
		store.Parent = l.hash(l.next - 1)
		for i := range l.blocks {
			again.BlockHashes[i], again.TokensHashes[i] = l.hash(l.next-16+uint64(i)), l.next-16+uint64(i)
			store.BlockHashes[i], store.TokensHashes[i] = l.hash(l.next+uint64(i)), l.next+uint64(i)
			remove.BlockHashes[15-i] = l.hash(l.next - poolBlocks + uint64(i))
		}
		l.next += 16
		l.lane.Batch(&l.batch)
	}
}

// BenchmarkExpiry measures batches that each store 16 blocks and displace 16 stale ones. A
// gap follows when no stale block is left.
func BenchmarkExpiry(b *testing.B) {
	l := newBoundedLane(b, 16, poolBlocks)
	l.batch.Events = l.batch.Events[:1]
	b.ReportAllocs()
	for b.Loop() {
		if l.next%poolBlocks == 0 {
			l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
		}
		l.step()
	}
}

// BenchmarkFull measures batches that each store 16 blocks, all refused since the rank is
// full.
func BenchmarkFull(b *testing.B) {
	l := newBoundedLane(b, 16, poolBlocks)
	l.batch.Events = l.batch.Events[:1]
	for l.next < 2*poolBlocks {
		l.step()
	}
	b.ReportAllocs()
	for b.Loop() {
		l.step()
	}
}

// BenchmarkGapLatency reports how long single calls block a lane of 4,000,000 blocks: a gap,
// and the one-block batches that displace the last few stale blocks. The sum of those
// batches bounds the slowest one.
func BenchmarkGapLatency(b *testing.B) {
	const blocks, few = pipeline.DefaultMaxBlocksPerRank, 16
	var gap, last time.Duration
	for b.Loop() {
		l := newBoundedLane(b, 100, blocks)
		l.batch.Events = l.batch.Events[:1]
		fill := func() {
			for l.next = 0; l.next < blocks; {
				l.step()
			}
		}
		fill()
		start := time.Now()
		l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
		gap = max(gap, time.Since(start))
		fill()
		l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
		e := l.batch.Events[0]
		for h := range uint64(blocks - few) {
			e.BlockHashes[h%100] = l.hash(h)
			if h%100 == 99 || h == blocks-few-1 {
				l.batch.Events[0].BlockHashes = e.BlockHashes[:h%100+1]
				l.batch.Events[0].TokensHashes = e.TokensHashes[:h%100+1]
				l.lane.Batch(&l.batch)
			}
		}
		l.batch.Events[0].BlockHashes, l.batch.Events[0].TokensHashes = e.BlockHashes[:1], e.TokensHashes[:1]
		start = time.Now()
		for i := range uint64(few) {
			e.BlockHashes[0] = l.hash(blocks + i)
			l.lane.Batch(&l.batch)
		}
		last = max(last, time.Since(start))
	}
	b.ReportMetric(float64(gap.Microseconds()), "µs/gap")
	b.ReportMetric(float64(last.Microseconds()), "µs/last-blocks")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTableMemory reports the table's bytes per block at several sizes. They peak just
// after segments have grown or split.
func BenchmarkTableMemory(b *testing.B) {
	for _, blocks := range []int{100_000, 1_000_000, 1_800_000} {
		b.Run(fmt.Sprint("blocks=", blocks), func(b *testing.B) {
			var perBlock float64
			for b.Loop() {
				perBlock = bytesPerBlock(b, blocks)
			}
			b.ReportMetric(perBlock, "B/block")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func bytesPerBlock(tb testing.TB, blocks int) float64 {
	tb.Helper()
	l := newLane(tb, 100)
	l.batch.Events = l.batch.Events[:1] // no block is evicted
	before := heap()
	for range blocks / l.blocks {
		l.step()
	}
	bytes := heap() - before
	runtime.KeepAlive(l)
	return float64(bytes) / float64(blocks)
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
