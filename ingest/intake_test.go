package ingest

import (
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestLargeBatchesAreDecodedOneAfterAnother has three workers of one Ingest. A goroutine that processes a large batch may decode others of its worker.
func TestLargeBatchesAreDecodedOneAfterAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		first := newTestWorker(quietLane{}, slog.New(slog.DiscardHandler))
		shared := first.shared
		load := func(w *worker, bytes int) *intake {
			var e wire.Encoder
			in := shared.intake(w)
			in.arrive(sequence.Batch{Payload: append(e.AppendBatch(nil, &wire.Batch{}), make([]byte, bytes)...)})
			in.load()
			return in
		}
		a := load(first, maxDecoding-1000) // other large batches wait
		nested := load(first, maxDecoding-1000)
		small := load(&worker{shared: shared}, smallPayload/2)
		done := make([]bool, 2)
		for i := range done {
			go func() {
				load(&worker{shared: shared}, maxDecoding/2).release()
				done[i] = true
			}()
		}
		synctest.Wait()
		if done[0] || done[1] {
			t.Error("a large batch was decoded beside another one of the same size")
		}
		nested.release()
		synctest.Wait()
		if done[0] || done[1] {
			t.Error("a large batch was decoded before the first of another worker was processed")
		}
		a.release()
		synctest.Wait()
		if !done[0] || !done[1] {
			t.Error("a large batch waits although no other is processed")
		}
		if used := shared.budgets.decoding.Used(); used != 0 {
			t.Errorf("%d bytes are in use afterwards", used)
		}
		for _, in := range []*intake{a, nested, small} {
			in.release()
			shared.recycle(in)
		}
	})
}
