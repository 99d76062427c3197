package cluster

import (
	"fmt"
	"testing"
)

// TestAssignmentIsEvenAndMovesLittle assigns 1,000 workers to 3 to 10 instances: each gets about 1/n of them. When one
// leaves, only its workers move.
func TestAssignmentIsEvenAndMovesLittle(t *testing.T) {
	const workers = 1000
	for n := 3; n <= 10; n++ {
		var all []*instance
		for i := range n {
			all = append(all, newInstance(fmt.Sprintf("kvcast-%d-5f7c9", i)))
		}
		count := make(map[*instance]int)
		for i := range workers {
			name := fmt.Sprintf("vllm-%d.default", i)
			was := first(all, name)
			count[was]++
			if is := first(all[1:], name); is != was && was != all[0] {
				t.Errorf("%d instances: %s moved from %s to %s when %s left", n, name, was.id, is.id, all[0].id)
			}
		}
		// The standard deviation of a share is below sqrt(workers/n): 4 of them are less likely than 1 in 10,000.
		for _, i := range all {
			share := workers / n
			if diff := count[i] - share; diff*diff > 16*share {
				t.Errorf("%d instances: %s has %d workers, want about %d", n, i.id, count[i], share)
			}
		}
	}
}

func TestAssignmentIsStable(t *testing.T) {
	all := []*instance{newInstance("a"), newInstance("b"), newInstance("c")}
	got := ""
	for i := range 12 {
		got += first(all, fmt.Sprintf("worker-%d", i)).id
	}
	if want := "cbbcbabbccca"; got != want {
		t.Errorf("instances of another version would assign workers otherwise: got %s, want %s", got, want)
	}
	if got := first(nil, "worker"); got != nil {
		t.Errorf("without candidates: got %s, want none", got.id)
	}
}
