package native

import (
	"math/bits"
	"sync"
)

const (
	// readBytes is the size in bytes of the buffer that one read fills at most.
	readBytes = 64 << 10
	// smallPartial is how many bytes of an incomplete message a connection keeps without
	// accounting for them.
	smallPartial = 4 << 10
)

// readBuffers has the buffers of reads.
var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// grown returns a buffer with the contents of b and room for need bytes in all. Capacities are
// powers of two, so that a message that arrives in many parts is copied twice at most, on average.
func grown(b []byte, need int) []byte {
	if need <= cap(b) {
		return b
	}
	next := make([]byte, len(b), 1<<bits.Len(uint(max(need, smallPartial)-1)))
	copy(next, b)
	return next
}
