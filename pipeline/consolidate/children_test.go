package consolidate

import (
	"testing"

	"github.com/kvcast/kvcast/pipeline/copies"
)

// TestChildrenAreCountedInSteps has more names than one step counts, and changes names between
// steps.
func TestChildrenAreCountedInSteps(t *testing.T) {
	const names = 3 * namesPerStep
	tr := New(2, names, nil, nil, &Counts{})
	for h := range uint64(names) {
		tr.Store(int(h%2), new(continuing(h/3, storeOf(nil, h+1))), copies.Add)
	}
	steps := 0
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
		steps++
	}
	if steps < 2 {
		t.Errorf("steps: got %d, want several", steps)
	}
}
