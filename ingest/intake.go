package ingest

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/wire"
)

// messageFrames is the number of frames in an engine's message: topic, seq, payload.
const messageFrames = 3

// errTooLong is returned for a replayed payload of more than transport.MaxPayloadBytes.
var errTooLong = errors.New("payload is too long")

// intake decodes batches in reused memory. It is not safe for concurrent use.
type intake struct {
	decoder wire.Decoder
	counts  wire.Counts
	out     feed.Batch

	// arrival is the message opened last. topic is its topic without the epoch.
	arrival sequence.Batch
	topic   []byte
	// decoded is the batch whose result batch and err are; nil for none. batch is nil if err is
	// set.
	decoded *sequence.Batch
	batch   *wire.Batch
	err     error
}

// open makes an engine's message the arrival. ok is false if it is malformed, and why is the reason.
func (in *intake) open(m transport.Message) (why refusal, ok bool) {
	switch {
	case m.Count != messageFrames:
		return refusedFrames, false
	case len(m.Frames[1]) != 8:
		return refusedSeq, false
	case len(m.Frames[0]) > config.MaxTopicBytes:
		return refusedTopicLength, false
	case len(m.Frames[2]) > transport.MaxPayloadBytes:
		return refusedLength, false
	}
	var epoch []byte
	in.topic, epoch, _ = wire.CutTopic(m.Frames[0])
	in.load(epoch, binary.BigEndian.Uint64(m.Frames[1]), m.Frames[2])
	return 0, true
}

// load decodes a payload and makes it the arrival.
func (in *intake) load(epoch []byte, seq uint64, payload []byte) {
	b := &in.arrival
	*b = sequence.Batch{Seq: seq, Epoch: epoch, Payload: payload}
	b.Fingerprint.Hash = xxh3.Hash(payload)
	in.decoded = nil
	in.decode(b)
	if in.err != nil {
		b.Malformed = true
		return
	}
	b.Fingerprint.Time = math.Float64bits(in.batch.Time)
	b.Publisher = in.batch.PublisherID
	b.Empty = len(in.batch.Events)+len(in.batch.Skipped) == 0
}

// decode decodes a batch unless it is the batch decoded last.
func (in *intake) decode(b *sequence.Batch) {
	if in.decoded == b {
		return
	}
	in.decoded = b
	if len(b.Payload) > transport.MaxPayloadBytes {
		in.batch, in.err = nil, errTooLong
		return
	}
	in.batch, in.err = in.decoder.Decode(b.Payload)
}
