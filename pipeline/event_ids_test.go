package pipeline

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestEventIDsAreNeverReused adds and removes workers under more names than the pipeline
// remembers.
func TestEventIDsAreNeverReused(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		got := newEventIDs()
		last, there := make(map[string]uint64), make(map[string]uint64)
		spare := maxRemovedNames - rapid.IntRange(0, 6).Draw(t, "names remembered")
		for i := range spare {
			name := fmt.Sprint("spare-", i)
			got.resume(name)
			got.remember(removedWorker{name: name, lastID: 1})
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h", "i"}).Draw(t, "name")
			id, ok := there[name]
			if ok {
				delete(there, name)
				got.remember(removedWorker{name: name, lastID: id})
				last[name] = id
			} else {
				id, _ = got.resume(name)
				if id < last[name] {
					t.Fatalf("worker %s goes on after %d, and had %d before", name, id, last[name])
				}
				there[name] = id + rapid.Uint64Range(1, 9).Draw(t, "events")
			}
			if n := len(got.all); n > maxRemovedNames || n != len(got.byName) {
				t.Fatalf("remembered: %d in order, %d by name, want at most %d", n, len(got.byName), maxRemovedNames)
			}
		}
	})
}

func TestEventIDsOfRecentlyRemovedWorkersAreExact(t *testing.T) {
	got := newEventIDs()
	name := func(i int) string { return fmt.Sprint("w", i) }
	check := func(what, name string, want uint64) {
		t.Helper()
		if got, _ := got.resume(name); got != want {
			t.Errorf("%s: goes on after %d, want %d", what, got, want)
		}
	}
	check("a new name", "new", 0)
	for i := range maxRemovedNames {
		got.remember(removedWorker{name: name(i), lastID: uint64(100 + i)})
	}
	check("a new name before any is evicted", "new", 0)
	check("the first to have gone", name(0), 100)
	got.remember(removedWorker{name: name(0), lastID: 7}) // now the most recently removed
	got.remember(removedWorker{name: "one too many", lastID: 9})
	check("the first to have gone now, forgotten", name(1), 101)
	check("a new name", "new", 101)
	check("the next", name(2), 102)
	check("one that went twice", name(0), 7)
	got.remember(removedWorker{name: "a", lastID: 1})
	got.remember(removedWorker{name: "b", lastID: 1})
	got.remember(removedWorker{name: "c", lastID: 1})
	check("the next forgotten", name(3), 103)
	got.remember(removedWorker{name: "low", lastID: 1})
	for i := range maxRemovedNames {
		got.remember(removedWorker{name: fmt.Sprint("later ", i), lastID: 5})
	}
	check("a name forgotten with a lower id than another", "low", 100+maxRemovedNames-1)
}
