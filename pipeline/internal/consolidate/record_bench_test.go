package consolidate

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// cyclic makes the calls of a source that stores and removes runs of blocks in turn, of 100,000 blocks in all.
func cyclic(tr *Tracker, blocks int) (next func()) {
	const pool = 100_000
	hashes, tokens, gone := make([]uint64, blocks), make([]uint64, blocks), make([]uint64, blocks)
	at := uint64(0)
	next = func() {
		parent := at * 0x9e3779b97f4a7c15
		for i := range hashes {
			at++
			hashes[i], tokens[i], gone[i] = at*0x9e3779b97f4a7c15, at*0xbf58476d1ce4e5b9, (at-pool)*0x9e3779b97f4a7c15
		}
		e := continuing(parent, storeOf(tokens, hashes...))
		tr.Store(engine, &e, copies.Add)
		if at > pool {
			for _, hash := range gone {
				tr.Remove(engine, hash, copies.Remove)
			}
		}
		tr.Drain()
	}
	for at < pool {
		next()
	}
	return next
}

// BenchmarkRecord stores and removes runs of 16 blocks and of one, without and with a Recorder.
func BenchmarkRecord(b *testing.B) {
	for _, blocks := range []int{16, 1} {
		for _, recorded := range []bool{false, true} {
			b.Run(fmt.Sprintf("blocks=%d/recorded=%t", blocks, recorded), func(b *testing.B) {
				tr := New(2, benchBlocks, nil, nil, new(Counts))
				next := cyclic(tr, blocks)
				var r Recorder
				if recorded {
					tr.RecordTo(&r, 0)
				}
				var calls []byte
				b.ReportAllocs()
				for b.Loop() {
					next()
					calls = r.Calls()
				}
				b.ReportMetric(float64(len(calls)), "B/batch")
			})
		}
	}
}

// BenchmarkReplay replays the calls of BenchmarkRecord, those of many batches at once.
func BenchmarkReplay(b *testing.B) {
	const batches = 1000
	for _, blocks := range []int{16, 1} {
		b.Run(fmt.Sprint("blocks=", blocks), func(b *testing.B) {
			tr := New(2, benchBlocks, nil, nil, new(Counts))
			next := cyclic(tr, blocks)
			restored, err := Restore(tr.AppendState(nil), 2, benchBlocks, nil, nil, new(Counts))
			if err != nil {
				b.Fatal(err)
			}
			var r Recorder
			tr.RecordTo(&r, 0)
			var calls []byte
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				for range batches {
					next()
				}
				calls = r.Calls()
				b.StartTimer()
				if err := Replay(calls, func(uint32) *Tracker { return restored }); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*batches), "ns/batch")
			b.ReportMetric(0, "ns/op")
		})
	}
}
