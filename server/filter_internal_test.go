package server

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
)

// heap returns the bytes in use after garbage collection.
func heap() int64 {
	runtime.GC()
	runtime.GC() // frees memory that finalizers of the first collection have released
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestFilterBytesMatchTheHeap creates filters with different numbers and lengths of names, fills their caches, and
// compares the estimate with the growth of the heap.
func TestFilterBytesMatchTheHeap(t *testing.T) {
	testclass.WithoutRace(t)
	for _, tt := range []struct{ filters, names, length int }{
		{1000, 1, 12}, {300, 100, 1}, {100, 1000, 24}, {20, 10_000, 25}, {50, 900, 250}, {10, 1, 200_000},
	} {
		t.Run(fmt.Sprintf("%d of %d names of %d bytes", tt.filters, tt.names, tt.length), func(t *testing.T) {
			sources := make([]journal.Source, 10*maxKnownSources)
			bytes := admission.NewBytes("filter_bytes", 1<<40, MinFilterBytes)
			kept := make([]*filter, tt.filters)
			before := heap()
			for i := range kept {
				f, err := parseFilter(t.Context(), request(tt.names, tt.length), journal.Bounds{}, bytes)
				if err != nil {
					t.Fatal(err)
				}
				for n := range sources {
					f.match(0, &sources[n], allTiers)
				}
				kept[i] = f
			}
			got, counted := heap()-before, bytes.Total().Used()
			if got > 2*counted || counted > 2*got {
				t.Errorf("the heap grew by %d bytes, the estimate is %d", got, counted)
			}
			for _, f := range kept {
				f.release()
			}
			if bytes.Total().Used() != 0 {
				t.Errorf("%d bytes are still reserved", bytes.Total().Used())
			}
			runtime.KeepAlive(sources)
		})
	}
}

// request returns a filter whose names are separate strings, as in a decoded request.
func request(names, length int) *kvcastv1.Filter {
	f := new(kvcastv1.Filter)
	for n := range names {
		f.Workers = append(f.Workers, fmt.Sprintf("%0*d", length, n))
	}
	return f
}

// BenchmarkFilter matches entries of several workers alternately.
func BenchmarkFilter(b *testing.B) {
	for _, workers := range []int{1, 100, 1000} {
		for _, names := range []int{1, 1000} {
			b.Run(fmt.Sprintf("%d workers, %d names", workers, names), func(b *testing.B) {
				f, err := parseFilter(b.Context(), request(names, 24), journal.Bounds{}, admission.NewBytes("filter_bytes", 1<<40, MinFilterBytes))
				if err != nil {
					b.Fatal(err)
				}
				sources := make([]journal.Source, workers)
				for i := range sources {
					sources[i] = journal.Source{Worker: fmt.Sprintf("%024d", i), Model: "m"}
				}
				b.ResetTimer()
				for i := range b.N {
					f.match(0, &sources[i%workers], allTiers)
				}
			})
		}
	}
}
