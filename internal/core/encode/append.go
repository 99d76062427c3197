package encode

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"
)

// The functions of this file append fields to an encoded message. As in generated code, a field with the zero value is omitted, unless
// its schema says optional: see AppendOptional. Size functions return the size of what is appended; their fields have numbers below 16.

// Most tags, lengths and numbers are one byte: what appends them is here, since protowire's functions take several times as long.
const (
	oneByte      = 1 << 7 // varints below it
	oneByteField = 1 << 4 // numbers of fields below it, whose tags are one byte
)

// appendVarint appends a varint without a field.
func appendVarint(b []byte, v uint64) []byte {
	if v < oneByte {
		return append(b, byte(v))
	}
	return protowire.AppendVarint(b, v)
}

// appendTag appends a field's tag.
func appendTag(b []byte, field protowire.Number, kind protowire.Type) []byte {
	return appendVarint(b, protowire.EncodeTag(field, kind))
}

// appendWithVarint appends a tag and a varint.
func appendWithVarint(b []byte, field protowire.Number, kind protowire.Type, v uint64) []byte {
	if v < oneByte && field < oneByteField {
		return append(b, byte(protowire.EncodeTag(field, kind)), byte(v))
	}
	return appendVarint(appendTag(b, field, kind), v)
}

// AppendUint appends a varint.
func AppendUint(b []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return AppendOptional(b, field, v)
}

// AppendOptional appends a varint of an optional field, also 0.
func AppendOptional(b []byte, field protowire.Number, v uint64) []byte {
	return appendWithVarint(b, field, protowire.VarintType, v)
}

// SizeUint is the size of AppendUint.
func SizeUint(v uint64) int {
	if v == 0 {
		return 0
	}
	return tagSize + protowire.SizeVarint(v)
}

// AppendBool appends a bool.
func AppendBool(b []byte, field protowire.Number, v bool) []byte {
	if !v {
		return b
	}
	return AppendOptional(b, field, 1)
}

// AppendFixed64 appends a fixed64.
func AppendFixed64(b []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return AppendOptionalFixed64(b, field, v)
}

// AppendOptionalFixed64 appends a fixed64 of an optional field, also 0.
func AppendOptionalFixed64(b []byte, field protowire.Number, v uint64) []byte {
	return binary.LittleEndian.AppendUint64(appendTag(b, field, protowire.Fixed64Type), v)
}

// AppendString appends a string, or bytes or a packed list that is encoded.
func AppendString[T string | []byte](b []byte, field protowire.Number, s T) []byte {
	if len(s) == 0 {
		return b
	}
	return append(AppendLength(b, field, len(s)), s...)
}

// SizeString is the size of AppendString.
func SizeString(s string) int {
	if s == "" {
		return 0
	}
	return SizeLength(len(s))
}

// AppendLength appends the beginning of a string, a message or a packed list of n bytes, which follow, also if they are none.
func AppendLength(b []byte, field protowire.Number, n int) []byte {
	return appendWithVarint(b, field, protowire.BytesType, uint64(n))
}

// SizeLength is the size of AppendLength with the n bytes that follow.
func SizeLength(n int) int { return tagSize + protowire.SizeBytes(n) }

// AppendUint32s appends a packed list of varints.
func AppendUint32s(b []byte, field protowire.Number, all []uint32) []byte {
	if len(all) == 0 {
		return b
	}
	size := 0
	for _, v := range all {
		size += protowire.SizeVarint(uint64(v))
	}
	b = AppendLength(b, field, size)
	for _, v := range all {
		b = appendVarint(b, uint64(v))
	}
	return b
}

// AppendHashes appends a packed list of fixed64s.
func AppendHashes(b []byte, field protowire.Number, hashes []uint64) []byte {
	if len(hashes) == 0 {
		return b
	}
	b = AppendLength(b, field, 8*len(hashes))
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

// SizeHashes is the size of AppendHashes.
func SizeHashes(hashes []uint64) int {
	if len(hashes) == 0 {
		return 0
	}
	return SizeLength(8 * len(hashes))
}
