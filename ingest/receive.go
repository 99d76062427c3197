package ingest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/ingest/wire"
)

// messageFrames is how many frames an engine's message has: topic, seq, payload.
const messageFrames = 3

// maxMessageBytes is the length of the longest payload. It is more than ten times
// the largest batch an engine makes: a step that stores 128 K tokens takes some
// 700 KB.
const maxMessageBytes = 8 << 20

// maxTopicBytes is the length of the longest topic: of the longest names of a pod
// and a model with an epoch and a snapshot, and much to spare. Topics are kept,
// and logged.
const maxTopicBytes = 2048

// errWouldBlock is libzmq's answer where there is nothing to receive, or nowhere
// to send to.
const errWouldBlock = zmq4.Errno(syscall.EAGAIN)

// message is one message as it came. Its frames are good until the next one is
// received.
type message struct {
	frames [messageFrames][]byte
	count  int // of all frames, those beyond messageFrames included
}

// receive reads the next message, and tells whether there was one.
func (m *message) receive(s *zmq4.Socket) (bool, error) {
	m.count = 0
	for {
		// libzmq hands messages on whole: only the first frame can be absent.
		frame, err := s.RecvBytes(zmq4.DONTWAIT)
		if err != nil {
			if m.count == 0 && errors.Is(err, errWouldBlock) {
				return false, nil
			}
			return false, fmt.Errorf("receive frame: %w", err)
		}
		if m.count < messageFrames {
			m.frames[m.count] = frame
		}
		m.count++
		more, err := s.GetRcvmore()
		if err != nil {
			return false, fmt.Errorf("receive frame: %w", err)
		}
		if !more {
			return true, nil
		}
	}
}

// arrival is what a message says.
type arrival struct {
	// topic is its part before what an engine may append.
	topic []byte
	// epoch names the engine's life, where the engine says so.
	epoch   []byte
	seq     uint64
	payload []byte
	// batch is the payload decoded; nil where err tells why it can not be.
	batch *wire.Batch
	err   error
}

// open reads what the message says; why tells why it is no engine's message.
func (m *message) open(d *wire.Decoder) (a arrival, why refusal, ok bool) {
	if m.count != messageFrames {
		return a, refusedFrames, false
	}
	if len(m.frames[1]) != 8 {
		return a, refusedSeq, false
	}
	if len(m.frames[0]) > maxTopicBytes {
		return a, refusedTopicLength, false
	}
	if len(m.frames[2]) > maxMessageBytes {
		return a, refusedLength, false
	}
	a.topic, a.epoch, _ = wire.CutTopic(m.frames[0])
	a.seq = binary.BigEndian.Uint64(m.frames[1])
	a.payload = m.frames[2]
	a.batch, a.err = d.Decode(a.payload)
	return a, 0, true
}
