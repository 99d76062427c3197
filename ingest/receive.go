package ingest

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/zmqio"
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

// arrival is a batch as it came.
type arrival struct {
	// topic is its part before what an engine may append.
	topic []byte
	// epoch and publisher name the engine's incarnation, where the engine says so.
	epoch     []byte
	publisher []byte
	seq       uint64
	payload   []byte
	// replayed reports whether it came from the replay socket, without an epoch.
	replayed bool
	// orphaned reports whether the connection that it came by is closed already.
	orphaned bool
	// batch is the payload decoded; nil where err tells why it can not be.
	batch *wire.Batch
	err   error
	// print is what tells it from others of its seq.
	print fingerprint
}

// eventless reports whether the batch decodes, and has no events.
func (a *arrival) eventless() bool {
	return a.err == nil && len(a.batch.Events)+len(a.batch.Skipped) == 0
}

// errTooLong is a replayed payload that is not even decoded.
var errTooLong = errors.New("payload is too long")

// newArrival decodes a batch. It is good until the decoder's next one.
func newArrival(d *wire.Decoder, epoch []byte, seq uint64, payload []byte) arrival {
	a := arrival{epoch: epoch, seq: seq, payload: payload, print: fingerprint{hash: xxh3.Hash(payload)}}
	if len(payload) > maxMessageBytes {
		a.err = errTooLong
		return a
	}
	a.batch, a.err = d.Decode(payload)
	if a.err == nil {
		a.print.time = math.Float64bits(a.batch.Time)
		a.publisher = a.batch.PublisherID
	}
	return a
}

// open reads what a message says; why tells why it is no engine's message.
func open(d *wire.Decoder, m zmqio.Message) (a arrival, why refusal, ok bool) {
	if m.Count != messageFrames {
		return a, refusedFrames, false
	}
	if len(m.Frames[1]) != 8 {
		return a, refusedSeq, false
	}
	if len(m.Frames[0]) > maxTopicBytes {
		return a, refusedTopicLength, false
	}
	if len(m.Frames[2]) > maxMessageBytes {
		return a, refusedLength, false
	}
	topic, epoch, _ := wire.CutTopic(m.Frames[0])
	a = newArrival(d, epoch, binary.BigEndian.Uint64(m.Frames[1]), m.Frames[2])
	a.topic = topic
	return a, 0, true
}
