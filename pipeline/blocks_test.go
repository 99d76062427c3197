package pipeline

import (
	"maps"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

// all calls f with every block.
func (t *blocks) all(f func(*slot)) {
	for b := range t.table.All() {
		f(b)
	}
}

// checkBlocks compares the table with a map of parents.
func checkBlocks(t interface{ Fatalf(string, ...any) }, got *blocks, want map[uint64]uint64) {
	if n := got.table.Len(); n != len(want) {
		t.Fatalf("length: got %d, want %d", n, len(want))
	}
	all := make(map[uint64]uint64)
	got.all(func(b *slot) { all[b.Key()] = b.Value.parent })
	if !maps.Equal(want, all) {
		t.Fatalf("blocks (-want +got):\n%s", cmp.Diff(want, all))
	}
}

func TestBlockFillsItsSlot(t *testing.T) {
	if size := unsafe.Sizeof(slot{}); size != 24 {
		t.Errorf("a slot has %d bytes, want 24", size)
	}
}
