//go:build cgo

package libzmq

import (
	"net/netip"
	"runtime"

	"github.com/kvcast/kvcast/internal/transport"
)

// maxBatchBytes is the size of the frames, in bytes, from which on a batch is full. The last message may exceed it.
const maxBatchBytes = 1 << 20

// Batch has room for a number of messages. It is not safe for concurrent use. Its memory
// is libzmq's, and freed by Release or the garbage collector.
type Batch struct {
	n        int // number of messages
	messages []transport.Message
	frames   [][]byte // backs all frames of messages
	views    views    // the memory that frames refer to
}

// NewBatch returns an empty batch with room for a number of messages, 1 or more.
func NewBatch(messages int) *Batch {
	b := &Batch{messages: make([]transport.Message, messages), frames: make([][]byte, messages*transport.KeptFrames)}
	// frames is reachable as long as any message is.
	b.views = newViews(messages, &b.frames[0])
	return b
}

// Messages returns the messages. They are valid until Release.
func (b *Batch) Messages() []transport.Message { return b.messages[:b.n] }

// Len returns the number of messages, the dropped ones included.
func (b *Batch) Len() int { return b.n }

// Full reports whether no message can be added.
func (b *Batch) Full() bool { return b.n == len(b.messages) || b.Bytes() >= maxBatchBytes }

// Bytes returns the size of the frames of all messages.
func (b *Batch) Bytes() int { return b.views.bytes() }

// Drop frees the frames of the message at an index. The message stays, without frames.
func (b *Batch) Drop(i int) {
	m := &b.messages[:b.n][i]
	b.views.drop(i)
	clear(m.Frames)
	*m = transport.Message{Conn: -1}
	runtime.KeepAlive(b)
}

// peer returns the IP address of the peer that sent the message at an index. It is invalid if the connection has no IP addresses.
func (b *Batch) peer(i int) netip.Addr {
	defer runtime.KeepAlive(b)
	address, err := netip.ParseAddr(b.views.peer(i))
	if err != nil {
		return netip.Addr{}
	}
	return address.Unmap()
}

// Release empties the batch.
func (b *Batch) Release() {
	clear(b.frames[:b.n*transport.KeptFrames]) // they refer to memory that is freed next
	b.n = 0
	b.views.release()
	runtime.KeepAlive(b) // otherwise a cleanup might free the views meanwhile
}
