package consolidate

import (
	"testing"

	"github.com/kvcast/kvcast/pipeline/copies"
)

// TestNamesAreCountedInSteps has more names than one step counts, and changes them between
// steps.
func TestNamesAreCountedInSteps(t *testing.T) {
	const names = 3 * countNames
	tr := New(2, names, nil, nil, &Counts{})
	for h := range uint64(names) {
		tr.Store(int(h%2), new(continuing(h/3, storeOf(nil, h+1))), copies.Add)
	}
	turns := 0
	for next := uint64(0); ; next++ {
		done := tr.CountChildren(engine)
		done = tr.CountChildren(offload) && done
		checkTracker(t, tr)
		if done {
			break
		}
		tr.Remove(engine, next*2+1, copies.Remove)
		tr.Remove(engine, names-next*2-1, copies.Remove)
		tr.Store(engine, new(continuing(next, storeOf(nil, names+next+1))), copies.Add)
		checkTracker(t, tr)
		turns++
	}
	if turns < 2 {
		t.Errorf("turns: got %d, want several", turns)
	}
}
