package copies

import (
	"testing"

	"github.com/kvcast/kvcast/internal/wire"
)

// TestCopyCountSaturates stores a block more often than its count can represent.
func TestCopyCountSaturates(t *testing.T) {
	full := Count{Further: 1<<32 - 1, Unsure: 1<<32 - 1}
	got := full
	got.Stored(Add)
	got.Stored(AddUnsure)
	if got != full {
		t.Errorf("count: got %+v, want %+v", got, full)
	}
	if got.Removed(RemoveOp(0, &wire.Event{BlockHashes: make([]uint64, 1), Rare: &wire.Rare{RemainingCopies: []uint32{1<<32 - 1}}}, 0, Remove), false) {
		t.Error("block with the most copies left: removed, want it to remain")
	}
}
