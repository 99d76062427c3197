package enginegrpc

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
)

// fields reads the fields of an encoded message whose elements take more memory in generated messages than in its encoding.
type fields struct {
	encode.Field
	rest []byte
	err  error // why the message cannot be read; nil if it can
}

// next reads the next field. It returns false at the end of the message, and if the message cannot be read.
func (f *fields) next() bool {
	if len(f.rest) == 0 || f.err != nil {
		return false
	}
	f.rest, f.err = f.Next(f.rest)
	return f.err == nil
}

// text sets a string from the field. Like other readers of protobuf, it refuses messages with strings that are not UTF-8.
func (f *fields) text(to *string) { f.err = f.SetString(to) }

// decode decodes the field's message.
func (f *fields) decode(m proto.Message) { f.err = decode(f.Bytes, m) }

// decode decodes a message of few fields.
func decode(b []byte, m proto.Message) error {
	return proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, m)
}

// encoded returns the encoding of a message whose strings are UTF-8.
func encoded(m proto.Message) []byte {
	b, _ := proto.Marshal(m) // the only error is that of another string
	return b
}

// appendUints appends the numbers of a repeated field, packed or not, if the field has this number. There may be most of them.
func appendUints[T uint32 | uint64](f *fields, number protowire.Number, all []T, most int) []T {
	switch {
	case f.IsVarint(number):
		all = append(all, T(f.Value))
	case f.IsBytes(number):
		for b := f.Bytes; len(b) > 0 && len(all) <= most; {
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				f.err = protowire.ParseError(n)
				break
			}
			all, b = append(all, T(v)), b[n:]
		}
	}
	if len(all) > most && f.err == nil {
		f.err = errTooMany
	}
	return all
}
