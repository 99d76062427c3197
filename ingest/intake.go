package ingest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

// messageFrames is the number of frames in an engine's message: topic, seq, payload.
const messageFrames = 3

const (
	// smallPayload is the length in bytes of the largest payload that is decoded without a decodeSlot. Decoded it needs 1 MiB at most.
	smallPayload = 64 << 10
	// maxDecoding is how many bytes of larger payloads are decoded and processed at a time: one of the largest. Decoded they need 64 MiB at most.
	maxDecoding = transport.MaxPayloadBytes
)

// decodeSlot is memory for decoded batches of large payloads. Each worker has one, which its mutex guards: a goroutine that processes one of its
// batches may have to process others before. The zero value is a slot without memory.
type decodeSlot struct {
	batches int
	bytes   int64 // of the payload of the first
}

// acquire waits for memory, in FIFO order, unless the slot has it. A goroutine with a slot must not wait for another worker, or a listener.
func (d *decodeSlot) acquire(b *budgets, payload []byte) {
	if d.batches++; d.batches == 1 {
		d.bytes = int64(min(len(payload), maxDecoding))
		_ = b.decode.Acquire(context.Background(), d.bytes) // each batch is soon processed
		b.decoding.Adjust(d.bytes)
	}
}

// release frees the memory after the last of the slot's batches.
func (d *decodeSlot) release(b *budgets) {
	if d.batches--; d.batches == 0 {
		b.decoding.Adjust(-d.bytes)
		b.decode.Release(d.bytes)
	}
}

// intake decodes batches in reused memory. It is not safe for concurrent use.
type intake struct {
	budgets *budgets
	// slot is that of the worker whose mutex is held while batches are decoded; own if there is none. acquired reports whether the decoded
	// batch uses it.
	slot     *decodeSlot
	own      decodeSlot
	acquired bool

	decoder wire.Decoder
	counts  wire.Counts
	out     feed.Batch

	// arrival is the message opened last. topic is its topic without the epoch.
	arrival sequence.Batch
	topic   []byte
	// decoded is the batch whose result batch and err are; nil for none. batch is nil if err is set.
	decoded *sequence.Batch
	batch   *wire.Batch
	err     error
}

