package pipeline

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// TestBudgetIsGivenInOrder has a large request before small ones, and one that
// leaves.
func TestBudgetIsGivenInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &limiter{limit: 10}
		if !b.take(t.Context(), 6, nil) {
			t.Fatal("there is room, and nothing was given")
		}
		leaving, leave := context.WithCancel(t.Context())
		got := make(chan int, 4)
		for _, bytes := range []int{5, 25, 3, 4} {
			ctx := t.Context()
			if bytes == 5 {
				ctx = leaving
			}
			go func() {
				if !b.take(ctx, bytes, nil) {
					got <- -1
					return
				}
				got <- bytes
			}()
			synctest.Wait()
		}
		leave()
		if n := <-got; n != -1 {
			t.Errorf("%d bytes were given before those that were asked for first", n)
		}
		b.give(6)
		synctest.Wait()
		if len(got) != 1 || <-got != 25 {
			t.Error("more than fits is not given alone")
		}
		b.give(25)
		synctest.Wait()
		if len(got) != 2 || <-got+<-got != 7 {
			t.Error("what fits together is not given at once")
		}
		// Who waits is asked each second whether to go on.
		beats, began := 0, time.Now()
		if b.take(t.Context(), 9, func() bool { beats++; return beats < 3 }) || beats != 3 || time.Since(began) != 3*waitBeat {
			t.Errorf("it waited for %v and was asked %d times, want three times in three seconds", time.Since(began), beats)
		}
		b.give(3)
		b.give(4)
		if b.given != 0 || len(b.waiting) != 0 {
			t.Errorf("at the end: %d given, %d waiting", b.given, len(b.waiting))
		}
	})
}

// TestCopiesAreCounted reads a table while nothing is left for a copy.
func TestCopiesAreCounted(t *testing.T) {
	r := &run{key: runKey{kind: wire.KindStored}}
	for h := range uint64(100_000) {
		r.hashes = append(r.hashes, h)
	}
	l := &Lane{ranks: map[uint32]*rankState{0: {}}}
	storeRun(l.newTable(l.ranks[0], wire.TierDevice), r)
	if got := copyBytes(l.tableSize(place{0, wire.TierDevice})); got < 3_200_000 || got > 5_800_000 {
		t.Errorf("a table of 100,000 blocks takes %d bytes", got)
	}
	p := &Pipeline{copies: limiter{limit: 1}}
	ctx, cancel := context.WithCancel(t.Context())
	if !p.copies.take(ctx, 1, nil) {
		t.Fatal("nothing was given")
	}
	cancel()
	if p.tellTable(ctx, l, place{0, wire.TierDevice}, func([]byte) bool { t.Error("blocks came"); return false }) {
		t.Error("a copy was made beyond the limit")
	}
	p.copies.give(1)
	pieces := 0
	if !p.tellTable(t.Context(), l, place{0, wire.TierDevice}, func([]byte) bool {
		if pieces++; p.copies.given == 0 {
			t.Error("the copy is not counted")
		}
		return true
	}) || pieces == 0 || p.copies.given != 0 {
		t.Errorf("%d pieces, and %d bytes not given back", pieces, p.copies.given)
	}
}
