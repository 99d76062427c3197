package encode

import (
	"encoding/binary"
	"errors"
	"slices"
	"unicode/utf8"

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

// Next reads the first field of an encoded message, and returns the rest of the message. Groups and fixed32s have no value.
func (f *Field) Next(message []byte) (rest []byte, err error) {
	// Most tags, numbers and lengths are one byte, and field numbers are not 0.
	if len(message) < 2 || message[0] >= oneByte || message[0]>>3 == 0 {
		return f.next(message)
	}
	f.Number, f.Type = protowire.Number(message[0]>>3), protowire.Type(message[0]&7)
	f.Value, f.Bytes = 0, nil
	first := message[1]
	switch {
	case f.Type == protowire.VarintType && first < oneByte:
		f.Value = uint64(first)
		return message[2:], nil
	case f.Type == protowire.Fixed64Type && len(message) >= 9:
		f.Value = binary.LittleEndian.Uint64(message[1:])
		return message[9:], nil
	case f.Type == protowire.BytesType && first < oneByte && len(message)-2 >= int(first):
		f.Bytes = message[2 : 2+first]
		return message[2+first:], nil
	}
	return f.next(message)
}

// next is Next for any field.
func (f *Field) next(message []byte) (rest []byte, err error) {
	number, kind, n := protowire.ConsumeTag(message)
	if n < 0 {
		return nil, protowire.ParseError(n)
	}
	*f = Field{Number: number, Type: kind}
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
		return nil, protowire.ParseError(n)
	}
	return message[n:], nil
}

// IsVarint reports whether the field has a number and is a varint, and IsBytes whether it has a length. A field of another type than
// the reader expects is one that it does not know, as for any reader of protobuf.
func (f *Field) IsVarint(number protowire.Number) bool {
	return f.Number == number && f.Type == protowire.VarintType
}

// IsBytes is described at IsVarint.
func (f *Field) IsBytes(number protowire.Number) bool {
	return f.Number == number && f.Type == protowire.BytesType
}

var errUTF8 = errors.New("a string field has invalid UTF-8")

// SetString sets a string to the field's, without an allocation if they are equal. It refuses one that is not UTF-8.
func (f *Field) SetString(s *string) error {
	if *s == string(f.Bytes) {
		return nil
	}
	if !utf8.Valid(f.Bytes) {
		return errUTF8
	}
	*s = string(f.Bytes)
	return nil
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
