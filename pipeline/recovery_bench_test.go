package pipeline_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
)

// cursorBytes is the size of a cursor: seq, time, fingerprint and the raw event id.
const cursorBytes = 32

// durable makes the lane's journal durable. The lane starts anew, and is empty.
func (l *benchLane) durable(tb testing.TB, j pipeline.Journal) {
	tb.Helper()
	p, err := pipeline.New(pipeline.Config{
		Durable:        true,
		Blocks:         budget.New("blocks", 1<<40),
		AttributeBytes: budget.New("attribute_bytes", pipeline.DefaultAttributeBytes),
	}, j)
	if err != nil {
		tb.Fatal(err)
	}
	l.pipeline = p
	l.lane = p.AddWorker(feed.Worker{Name: "vllm-0", Model: "Qwen/Qwen3-0.6B"})
	l.batch.Progress.Cursor = make([]byte, cursorBytes)
}

// stepDurable is step with raw event ids.
func (l *benchLane) stepDurable() {
	for i := range l.batch.Events {
		l.batch.Events[i].RawID++
	}
	l.step()
}

// BenchmarkLaneB1Durable is BenchmarkLaneB1 with the state for a durable journal.
func BenchmarkLaneB1Durable(b *testing.B) {
	for _, pool := range []uint64{poolBlocks, largePoolBlocks} {
		b.Run(fmt.Sprint("pool=", pool), func(b *testing.B) {
			l := newLane(b, 16)
			l.durable(b, l.journal)
			l.pool = pool
			l.fill()
			l.journal.state = 0
			b.ReportAllocs()
			for b.Loop() {
				l.stepDurable()
			}
			b.ReportMetric(float64(l.journal.state)/float64(b.N), "state-B/op")
		})
	}
}

// filledLane returns a durable lane with a number of blocks.
func filledLane(tb testing.TB, blocks uint64, j pipeline.Journal) *benchLane {
	tb.Helper()
	l := newLane(tb, 64)
	l.durable(tb, j)
	l.batch.Events = l.batch.Events[:1] // no block is evicted
	for l.next < blocks {
		l.stepDurable()
	}
	return l
}

// BenchmarkCheckpoint reports how long a checkpoint locks the lane.
func BenchmarkCheckpoint(b *testing.B) {
	for _, blocks := range []uint64{16_384, 1_000_000} {
		b.Run(fmt.Sprint("blocks=", blocks), func(b *testing.B) {
			l := filledLane(b, blocks, &nowhere{})
			size := 0
			for b.Loop() {
				c, ok := l.pipeline.Checkpoint("vllm-0", nil)
				if !ok {
					b.Fatal("no checkpoint")
				}
				size = len(c.Data)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(blocks), "ns/block")
			b.ReportMetric(float64(size)/float64(blocks), "B/block")
		})
	}
}

// BenchmarkRestore measures the restoration of a checkpoint.
func BenchmarkRestore(b *testing.B) {
	const blocks = 1_000_000
	l := filledLane(b, blocks, &nowhere{})
	c, ok := l.pipeline.Checkpoint("vllm-0", nil)
	if !ok {
		b.Fatal("no checkpoint")
	}
	for b.Loop() {
		r := pipeline.Recover(pipeline.Config{Durable: true})
		if err := r.Checkpoint(c.Data); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}

// kept is a durable journal that keeps its entries.
type kept struct{ body, state [][]byte }

func (k *kept) Append(_ context.Context, r journal.Record) (journal.Pending, error) {
	k.body, k.state = append(k.body, slices.Clone(r.Body)), append(k.state, slices.Clone(r.State))
	return journal.Acknowledged(uint64(len(k.body))), nil
}

// BenchmarkRecoverEntry measures the recovery of entries of B1.
func BenchmarkRecoverEntry(b *testing.B) {
	const entries = 20_000
	var k kept
	l := newLane(b, 16)
	l.durable(b, &k)
	for range entries {
		l.stepDurable()
	}
	b.ReportAllocs()
	for b.Loop() {
		r := pipeline.Recover(pipeline.Config{Durable: true})
		for i := range k.body {
			if err := r.Entry(uint64(i+1), "vllm-0", k.body[i], k.state[i]); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/entries, "ns/entry")
}
