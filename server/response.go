package server

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Field numbers that SubscribeResponse, ReplayResponse and SnapshotResponse have
// in common. Entries, field 1, come from the journal with tag and length.
const (
	responsePosition protowire.Number = 2
	responsePrevSeq  protowire.Number = 3

	positionEpoch protowire.Number = 1
	positionSeq   protowire.Number = 2
)

// entriesResponse makes a response of a chunk of entries and the position after
// them. The chunk's memory is passed on, not copied; gRPC may hold it after the
// send returns, and the journal never writes it again.
func entriesResponse(c journal.Chunk, epoch string, prevSeq uint64) *frame {
	data := make(mem.BufferSlice, 0, len(c.Slices)+1)
	for _, s := range c.Slices {
		data = append(data, mem.SliceBuffer(s))
	}
	return &frame{data: append(data, mem.SliceBuffer(appendPosition(nil, epoch, c.Last, prevSeq)))}
}

// messageResponse makes a response of one message beside a position.
func messageResponse(m *kvcastv1.SubscribeResponse, epoch string, seq, prevSeq uint64) (*frame, error) {
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	return &frame{data: mem.BufferSlice{mem.SliceBuffer(appendPosition(b, epoch, seq, prevSeq))}}, nil
}

// appendPosition appends the fields position and prev_seq.
func appendPosition(b []byte, epoch string, seq, prevSeq uint64) []byte {
	size := protowire.SizeTag(positionEpoch) + protowire.SizeBytes(len(epoch))
	if seq != 0 {
		size += protowire.SizeTag(positionSeq) + protowire.SizeFixed64()
	}
	b = protowire.AppendTag(b, responsePosition, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = protowire.AppendTag(b, positionEpoch, protowire.BytesType)
	b = protowire.AppendString(b, epoch)
	if seq != 0 {
		b = protowire.AppendTag(b, positionSeq, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, seq)
	}
	if prevSeq != 0 {
		b = protowire.AppendTag(b, responsePrevSeq, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, prevSeq)
	}
	return b
}
