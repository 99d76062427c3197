package transport

import "runtime"

// keptFrames is how many frames of a message are kept: one more than an engine's messages
// and replies have.
const keptFrames = 4

const (
	// MaxPayloadBytes is the length of the longest payload. It is more than ten times the
	// largest batch of an engine: a step that stores 128 K tokens takes some 700 KB.
	MaxPayloadBytes = 8 << 20
	// MaxBatchBytes is the size of the frames, in bytes, from which on a batch is full. The
	// last message may exceed it.
	MaxBatchBytes = 1 << 20
)

// Message is one message of a Batch.
type Message struct {
	// Frames are the first four frames, or all if there are fewer. They are valid until
	// the batch's next Release, while the batch or the message is reachable, and must not
	// be changed.
	Frames [][]byte
	// Count is the number of all frames; 0 for a dropped message.
	Count int
	// FD is the file descriptor of the message's connection; -1 if it is unknown, as for
	// inproc. It only identifies the connection, which may be closed by now. The system
	// may then reuse the number.
	FD int
}

func (m Message) bytes() (n int) {
	for _, f := range m.Frames {
		n += len(f)
	}
	return n
}

// Batch has room for a number of messages. It is not safe for concurrent use. Its memory
// is libzmq's, and freed by Release or the garbage collector.
type Batch struct {
	n        int // number of messages
	messages []Message
	frames   [][]byte // backs all Message.Frames
	views    views    // the memory that frames refer to
}

// NewBatch returns an empty batch with room for a number of messages, 1 or more.
func NewBatch(messages int) *Batch {
	b := &Batch{messages: make([]Message, messages), frames: make([][]byte, messages*keptFrames)}
	// frames is reachable as long as any message is.
	b.views = newViews(messages, &b.frames[0])
	return b
}

// Message returns the message at an index below Len.
func (b *Batch) Message(i int) Message { return b.messages[:b.n][i] }

// Len returns the number of messages, the dropped ones included.
func (b *Batch) Len() int { return b.n }

// Full reports whether no message can be added.
func (b *Batch) Full() bool { return b.n == len(b.messages) || b.Bytes() >= MaxBatchBytes }

// Bytes returns the size of the frames of all messages.
func (b *Batch) Bytes() int { return b.views.bytes() }

// Drop frees the frames of the message at an index. The message stays, without frames.
func (b *Batch) Drop(i int) {
	m := &b.messages[:b.n][i]
	b.views.drop(i)
	clear(m.Frames)
	*m = Message{FD: -1}
	runtime.KeepAlive(b)
}

// PeerAddress returns the IP address of the peer that sent the message at an index. It is
// empty if the message was dropped or its transport has no IP addresses.
func (b *Batch) PeerAddress(i int) string {
	defer runtime.KeepAlive(b)
	return b.views.peer(i)
}

// Release empties the batch.
func (b *Batch) Release() {
	clear(b.frames[:b.n*keptFrames]) // they refer to memory that is freed next
	b.n = 0
	b.views.release()
	runtime.KeepAlive(b) // otherwise a cleanup might free the views meanwhile
}
