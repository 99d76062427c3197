package radix

import (
	"testing"
	"unsafe"
)

// TestRunIsTwoCacheLines keeps runs from growing: each is read at random addresses.
func TestRunIsTwoCacheLines(t *testing.T) {
	if n := unsafe.Sizeof(run{}); n != 128 {
		t.Errorf("%d bytes, want 128", n)
	}
}
