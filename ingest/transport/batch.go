package transport

import "runtime"

// keptFrames is how many frames of a message are kept: one more than any expected message
// has.
const keptFrames = 4

// MaxBatchBytes is the size of the frames, in bytes, from which on a batch is full. The last
// message may exceed it.
const MaxBatchBytes = 1 << 20

// noFD is the FD of a message whose connection is unknown.
const noFD = -1

// Message is one message of a Batch.
type Message struct {
	// Frames are the first four frames, or fewer where there are fewer. They are valid until
	// the next Receive or Release of the batch, while the batch or message is reachable,
	// and must not be changed.
	Frames [][]byte
	// Count is the number of all frames.
	Count int
	// FD is the file descriptor of the message's connection; -1 where it is unknown, as for
	// inproc. It only identifies the connection: libzmq may have closed it, and the system
	// may have reused the number.
	FD int

	copied bool // whether the frames are Go's memory
}

// Batch has room for a number of messages. It is not safe for concurrent use. It holds
// memory of libzmq until Release, or until it is garbage.
type Batch struct {
	n        int // number of messages
	messages []Message
	frames   [][]byte // backs all Message.Frames
	views    views    // the memory of frames that are not copies
	copied   int      // bytes of frames that are copies
}

// NewBatch returns an empty batch with room for a number of messages, 1 or more.
func NewBatch(messages int) *Batch {
	b := &Batch{messages: make([]Message, messages), frames: make([][]byte, messages*keptFrames)}
	// frames is reachable as long as any message is.
	b.views = newViews(messages, &b.frames[0])
	return b
}

// Message returns the message at an index below what Receive returned.
func (b *Batch) Message(i int) Message { return b.messages[:b.n][i] }

// Len returns the number of messages, with those dropped.
func (b *Batch) Len() int { return b.n }

// Full reports whether no message can be added.
func (b *Batch) Full() bool { return b.n == len(b.messages) || b.Bytes() >= MaxBatchBytes }

// Bytes returns the size of the frames of all messages.
func (b *Batch) Bytes() int { return b.views.bytes() + b.copied }

// Drop releases the frames of the message at an index. The message stays, without frames.
func (b *Batch) Drop(i int) {
	m := &b.messages[:b.n][i]
	if m.copied {
		for _, f := range m.Frames {
			b.copied -= len(f)
		}
	} else {
		b.views.drop(i)
	}
	clear(m.Frames)
	*m = Message{FD: noFD}
	runtime.KeepAlive(b)
}

// PeerAddress returns the IP address of the peer that sent the message at an index, as
// libzmq knows it: empty where the transport has none, or the message was copied.
func (b *Batch) PeerAddress(i int) string {
	if b.messages[:b.n][i].copied {
		return ""
	}
	defer runtime.KeepAlive(b)
	return b.views.peer(i)
}

// Release empties the batch for another Receive.
func (b *Batch) Release() {
	b.forget()
	b.views.release()
	runtime.KeepAlive(b) // otherwise a finalizer might release the views meanwhile
}

// forget clears the frames, so that none refers to memory that was released.
func (b *Batch) forget() {
	clear(b.frames[:b.n*keptFrames])
	b.n, b.copied = 0, 0
}

// kept returns the place of a message's frames.
func (b *Batch) kept(i int) *[keptFrames][]byte {
	return (*[keptFrames][]byte)(b.frames[i*keptFrames:])
}
