package process

import "testing"

func TestMemoryIsReturnedWhenMuchIsUnusedAndLittleIsAllocated(t *testing.T) {
	const mib = 1 << 20
	r := newReturner(memoryUse{30 * mib, 50 * mib})
	for i, step := range []struct {
		kept, allocated uint64 // in MiB
		want            bool
		after           uint64 // kept after the return
	}{
		{kept: 90, allocated: 100},                                // less than is worth a collection
		{kept: 400, allocated: 1000},                              // a busy server would need it again
		{kept: 400, allocated: 1001, want: true, after: 300},      // much was in use
		{kept: 310, allocated: 1002},                              // so this is no excess
		{kept: 370, allocated: 1003},                              // less than a quarter
		{kept: 376, allocated: 1004, want: true, after: 40},       // it was not in use any more
		{kept: 40, allocated: 1005}, {kept: 103, allocated: 1006}, // less than 64 MiB
		{kept: 20, allocated: 1007}, // the runtime has returned some
		{kept: 84, allocated: 1008, want: true, after: 84},
		{kept: 84, allocated: 1009}, // and all of it is in use
	} {
		if got := r.due(memoryUse{step.kept * mib, step.allocated * mib}); got != step.want {
			t.Errorf("step %d: due is %t, want %t", i, got, step.want)
		} else if got {
			r.returned(memoryUse{step.after * mib, step.allocated * mib})
		}
	}
}
