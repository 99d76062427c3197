package native

import (
	"math/bits"
	"sync"
)

const (
	// readBytes is the size in bytes of the buffer that one read fills at most.
	readBytes = 64 << 10
	// smallPartial is how many bytes the buffer of an idle connection has at most.
	smallPartial = 4 << 10
)

// readBuffers has the buffers of reads.
var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// largeBuffers has buffers of readBytes and more, by the logarithm of their capacity.
var largeBuffers [bits.UintSize]sync.Pool

// grown returns a buffer with the contents of b and room for need bytes in all, and releases b if it returns another. Capacities are powers
// of two, so that a message that arrives in many parts is copied twice at most, on average.
func grown(b []byte, need int) []byte {
	if need <= cap(b) {
		return b
	}
	class := bits.Len(uint(capacity(need) - 1))
	next, ok := largeBuffers[class].Get().(*[]byte)
	if !ok {
		fresh := make([]byte, 0, 1<<class)
		next = &fresh
	}
	grown := (*next)[:len(b)]
	copy(grown, b)
	release(b)
	return grown
}

// capacity returns the capacity of a buffer for so many bytes.
func capacity(need int) int64 { return 1 << bits.Len(uint(max(need, smallPartial)-1)) }

// release makes a buffer available for others. Nothing may refer to it.
func release(b []byte) {
	if cap(b) >= readBytes {
		b = b[:0]
		largeBuffers[bits.Len(uint(cap(b)-1))].Put(&b)
	}
}
