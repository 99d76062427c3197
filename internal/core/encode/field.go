package encode

import (
	"encoding/binary"
	"errors"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// Field is a field of an encoded message.
type Field struct {
	Number protowire.Number
	Type   protowire.Type
	// Value is that of a varint or a fixed64, and Bytes that of a field with a length, which is memory of the message.
	Value uint64
	Bytes []byte
}

// Next returns the first field of an encoded message, and the rest of the message. Groups and fixed32s have no value.
func Next(message []byte) (f Field, rest []byte, err error) {
	number, kind, n := protowire.ConsumeTag(message)
	if n < 0 {
		return Field{}, nil, protowire.ParseError(n)
	}
	f.Number, f.Type = number, kind
	message = message[n:]
	switch kind {
	case protowire.VarintType:
		f.Value, n = protowire.ConsumeVarint(message)
	case protowire.Fixed64Type:
		f.Value, n = protowire.ConsumeFixed64(message)
	case protowire.BytesType:
		f.Bytes, n = protowire.ConsumeBytes(message)
	default:
		n = protowire.ConsumeFieldValue(number, kind, message)
	}
	if n < 0 {
		return Field{}, nil, protowire.ParseError(n)
	}
	return f, message[n:], nil
}

// AppendFixed64s appends the elements of a repeated fixed64, packed or not. A field of another type has none.
func (f *Field) AppendFixed64s(to []uint64) ([]uint64, error) {
	switch {
	case f.Type == protowire.Fixed64Type:
		return append(to, f.Value), nil
	case len(f.Bytes)%8 != 0:
		return to, errors.New("a list of fixed64 has a part of an element")
	}
	to = slices.Grow(to, len(f.Bytes)/8)
	for b := f.Bytes; len(b) > 0; b = b[8:] {
		to = append(to, binary.LittleEndian.Uint64(b))
	}
	return to, nil
}

// AppendUint32s appends the elements of a repeated uint32, packed or not. A field of another type has none.
func (f *Field) AppendUint32s(to []uint32) ([]uint32, error) {
	if f.Type == protowire.VarintType {
		return append(to, uint32(f.Value)), nil
	}
	for b := f.Bytes; len(b) > 0; { // most token ids take one to three bytes
		switch {
		case b[0] < 0x80:
			to = append(to, uint32(b[0]))
			b = b[1:]
		case len(b) > 1 && b[1] < 0x80:
			to = append(to, uint32(b[0]&0x7f)|uint32(b[1])<<7)
			b = b[2:]
		case len(b) > 2 && b[2] < 0x80:
			to = append(to, uint32(b[0]&0x7f)|uint32(b[1]&0x7f)<<7|uint32(b[2])<<14)
			b = b[3:]
		default:
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return to, protowire.ParseError(n)
			}
			to = append(to, uint32(v))
			b = b[n:]
		}
	}
	return to, nil
}
