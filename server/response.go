package server

import (
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto" // registers the codec that newCodec looks up
	"google.golang.org/grpc/mem"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/match"
)

// frame is an encoded message.
type frame mem.BufferSlice

// decoder is a message that decodes itself. It must not reference b.
type decoder interface{ decode(b []byte) error }

// tracked is a message of a stream that is tracked until gRPC has written it.
type tracked struct {
	message any
	sent    *admission.Sent
}

// codec sends frames and the messages of adapters unchanged, lets decoders decode, limits the prompts of a MatchPrefixRequest, and uses gRPC's protobuf codec otherwise.
type codec struct {
	encoding.CodecV2
}

func newCodec() codec { return codec{CodecV2: encoding.GetCodecV2(proto.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	switch v := v.(type) {
	case frame:
		return mem.BufferSlice(v), nil
	case tracked:
		m, err := c.Marshal(v.message)
		if err != nil {
			return nil, err
		}
		return v.sent.Track(m), nil
	case *emptypb.Empty: // of an adapter, whose fields are encoded already: gRPC would copy them to buffers of up to 1 MiB
		return mem.BufferSlice{mem.SliceBuffer(v.ProtoReflect().GetUnknown())}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch v := v.(type) {
	case decoder:
		b := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer b.Free()
		return v.decode(b.ReadOnlyData())
	case *kvcastv1.MatchPrefixRequest:
		return unmarshal(data, v, match.LimitPrompts)
	case *kvcastv1.ReportOutcomeRequest:
		return unmarshal(data, v, match.LimitOutcomes)
	case *kvcastv1.NoteRoutedRequest:
		return unmarshal(data, v, match.LimitRouted)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// unmarshal decodes a message of which limit shortens the encoding.
func unmarshal(data mem.BufferSlice, m protobuf.Message, limit func([]byte) []byte) error {
	b := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer b.Free()
	return protobuf.Unmarshal(limit(b.ReadOnlyData()), m)
}

// responses encodes and sends the messages of one stream. Each position that it sends carries the previous position as prev_seq.
type responses struct {
	stream  grpc.ServerStream
	epoch   string
	prev    uint64 // seq of the last position sent
	hasPrev bool   // prev is set
	// newest is the seq of the newest entry when the journal was last read. Messages before it contain it. 0: it is not sent.
	newest uint64
	// sendStart is the start of the send in progress, in nanoseconds after processStart; 0: no send.
	sendStart atomic.Int64
	pace      *snapshotPace // nil: no snapshot is being sent
	sent      admission.Sent
	ended     atomic.Bool // nothing more is sent
}

// sendEntries sends a chunk with the position after it. gRPC may reference the chunk's memory after the send,
// which is safe since the journal never overwrites it.
func (r *responses) sendEntries(c journal.Chunk) error {
	var m kvcastv1.SubscribeResponse
	r.setPosition(&m, c.Last)
	position, err := protobuf.Marshal(&m)
	if err != nil {
		return err
	}
	return r.send(append(entryBuffers(c), mem.SliceBuffer(position)))
}

// sendSnapshotEntries sends a chunk without a position, as part of a snapshot.
func (r *responses) sendSnapshotEntries(c journal.Chunk) error { return r.send(entryBuffers(c)) }

func entryBuffers(c journal.Chunk) mem.BufferSlice {
	data := make(mem.BufferSlice, 0, len(c.Slices)+2) // with the position, and what tracks the message
	for _, s := range c.Slices {
		data = append(data, mem.SliceBuffer(s))
	}
	return data
}

// recycler is a mem.BufferPool that passes released memory to a function.
type recycler func(b []byte)

func (f recycler) Put(b *[]byte) { f(*b) }

// Get implements mem.BufferPool. gRPC does not call it.
func (f recycler) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

func (r *responses) sendPositioned(m *kvcastv1.SubscribeResponse, seq uint64) error {
	r.setPosition(m, seq)
	return r.sendUnpositioned(m)
}

func (r *responses) sendUnpositioned(m *kvcastv1.SubscribeResponse) error {
	b, err := protobuf.Marshal(m)
	if err != nil {
		return err
	}
	return r.send(mem.BufferSlice{mem.SliceBuffer(b)})
}

func (r *responses) setPosition(m *kvcastv1.SubscribeResponse, seq uint64) {
	if !r.hasPrev {
		r.prev, r.hasPrev = seq, true
	}
	m.Position = &kvcastv1.Position{Epoch: r.epoch, Seq: seq}
	m.PrevSeq = r.prev
	r.prev = seq
	if r.newest > seq {
		m.NewestSeq = r.newest
	}
}

// processStart is the origin of monotonic times.
var processStart = time.Now()

var errEnded = errors.New("the stream has ended")

func (r *responses) send(data mem.BufferSlice) error {
	if r.ended.Load() {
		data.Free()
		return errEnded
	}
	size, start := data.Len(), time.Since(processStart)
	r.sendStart.Store(int64(start))
	err := r.stream.SendMsg(tracked{frame(data), &r.sent})
	r.sendStart.Store(0)
	if err == nil && r.pace != nil {
		err = r.pace.sent(size, time.Since(processStart)-start)
	}
	return err
}

// sendExceeds reports whether a send has been in progress for longer than d. A send blocks while the client
// does not read. Keepalive does not detect that, since the client's transport still answers pings.
func (r *responses) sendExceeds(d time.Duration) bool {
	start := r.sendStart.Load()
	return start != 0 && time.Since(processStart)-time.Duration(start) > d
}

// minPaceBytes is how many bytes of a snapshot a client must read per StallTimeout: some 280 KB/s with 30 s, far
// below the bandwidth between routers and their server.
const minPaceBytes = 8 << 20

var errSlowPace = errors.New("the snapshot is read too slowly")

// snapshotPace enforces the minimum rate at which a client reads a snapshot. Without it, a client that reads a
// little before each StallTimeout occupies a snapshot slot, and the copy of a rank's blocks, for hours.
type snapshotPace struct {
	stallTimeout time.Duration
	bytes        int
	sending      time.Duration // time in which sends were in progress
}

// sent records a send. It returns errSlowPace if the rate is too low.
func (p *snapshotPace) sent(bytes int, took time.Duration) error {
	p.bytes += bytes
	p.sending += took
	if allowed := float64(p.stallTimeout) * (1 + float64(p.bytes)/minPaceBytes); float64(p.sending) > allowed {
		return errSlowPace
	}
	return nil
}
