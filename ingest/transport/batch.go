package transport

import "runtime"

// keptFrames is how many frames of a message are kept: one more than any message
// has that is expected.
const keptFrames = 4

// MaxBatchBytes is how many bytes the frames of a batch come to before no message is
// added any more; the last one may be larger.
const MaxBatchBytes = 1 << 20

// noFD is the FD of a message whose connection is unknown.
const noFD = -1

// Message is one message of a Batch.
type Message struct {
	// Frames are the message's first four, or fewer where it has fewer. They are
	// good until the batch's next Receive or Release, as long as the batch or
	// the message is held, and must not be changed.
	Frames [][]byte
	// Count is how many frames it has, those beyond Frames included.
	Count int
	// FD is this process's file descriptor of the connection that the message came
	// by; -1 where it is unknown, as for inproc. It is only a name: libzmq may
	// have closed it meanwhile, and the system given it to another connection.
	FD int

	copied bool // whether the frames are Go's memory
}

// Batch is the memory for a number of messages. One goroutine at a time may use
// it, with any socket. It holds libzmq's memory, which Release gives back, and
// else the garbage collector.
type Batch struct {
	n        int // messages there are
	messages []Message
	frames   [][]byte // what all Message.Frames are parts of
	taken    taken    // the memory that frames are views of
	copied   int      // bytes of frames that are copies
}

// NewBatch returns an empty batch with room for a number of messages, 1 or more.
func NewBatch(messages int) *Batch {
	b := &Batch{messages: make([]Message, messages), frames: make([][]byte, messages*keptFrames)}
	// frames is what lives as long as any message is held.
	b.taken = newTaken(messages, &b.frames[0])
	return b
}

// Message returns the message at an index below what Receive returned.
func (b *Batch) Message(i int) Message { return b.messages[:b.n][i] }

// Len returns how many messages there are, those dropped included.
func (b *Batch) Len() int { return b.n }

// Full reports whether no message can be added.
func (b *Batch) Full() bool { return b.n == len(b.messages) || b.Bytes() >= MaxBatchBytes }

// Bytes returns how many bytes the frames of all messages hold.
func (b *Batch) Bytes() int { return b.taken.bytes() + b.copied }

// Drop gives the frames of the message at an index back. The message stays in its
// place, without frames.
func (b *Batch) Drop(i int) {
	m := &b.messages[:b.n][i]
	if m.copied {
		for _, f := range m.Frames {
			b.copied -= len(f)
		}
	} else {
		b.taken.drop(i)
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
	return b.taken.peer(i)
}

// Release gives the messages back, which leaves the batch empty and good for
// another Receive.
func (b *Batch) Release() {
	b.forget()
	b.taken.release()
	runtime.KeepAlive(b) // else it might be collected, and taken given back, meanwhile
}

// forget takes the views away, so that who still looks at one finds nothing rather
// than memory that is another's now.
func (b *Batch) forget() {
	clear(b.frames[:b.n*keptFrames])
	b.n, b.copied = 0, 0
}

// kept returns where the frames of a message go.
func (b *Batch) kept(i int) *[keptFrames][]byte {
	return (*[keptFrames][]byte)(b.frames[i*keptFrames:])
}
