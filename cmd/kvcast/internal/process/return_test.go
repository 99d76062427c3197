package process

import "testing"

func TestMemoryIsReturnedWhenMuchIsUnusedAndLittleIsAllocated(t *testing.T) {
	const mib = 1 << 20
	var r returner
	for i, step := range []struct {
		heap, allocated, live uint64 // in MiB
		cycles, blocks        uint64
		want                  bool
	}{
		{heap: 30, allocated: 20, live: 5, cycles: 1},
		{heap: 90, allocated: 21, live: 30, cycles: 2},                               // less than is worth a collection
		{heap: 400, allocated: 1000, live: 100, cycles: 9, blocks: 1e6},              // a busy server would need it again
		{heap: 400, allocated: 1001, live: 100, cycles: 9, blocks: 1e6, want: true},  // that has become idle
		{heap: 105, allocated: 1002, live: 100, cycles: 10, blocks: 1e6},             // it was returned
		{heap: 160, allocated: 1003, live: 100, cycles: 10, blocks: 1e6},             // less than 64 MiB
		{heap: 160, allocated: 1004, live: 100, cycles: 10, blocks: 3e5, want: true}, // after 700,000 blocks have left
		{heap: 1240, allocated: 1005, live: 1000, cycles: 11, blocks: 3e5},           // less than a quarter
		{heap: 1250, allocated: 1006, live: 1000, cycles: 11, blocks: 3e5, want: true},
		{heap: 70, allocated: 1007, live: 10, cycles: 12, blocks: 3e5},
		{heap: 70, allocated: 1008, live: 10, cycles: 12, blocks: 0, want: true}, // more blocks than the heap has
	} {
		if got := r.due(memoryUse{step.heap * mib, step.allocated * mib, step.live * mib, step.cycles, step.blocks}); got != step.want {
			t.Errorf("step %d: due is %t, want %t", i, got, step.want)
		}
	}
}
