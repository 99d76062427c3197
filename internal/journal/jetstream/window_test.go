package jetstream

import "testing"

// TestAppendsArePublishedAgainWhileTheyAreAcknowledged acknowledges appends of an earlier attempt while they are published
// again.
func TestAppendsArePublishedAgainWhileTheyAreAcknowledged(t *testing.T) {
	t.Parallel()
	appends := []*inFlight{{}, {}, {}}
	w := window{acked: 10}
	for _, a := range appends {
		w.push(a)
	}
	w.next(len(appends))
	w.retry()
	unsent, first := w.next(len(appends))
	w.receive(11)
	w.receive(12)
	for _, want := range []uint64{11, 12} {
		if a, seq := w.pop(); a != appends[want-11] || seq != want {
			t.Errorf("got %p as %d, want %p as %d", a, seq, appends[want-11], want)
		}
	}
	if first != 11 || len(unsent) != len(appends) {
		t.Fatalf("got %d appends from %d, want %d from 11", len(unsent), first, len(appends))
	}
	for i, a := range unsent {
		if a != appends[i] {
			t.Errorf("append %d: got %p, want %p", i, a, appends[i])
		}
	}
}
