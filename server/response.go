package server

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// responses sends what a stream consists of, and chains its positions.
type responses struct {
	stream  grpc.ServerStream
	epoch   string
	prev    uint64 // seq of the last position sent
	chained bool   // whether there was one
	stall   stall
	pace    *pace // of the snapshot that is being sent, or nil
}

// entries sends a chunk of entries with the position after them. The chunk's
// memory is passed on, not copied; gRPC may hold it after the send returns, and
// the journal never writes it again.
func (r *responses) entries(c journal.Chunk) error {
	return r.send(entriesData(c), r.position(nil, c.Last))
}

// entriesWithin sends a chunk of entries within a snapshot.
func (r *responses) entriesWithin(c journal.Chunk) error {
	return r.send(entriesData(c), nil)
}

func entriesData(c journal.Chunk) mem.BufferSlice {
	data := make(mem.BufferSlice, 0, len(c.Slices)+1)
	for _, s := range c.Slices {
		data = append(data, mem.SliceBuffer(s))
	}
	return data
}

// blocks sends encoded blocks of a snapshot, whose memory is given back when gRPC
// has let go of it, if anybody takes it.
func (r *responses) blocks(b []byte, back giveBack) error {
	head := protowire.AppendTag(nil, kvcastv1.ResponseSnapshotBlocksField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(b)))
	body := mem.Buffer(mem.SliceBuffer(b))
	if back != nil {
		body = mem.NewBuffer(&b, back)
	}
	return r.send(mem.BufferSlice{mem.SliceBuffer(head), body}, nil)
}

// giveBack takes memory back that gRPC has let go of.
type giveBack func(b []byte)

// Put implements mem.BufferPool.
func (f giveBack) Put(b *[]byte) { f(*b) }

// Get implements mem.BufferPool. It is not called.
func (f giveBack) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

// message sends a message with a position.
func (r *responses) message(m *kvcastv1.SubscribeResponse, seq uint64) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return r.send(nil, r.position(b, seq))
}

// messageWithin sends a message that has no position.
func (r *responses) messageWithin(m *kvcastv1.SubscribeResponse) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return r.send(nil, b)
}

// anew lets the chain of positions begin again.
func (r *responses) anew() { r.chained = false }

func (r *responses) send(data mem.BufferSlice, tail []byte) error {
	if len(tail) > 0 {
		data = append(data, mem.SliceBuffer(tail))
	}
	size := data.Len()
	r.stall.begin()
	err := r.stream.SendMsg(&frame{data: data})
	took := r.stall.end()
	if err == nil && r.pace != nil {
		err = r.pace.sent(size, took)
	}
	return err
}

// position appends the fields position and prev_seq.
func (r *responses) position(b []byte, seq uint64) []byte {
	if !r.chained {
		r.prev, r.chained = seq, true
	}
	b = appendPosition(b, r.epoch, seq, r.prev)
	r.prev = seq
	return b
}

func appendPosition(b []byte, epoch string, seq, prevSeq uint64) []byte {
	size := protowire.SizeTag(kvcastv1.PositionEpochField) + protowire.SizeBytes(len(epoch))
	if seq != 0 {
		size += protowire.SizeTag(kvcastv1.PositionSeqField) + protowire.SizeFixed64()
	}
	b = protowire.AppendTag(b, kvcastv1.ResponsePositionField, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = protowire.AppendTag(b, kvcastv1.PositionEpochField, protowire.BytesType)
	b = protowire.AppendString(b, epoch)
	if seq != 0 {
		b = protowire.AppendTag(b, kvcastv1.PositionSeqField, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, seq)
	}
	if prevSeq != 0 {
		b = protowire.AppendTag(b, kvcastv1.ResponsePrevSeqField, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, prevSeq)
	}
	return b
}
