package pipeline

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/ingest/wire"
)

// TestCopyWaitsForMemory covers a wait that is canceled, and one that succeeds.
func TestCopyWaitsForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &Pipeline{copies: semaphore.NewWeighted(maxCopyBytes)}
		if !p.acquireCopy(t.Context(), 2*maxCopyBytes, nil) {
			t.Fatal("there is memory, and none was acquired")
		}
		calls, start := 0, time.Now()
		if p.acquireCopy(t.Context(), 9, func() bool { calls++; return calls < 3 }) || calls != 3 || time.Since(start) != 3*waitInterval {
			t.Errorf("waited for %v with %d calls, want 3 calls in 3 s", time.Since(start), calls)
		}
		acquired := make(chan bool)
		go func() { acquired <- p.acquireCopy(t.Context(), maxCopyBytes, nil) }()
		synctest.Wait()
		p.releaseCopy(2 * maxCopyBytes)
		if !<-acquired {
			t.Error("memory was released, and not acquired")
		}
		p.releaseCopy(maxCopyBytes)
		if !p.copies.TryAcquire(maxCopyBytes) {
			t.Error("memory was not released")
		}
	})
}

// TestCopiesAcquireMemory reads a table while the copy budget is exhausted.
func TestCopiesAcquireMemory(t *testing.T) {
	r := &run{key: runKey{kind: wire.KindStored}}
	for h := range uint64(100_000) {
		r.hashes = append(r.hashes, h)
	}
	l := &Lane{ranks: map[uint32]*rankState{0: {}}}
	storeRun(l.newTable(l.ranks[0], wire.TierDevice), r)
	if got := copyBytes(l.tableSize(place{0, wire.TierDevice})); got < 3_200_000 || got > 5_800_000 {
		t.Errorf("a table of 100,000 blocks takes %d bytes", got)
	}
	p := &Pipeline{copies: semaphore.NewWeighted(maxCopyBytes)}
	ctx, cancel := context.WithCancel(t.Context())
	if !p.acquireCopy(ctx, maxCopyBytes+1, nil) {
		t.Fatal("there is memory, and none was acquired")
	}
	cancel()
	if p.encodeTable(ctx, l, place{0, wire.TierDevice}, func([]byte) bool { t.Error("blocks came"); return false }) {
		t.Error("a copy was made beyond the limit")
	}
	p.releaseCopy(maxCopyBytes + 1)
	pieces := 0
	if !p.encodeTable(t.Context(), l, place{0, wire.TierDevice}, func([]byte) bool {
		if pieces++; p.copies.TryAcquire(maxCopyBytes) {
			t.Error("the copy is not counted")
		}
		return true
	}) || pieces == 0 || !p.copies.TryAcquire(maxCopyBytes) {
		t.Errorf("%d pieces, or memory not released", pieces)
	}
}
