package enginegrpc

import (
	"errors"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// fields reads the fields of an encoded message. A field of another wire type than the caller expects is one that it does not
// know, as for any reader of protobuf.
type fields struct {
	rest   []byte
	number protowire.Number
	kind   protowire.Type
	// n is the value of a varint or fixed field, and data that of a field with a length.
	n    uint64
	data []byte
	err  error // why the message cannot be read; nil if it can
}

// next reads the next field. It returns false at the end of the message, and if the message cannot be read.
func (f *fields) next() bool {
	if len(f.rest) == 0 || f.err != nil {
		return false
	}
	var n int
	f.number, f.kind, n = protowire.ConsumeTag(f.rest)
	if n < 0 {
		return f.fail(n)
	}
	f.rest = f.rest[n:]
	switch f.kind {
	case protowire.VarintType:
		f.n, n = protowire.ConsumeVarint(f.rest)
	case protowire.Fixed64Type:
		f.n, n = protowire.ConsumeFixed64(f.rest)
	case protowire.BytesType:
		f.data, n = protowire.ConsumeBytes(f.rest)
	default:
		n = protowire.ConsumeFieldValue(f.number, f.kind, f.rest)
	}
	if n < 0 {
		return f.fail(n)
	}
	f.rest = f.rest[n:]
	return true
}

func (f *fields) fail(code int) bool {
	f.err = protowire.ParseError(code)
	return false
}

// varint reports whether the field is a number with this field number.
func (f *fields) varint(number protowire.Number) bool {
	return f.number == number && f.kind == protowire.VarintType
}

// bytes reports whether the field is a string, bytes or message with this field number.
func (f *fields) bytes(number protowire.Number) bool {
	return f.number == number && f.kind == protowire.BytesType
}

var errUTF8 = errors.New("a string is not UTF-8")

// text sets a string from the field. Like other readers of protobuf, it refuses messages with strings that are not UTF-8.
func (f *fields) text(to *string) {
	if !utf8.Valid(f.data) {
		f.err = errUTF8
		return
	}
	*to = string(f.data)
}

// appendUints appends the numbers of a repeated field, packed or not, if the field has this number. There may be most of them.
func appendUints[T uint32 | uint64](f *fields, number protowire.Number, all []T, most int) []T {
	switch {
	case f.varint(number):
		all = append(all, T(f.n))
	case f.bytes(number):
		for b := f.data; len(b) > 0 && len(all) <= most; {
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				f.fail(n)
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
