package consolidate

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

const benchBlocks = 1_000_000

// filled returns a tracker of two sources with a number of blocks, of which the first sources have a name each.
func filled(blocks, named int) *Tracker {
	tr := New(2, blocks, nil, nil, new(Counts))
	for source := range named {
		for h := uint64(0); h < uint64(blocks); h += 100 {
			var hashes, tokens []uint64
			for i := h; i < h+100; i++ {
				hashes, tokens = append(hashes, (i+1)*0x9e3779b97f4a7c15+uint64(source)), append(tokens, i*0xbf58476d1ce4e5b9)
			}
			e := storeOf(tokens, hashes...)
			if h > 0 {
				e = continuing(h*0x9e3779b97f4a7c15+uint64(source), e)
			}
			tr.Store(source, &e, copies.Add)
			tr.Drain()
		}
	}
	return tr
}

func perBlock(b *testing.B, bytes int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/benchBlocks, "ns/block")
	b.ReportMetric(float64(bytes)/benchBlocks, "B/block")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkAppendState and BenchmarkRestore have blocks with one name, or with a name of each of two sources.
func BenchmarkAppendState(b *testing.B) {
	for _, named := range []int{1, 2} {
		b.Run(fmt.Sprint("names=", named), func(b *testing.B) {
			tr := filled(benchBlocks, named)
			b.ReportAllocs()
			var state []byte
			for b.Loop() {
				state = tr.AppendState(state[:0])
			}
			perBlock(b, len(state))
		})
	}
}

func BenchmarkRestore(b *testing.B) {
	for _, named := range []int{1, 2} {
		b.Run(fmt.Sprint("names=", named), func(b *testing.B) {
			state := filled(benchBlocks, named).AppendState(nil)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Restore(state, 2, benchBlocks, nil, nil, new(Counts)); err != nil {
					b.Fatal(err)
				}
			}
			perBlock(b, len(state))
		})
	}
}
