package enginegrpc_test

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// message is an encoded message. Its methods append fields.
type message []byte

func (m message) number(field protowire.Number, n int64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), uint64(n))
}

func (m message) double(field protowire.Number, n float64) message {
	return protowire.AppendFixed64(protowire.AppendTag(m, field, protowire.Fixed64Type), math.Float64bits(n))
}

func (m message) text(field protowire.Number, s string) message {
	return protowire.AppendString(protowire.AppendTag(m, field, protowire.BytesType), s)
}

func (m message) message(field protowire.Number, inner message) message {
	return m.text(field, string(inner))
}

// packed appends numbers as they are encoded by default.
func (m message) packed(field protowire.Number, all ...int64) message {
	var b message
	for _, n := range all {
		b = protowire.AppendVarint(b, uint64(n))
	}
	return m.message(field, b)
}

// smgBlock is a KvBlock of two tokens.
func smgBlock(hash int64, tokens ...int64) message {
	return message{}.number(1, hash).packed(2, tokens...).number(3, 2)
}

// smgStored is a KvEventBatch with a store of one block, whose tokens follow from the seq.
func smgStored(rank, seq int64) message { return smgStoredAt(rank, seq, 1_800_000_000) }

func smgStoredAt(rank, seq int64, at float64) message {
	stored := message{}.message(1, smgBlock(100+seq, seq, 1))
	m := message{}.number(1, seq).double(2, at+float64(seq)).message(3, message{}.number(1, seq).message(2, stored))
	if rank != 0 {
		m = m.number(4, rank)
	}
	return m
}

// openHash is a KvBlockHash.
func openHash(encoding, value string) message { return message{}.text(1, value).text(2, encoding) }

// openBatch is a SubscribeKvEventsResponse of OpenEngine with a batch.
func openBatch(rank, seq int64, events ...message) message {
	b := message{}.number(1, seq).number(2, 1_800_000_000e9+seq*1e9).number(3, rank)
	for _, e := range events {
		b = b.message(4, e)
	}
	return message{}.message(1, b)
}