// open makes an engine's message the arrival, which load decodes. ok is false if it is malformed, and why is the reason.
func (in *intake) open(m transport.Message) (why refusal, ok bool) {
	switch {
	case m.Foreign:
		return refusedForeignRank, false
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
	in.topic, epoch = wire.CutTopic(m.Frames[0])
	in.arrive(sequence.Batch{
		Seq: binary.BigEndian.Uint64(m.Frames[1]), Epoch: epoch, Payload: m.Frames[2], Partial: m.Partial,
	})
	return 0, true
}

// arrive makes a batch the arrival, which load decodes.
func (in *intake) arrive(b sequence.Batch) {
	in.release()
	in.arrival, in.decoded = b, nil
}

// load decodes the arrival, unless it is decoded.
func (in *intake) load() {
	b := &in.arrival
	if in.decoded == b {
		return
	}
	b.Fingerprint.Hash = xxh3.Hash(b.Payload)
	in.decode(b)
	if in.err != nil {
		b.Malformed = true
		return
	}
	b.Fingerprint.Time = math.Float64bits(in.batch.Time)
	b.Publisher = in.batch.PublisherID
	b.Empty = len(in.batch.Events)+len(in.batch.Skipped) == 0
}

// loadRecords decodes records of a snapshot, and makes them the arrival.
func (in *intake) loadRecords(payload []byte) {
	in.arrive(sequence.Batch{})
	in.acquire(payload)
	in.decoded = &in.arrival
	in.batch, in.err = in.decoder.DecodeRecords(payload)
	in.arrival.Malformed = in.err != nil
}

// decode decodes a batch unless it is the batch decoded last.
func (in *intake) decode(b *sequence.Batch) {
	if in.decoded == b {
		return
	}
	in.release()
	in.decoded = b
	if len(b.Payload) > transport.MaxPayloadBytes {
		in.batch, in.err = nil, transport.TooLong(len(b.Payload))
		return
	}
	in.acquire(b.Payload)
	in.batch, in.err = in.decoder.Decode(b.Payload)
}

// acquire acquires the slot for a large payload.
func (in *intake) acquire(payload []byte) {
	if len(payload) > smallPayload {
		in.slot.acquire(in.budgets, payload)
		in.acquired = true
	}
}

// release ends the use of a large decoded batch, and frees its memory. It is called before the worker's mutex is unlocked.
func (in *intake) release() {
	if in.acquired {
		in.decoder, in.decoded, in.batch = wire.Decoder{}, nil, nil
		in.slot.release(in.budgets)
		in.acquired = false
	}
}

// refusal is why a message is refused. A refused message of a publisher leaves a gap in its seqs,
// which is repaired or reported like any other gap.
type refusal uint8

const (
	// refusedFrames: the frames are not topic, seq, payload.
	refusedFrames refusal = iota
	// refusedSeq: the seq does not have 8 bytes.
	refusedSeq
	// refusedTopicLength: the topic has more than config.MaxTopicBytes.
	refusedTopicLength
	// refusedLength: the payload has more than transport.MaxPayloadBytes.
	refusedLength
	// refusedRanks: the worker has feed.MaxRanks dp ranks, or Config.MaxRanks is reached.
	refusedRanks
	// refusedForeignRank: the batch is of a dp rank that the source does not have.
	refusedForeignRank
	// refusedTopic: the topic matches no pattern of the listener, or does not name a worker.
	refusedTopic
	// refusedName: the pod or model in the topic is not a valid name.
	refusedName
	// refusedModel: the pod has another model already.
	refusedModel
	// refusedTaken: the pod has the name of another worker.
	refusedTaken
	// refusedWorkers: Config.MaxWorkers is reached.
	refusedWorkers
	// refusedSources: Config.MaxSources is reached.
	refusedSources
	// refusedAddress: Config.MaxSourcesPerAddress is reached for the peer's address.
	refusedAddress

	numRefusals
)

// refusals has the name of each refusal in metrics, and what is accepted instead. For topics listener.wanted is more precise.
var refusals = [numRefusals]struct{ name, want string }{
	refusedFrames:      {"wrong_frames", "three frames: topic, seq, payload. Batches without a seq are not read: a loss could not be noticed"},
	refusedSeq:         {"bad_seq", "a seq of 8 bytes"},
	refusedTopicLength: {"topic_too_long", fmt.Sprintf("a topic of at most %d bytes", config.MaxTopicBytes)},
	refusedLength:      {"message_too_long", fmt.Sprintf("a payload of at most %d bytes", transport.MaxPayloadBytes)},
	refusedRanks:       {"too_many_ranks", fmt.Sprintf("at most %d dp ranks a worker, and no more of all workers than MaxRanks", feed.MaxRanks)},
	refusedForeignRank: {"foreign_rank", "a dp rank of the source: set dp_size to the number of the engine's ranks"},
	refusedTopic:       {"foreign_topic", topicForm},
	refusedName:        {"bad_name", "a POD of " + config.AllowedName + ", and a MODEL of " + config.AllowedModel},
	refusedModel:       {"second_model", "one model for each POD"},
	refusedTaken:       {"name_taken", "a POD that is no other worker's name"},
	refusedWorkers:     {"too_many_workers", "no more workers than MaxWorkers"},
	refusedSources:     {"too_many_sources", "no more sources than MaxSources"},
	refusedAddress:     {"too_many_sources_of_address", "no more sources from one address than MaxSourcesPerAddress"},
}

// String returns the refusal's name in metrics.
func (r refusal) String() string { return refusals[r].name }

// wanted describes what is accepted instead, for the log.
func (r refusal) wanted() string { return refusals[r].want }
