package pipeline_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
)

// nowhere is a journal that keeps nothing.
type nowhere struct{ bytes int }

func (n *nowhere) Append(r journal.Record) journal.Receipt {
	n.bytes += len(r.Body)
	return journal.Receipt{}
}

// poolBlocks is how many blocks the engine of a steady lane holds.
const poolBlocks = 10_000

// benchLane is a lane each of whose batches stores a chain of some blocks, of 16
// tokens each, and evicts as many: those that came poolBlocks earlier.
type benchLane struct {
	pipeline *pipeline.Pipeline
	lane     ingest.Lane
	journal  *nowhere
	blocks   int
	next     uint64
	batch    ingest.Batch
}

// newSteadyLane makes a lane whose cache is full.
func newSteadyLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := newLane(tb, blocks)
	// Twice the pool, so that the table has seen evictions.
	for range 2 * poolBlocks / blocks {
		l.step()
	}
	return l
}

// newLane makes a lane whose cache is empty.
func newLane(tb testing.TB, blocks int) *benchLane {
	tb.Helper()
	l := &benchLane{journal: &nowhere{}, blocks: blocks}
	p, err := pipeline.New(pipeline.BatchConfig{}, l.journal)
	if err != nil {
		tb.Fatal(err)
	}
	l.pipeline = p
	l.lane = p.AddWorker(ingest.Worker{Name: "vllm-0", Model: "Qwen/Qwen3-0.6B"})
	l.batch = ingest.Batch{EngineTime: 1, IngestTime: 2, Events: []wire.Event{
		{
			Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 16, HasParent: true,
			BlockHashes: make([]uint64, blocks), TokensHashes: make([]uint64, blocks), Tokens: make([]uint32, 16*blocks),
		},
		{Kind: wire.KindRemoved, Tier: wire.TierDevice, BlockHashes: make([]uint64, blocks)},
	}}
	return l
}

// hash is the name of the nth block.
func (*benchLane) hash(n uint64) uint64 { return n * 0x9e3779b97f4a7c15 }

func (l *benchLane) step() {
	l.batch.Events[0].Parent = l.hash(l.next - 1)
	for i := range l.blocks {
		for _, e := range l.batch.Events[1:] {
			e.BlockHashes[i] = l.hash(l.next - poolBlocks)
		}
		l.batch.Events[0].BlockHashes[i] = l.hash(l.next)
		l.batch.Events[0].TokensHashes[i] = l.next
		l.next++
	}
	l.lane.Batch(&l.batch)
}

func benchmarkLane(b *testing.B, blocks int) {
	l := newSteadyLane(b, blocks)
	l.journal.bytes = 0
	b.ReportAllocs()
	for b.Loop() {
		l.step()
	}
	b.ReportMetric(float64(l.journal.bytes)/float64(b.N), "journal-B/op")
}

// BenchmarkLaneB1 is a store of 16 blocks of 16 tokens and the eviction of as
// many, a batch.
func BenchmarkLaneB1(b *testing.B) { benchmarkLane(b, 16) }

// BenchmarkLaneB2 is a store of one block and the eviction of another, a batch.
func BenchmarkLaneB2(b *testing.B) { benchmarkLane(b, 1) }

// BenchmarkTableMemory reports what a block takes in the table, for tables of
// several sizes: it takes more just after segments have grown or split.
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
	l.batch.Events = l.batch.Events[:1] // nothing leaves
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
