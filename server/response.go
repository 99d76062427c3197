package server

import (
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto" // registers the codec that newCodec looks up
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// frame is an encoded message.
type frame struct {
	data mem.BufferSlice
}

// codec sends frames as they are, and all other messages with gRPC's protobuf codec.
type codec struct {
	encoding.CodecV2
}

func newCodec() codec { return codec{CodecV2: encoding.GetCodecV2(proto.Name)} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return f.data, nil
	}
	return c.CodecV2.Marshal(v)
}

// responses encodes and sends the messages of one stream. Each position that it sends
// carries the previous one as prev_seq.
type responses struct {
	stream  grpc.ServerStream
	epoch   string
	prev    uint64 // seq of the last position sent
	chained bool   // prev is set
	timer   sendTimer
	pace    *snapshotPace // nil: no snapshot is being sent
}

// entries sends a chunk with the position after it. gRPC may reference the chunk's memory after the send; the
// journal never overwrites it.
func (r *responses) entries(c journal.Chunk) error {
	var m kvcastv1.SubscribeResponse
	r.setPosition(&m, c.Last)
	position, err := protobuf.Marshal(&m)
	if err != nil {
		return err
	}
	return r.send(append(entryBuffers(c), mem.SliceBuffer(position)))
}

// entriesWithin sends a chunk without a position, as part of a snapshot.
func (r *responses) entriesWithin(c journal.Chunk) error { return r.send(entryBuffers(c)) }

func entryBuffers(c journal.Chunk) mem.BufferSlice {
	data := make(mem.BufferSlice, 0, len(c.Slices)+1) // one more for the position
	for _, s := range c.Slices {
		data = append(data, mem.SliceBuffer(s))
	}
	return data
}

// blocks sends encoded blocks of a snapshot. If recycle is not nil, it receives the
// memory of b when gRPC no longer references it.
func (r *responses) blocks(b []byte, recycle recycler) error {
	head := protowire.AppendTag(nil, kvcastv1.ResponseSnapshotBlocksField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(b)))
	body := mem.Buffer(mem.SliceBuffer(b))
	if recycle != nil {
		body = mem.NewBuffer(&b, recycle)
	}
	return r.send(mem.BufferSlice{mem.SliceBuffer(head), body})
}

// recycler is a mem.BufferPool that only takes memory back.
type recycler func(b []byte)

// Put implements mem.BufferPool.
func (f recycler) Put(b *[]byte) { f(*b) }

// Get implements mem.BufferPool. gRPC does not call it.
func (f recycler) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

// message sends a message with a position.
func (r *responses) message(m *kvcastv1.SubscribeResponse, seq uint64) error {
	r.setPosition(m, seq)
	return r.messageWithin(m)
}

// messageWithin sends a message without a position.
func (r *responses) messageWithin(m *kvcastv1.SubscribeResponse) error {
	b, err := protobuf.Marshal(m)
	if err != nil {
		return err
	}
	return r.send(mem.BufferSlice{mem.SliceBuffer(b)})
}

// setPosition sets the fields position and prev_seq.
func (r *responses) setPosition(m *kvcastv1.SubscribeResponse, seq uint64) {
	if !r.chained {
		r.prev, r.chained = seq, true
	}
	m.Position = &kvcastv1.Position{Epoch: r.epoch, Seq: seq}
	m.PrevSeq = r.prev
	r.prev = seq
}

func (r *responses) send(data mem.BufferSlice) error {
	size := data.Len()
	r.timer.begin()
	err := r.stream.SendMsg(&frame{data: data})
	took := r.timer.end()
	if err == nil && r.pace != nil {
		err = r.pace.sent(size, took)
	}
	return err
}

// sendTimer measures the send in progress of one stream. A send blocks while the client does not read, and
// keepalive does not notice: the client's transport answers pings although its program does not read.
type sendTimer struct {
	start atomic.Int64 // nanoseconds after processStart; 0: no send in progress
}

// processStart is the origin of monotonic times.
var processStart = time.Now()

func (t *sendTimer) begin() { t.start.Store(int64(time.Since(processStart))) }

// end returns the duration of the send.
func (t *sendTimer) end() time.Duration {
	return time.Since(processStart) - time.Duration(t.start.Swap(0))
}

// exceeds reports whether a send has been in progress for longer than d.
func (t *sendTimer) exceeds(d time.Duration) bool {
	start := t.start.Load()
	return start != 0 && time.Since(processStart)-time.Duration(start) > d
}

// paceBytes is how much of a snapshot must be read per StallTimeout: with 30 s some
// 280 KB/s, far below the bandwidth between routers and their server.
const paceBytes = 8 << 20

var errSlowPace = errors.New("the snapshot is read too slowly")

// snapshotPace enforces a least rate at which a snapshot is read. Otherwise a client that reads a little before
// each StallTimeout would hold a slot, and the copy of a table, for hours.
type snapshotPace struct {
	stallTimeout time.Duration
	bytes        int
	sending      time.Duration
}

// sent records a send. It returns errSlowPace when the rate is too low.
func (p *snapshotPace) sent(bytes int, took time.Duration) error {
	p.bytes += bytes
	p.sending += took
	if allowed := float64(p.stallTimeout) * (1 + float64(p.bytes)/paceBytes); float64(p.sending) > allowed {
		return errSlowPace
	}
	return nil
}
