package consolidate

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
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

// TestRestoredTrackerCountsChildrenInAsManySteps restores a tracker between two steps. The tracker once had more names.
func TestRestoredTrackerCountsChildrenInAsManySteps(t *testing.T) {
	testclass.WithoutRace(t)
	const names = 5 * namesPerStep
	for _, begun := range []int{0, 1, 3, 6} {
		tr := New(2, names, nil, nil, &Counts{})
		for h := range uint64(names) {
			tr.Store(int(h%2), new(continuing(h/3, storeOf(nil, h+1))), copies.Add)
		}
		for h := range uint64(names / 2) {
			tr.Remove(int(h%2), h+1, copies.Remove)
		}
		for range begun {
			tr.CountChildren(engine)
		}
		restored, err := Restore(tr.AppendState(nil), 2, names, nil, nil, &Counts{})
		if err != nil {
			t.Fatal(err)
		}
		for step := range 7 {
			checkTracker(t, restored)
			if got, want := restored.CountChildren(engine), tr.CountChildren(engine); got != want {
				t.Errorf("step %d, restored after %d: all children counted: got %t, want %t", step, begun, got, want)
			}
			stored := continuing(1, storeOf(nil, uint64(names+step+1)))
			tr.Store(engine, &stored, copies.Add)
			restored.Store(engine, &stored, copies.Add)
		}
		if diff := cmp.Diff(tr.children, restored.children, cmp.AllowUnexported(childCounts{})); diff != "" {
			t.Errorf("children, restored after %d steps (-want +got):\n%s", begun, diff)
		}
	}
}
