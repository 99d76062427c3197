package ingest

import (
	"runtime"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
)

// A live batch that there is no room for is asked for once the others are there,
// even if the engine had not published it when it was asked first.
func TestWhatWasNotHeldIsAskedFor(t *testing.T) {
	tests := []struct {
		name string
		held uint64 // batches that there is room for
		full int64  // bytes that others hold back
	}{
		{name: "more batches than a publisher may", held: maxHeldBatches},
		{name: "more bytes than all may", full: config.DefaultReorderBufferBytes},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := &tale{t: t, seen: make(map[uint64]bool)}
			p, in := newTestPublisher(l)
			p.replay = "tcp://engine"
			var r *repair
			p.worker.fetch = func(_ *publisher, asked *repair) { r = asked }
			budget := p.worker.shared.budgets.reordered
			budget.Take(tt.full)
			now := testTime
			p.connect(now)
			message := func(seq uint64) []byte { return testMessage("", seq, blockOf(0, seq)).Frames[2] }
			// ask has the engine answer with the batches up to a seq.
			ask := func(last uint64) (again bool) {
				t.Helper()
				from, ok := p.ask(r)
				if !ok {
					t.Fatal("nothing is asked for")
				}
				for seq := from; seq <= last; seq++ {
					a := newArrival(&in.decoder, nil, seq, message(seq))
					a.replayed = true
					if !p.replayed(in, now, r, &a) {
						t.Fatalf("batch %d is not wanted", seq)
					}
				}
				now = now.Add(time.Second)
				_, again = p.asked(in, now, r, nil)
				return again
			}
			last := tt.held + 1
			for seq := range last + 1 {
				p.messageAt(in, now, testMessage("", seq, blockOf(0, seq)))
			}
			if n := valueOf(t, p.metrics.unheld); n != 2 {
				t.Errorf("%v batches were not held back, want 2", n)
			}
			if !ask(last - 1) {
				t.Fatalf("it is done without batch %d", last)
			}
			if ask(last) {
				t.Error("more is asked for than there is")
			}
			if p.state != SourceLive || len(l.seen) != int(last)+1 || l.incomplete {
				t.Errorf("state %v with %d of %d batches, incomplete %v", p.state, len(l.seen), last+1, l.incomplete)
			}
			if n := budget.Used(); n != tt.full {
				t.Errorf("%d bytes are held back, want %d", n, tt.full)
			}
		})
	}
}

// valueOf returns what a counter has counted, of the one worker there is.
func valueOf(t *testing.T, c prometheus.Collector) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

// What a batch that is held back is counted for is about what it takes: of a tiny one
// its epoch is most.
func TestMemoryOfHeldBatchesIsCounted(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector takes memory of its own")
	}
	const batches = 4000
	for _, tt := range []struct {
		name           string
		epoch, payload int
	}{
		{"tiny", 0, 20}, {"long epochs", 2000, 20}, {"large", 16, 3000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := holding{budget: budget.New("test", 0)}
			a := arrival{epoch: make([]byte, tt.epoch), payload: make([]byte, tt.payload), batch: new(wire.Batch)}
			before := heapBytes()
			for range batches {
				if !h.add(&a, testTime, 1) {
					t.Fatal("no room")
				}
			}
			took, counted := heapBytes()-before, h.budget.Used()
			if counted < took*8/10 || counted > took*2 {
				t.Errorf("%d batches take %d bytes and are counted for %d", batches, took, counted)
			}
			h.clear()
			if h.bytes != 0 || h.budget.Used() != 0 {
				t.Errorf("%d bytes are left, %d of the budget", h.bytes, h.budget.Used())
			}
			runtime.KeepAlive(&h)
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
