package sequence

import (
	"runtime"
	"testing"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/testclass"
)

// A live batch that does not fit into the reorder buffer is requested after the buffered batches
// are read, even if the engine had not published it before the first request.
func TestBatchesBeyondTheReorderBufferAreRequested(t *testing.T) {
	const all = 1 << 20
	for _, tt := range []struct {
		name     string
		buffered uint64 // batches that fit
		used     int64  // bytes that other buffers use
	}{
		{name: "more batches than a publisher may have", buffered: maxBufferedBatches},
		{name: "more bytes than all may have", used: all},
	} {
		t.Run(tt.name, func(t *testing.T) {
			shared := budget.New("test", 8*all)
			if tt.used > 0 {
				shared = budget.New("test", tt.used)
			}
			shared.Reserve(tt.used)
			s := newScript(t)
			s.m.buffer.budget = shared
			s.connect()
			last := tt.buffered + 1
			for seq := range last + 1 {
				s.live("", 0, seq)
			}
			if n := count(s.actions, DropOverflow); n != 2 {
				t.Errorf("%d batches did not fit, want 2", n)
			}
			if !s.answer(0, 0, last-1, OutcomeComplete) {
				t.Fatalf("done without batch %d", last)
			}
			if s.answer(0, 0, last, OutcomeComplete) {
				t.Error("more is requested than there is")
			}
			if s.m.State() != Live || len(s.lines) != int(last)+1 {
				t.Errorf("state %v with %d of %d batches", s.m.State(), len(s.lines), last+1)
			}
			if n := shared.Used(); n != tt.used {
				t.Errorf("%d bytes are used, want %d", n, tt.used)
			}
		})
	}
}

func count(kinds []Kind, k Kind) (n int) {
	for _, got := range kinds {
		if got == k {
			n++
		}
	}
	return n
}

// The bytes counted for a buffered batch are about the memory that it takes, also if the epoch is
// longer than the payload.
func TestMemoryOfTheReorderBufferIsCounted(t *testing.T) {
	testclass.WithoutRace(t)
	const batches = 4000
	for _, tt := range []struct {
		name           string
		epoch, payload int
	}{
		{"tiny", 0, 20}, {"long epochs", 2000, 20}, {"large", 16, 3000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := reorderBuffer{budget: budget.New("test", 0)}
			batch := Batch{Epoch: make([]byte, tt.epoch), Payload: make([]byte, tt.payload)}
			used := func() int64 { return b.budget.(*budget.Budget).Used() }
			before := heapBytes()
			for range batches {
				if !b.add(&batch) {
					t.Fatal("no room")
				}
			}
			took, counted := heapBytes()-before, used()
			if counted < took*8/10 || counted > took*2 {
				t.Errorf("%d batches take %d bytes and are counted for %d", batches, took, counted)
			}
			b.clear()
			if b.bytes != 0 || used() != 0 {
				t.Errorf("%d bytes are left, %d of the budget", b.bytes, used())
			}
			runtime.KeepAlive(&b)
		})
	}
}

func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
