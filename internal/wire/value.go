package wire

import (
	"encoding/binary"
	"math"
)

// maxDepth is how many arrays and maps may be nested, the batch included. Engines nest up to eight.
const maxDepth = 16

// Depths of values: the numbers of arrays and maps around them.
const (
	batchDepth = 1 // a field of a batch
	eventDepth = 2 // an event
	fieldDepth = 3 // a field of an event
)

// fault is the result of reading: 0 if the input is valid, otherwise an Error, or reasonFault plus the Reason to leave out an event. It has
// one byte so that the results of readers stay in registers.
type fault uint8

const reasonFault fault = 0x80

const (
	truncated     = fault(ErrTruncated)
	badBatchShape = fault(ErrBadBatchShape)
	badTS         = fault(ErrBadTS)
	trailingBytes = fault(ErrTrailingBytes)
	badCode       = fault(ErrBadCode)
	oversize      = fault(ErrOversize)
	tooDeep       = fault(ErrDepth)
	tooManyEvents = fault(ErrTooManyEvents)
	tooManyBlocks = fault(ErrTooManyBlocks)

	unknownTag    = reasonFault | fault(ReasonUnknownTag)
	badEventShape = reasonFault | fault(ReasonBadEventShape)
	badTag        = reasonFault | fault(ReasonBadTag)
	missingField  = reasonFault | fault(ReasonMissingField)
	badType       = reasonFault | fault(ReasonBadType)
	badUTF8       = reasonFault | fault(ReasonBadUTF8)
)

// reason returns the Reason of a fault that is reasonFault or larger.
func (f fault) reason() Reason { return Reason(f &^ reasonFault) }

// class is the type of a MessagePack value. Integers are classified by sign, not by code,
// because engines also write non-negative integers with signed codes.
type class uint8

const (
	classNil class = iota + 1
	classBool
	classUint
	classInt
	classFloat
	classStr
	classBin
	classExt
	classArray
	classMap
)

// value is a MessagePack value, or the header of an array or a map.
type value struct {
	class class
	// bits is a number: an integer in two's complement, a bool as 0 or 1, or the bits of a float64.
	bits uint64
	// bytes are the contents of a str, bin or ext, a view of the payload.
	bytes []byte
	// n is the number of an array's elements or a map's pairs, at most the payload's length.
	n int
	// end is where the value or the header ends.
	end int
}

// codes describe the values whose codes are 0xc0 to 0xdf. width is the length of the number that
// follows the code, which is the value or its size.
var codes = [32]struct {
	class class
	width int
}{
	{classNil, 0}, {}, {classBool, 0}, {classBool, 0},
	{classBin, 1}, {classBin, 2}, {classBin, 4}, {classExt, 1}, {classExt, 2}, {classExt, 4},
	{classFloat, 4}, {classFloat, 8}, {classUint, 1}, {classUint, 2}, {classUint, 4}, {classUint, 8},
	{classInt, 1}, {classInt, 2}, {classInt, 4}, {classInt, 8},
	{classExt, 0}, {classExt, 0}, {classExt, 0}, {classExt, 0}, {classExt, 0},
	{classStr, 1}, {classStr, 2}, {classStr, 4}, {classArray, 2}, {classArray, 4}, {classMap, 2}, {classMap, 4},
}

// readValue reads the value at i.
func readValue(p []byte, i int) (v value, f fault) {
	if i >= len(p) {
		return v, truncated
	}
	c := p[i]
	v.end = i + 1
	switch {
	case c <= maxFixint:
		v.class, v.bits = classUint, uint64(c)
		return v, 0
	case c >= 0xe0:
		v.class, v.bits = classInt, uint64(int8(c))
		return v, 0
	case c < 0x90:
		return v.sized(p, classMap, uint64(c&0x0f))
	case c < 0xa0:
		return v.sized(p, classArray, uint64(c&0x0f))
	case c < 0xc0:
		return v.sized(p, classStr, uint64(c&0x1f))
	}
	code := codes[c-0xc0]
	if v.end += code.width; v.end > len(p) {
		return v, truncated
	}
	for _, digit := range p[i+1 : v.end] {
		v.bits = v.bits<<8 | uint64(digit)
	}
	switch v.class = code.class; v.class {
	case 0:
		return v, badCode
	case classNil, classUint:
		return v, 0
	case classBool:
		v.bits = uint64(c & 1)
		return v, 0
	case classInt:
		unused := 64 - 8*code.width
		v.bits = uint64(int64(v.bits<<unused) >> unused)
		if int64(v.bits) >= 0 {
			v.class = classUint
		}
		return v, 0
	case classFloat:
		if code.width == 4 {
			v.bits = math.Float64bits(float64(math.Float32frombits(uint32(v.bits))))
		}
		return v, 0
	case classExt:
		if code.width == 0 {
			v.bits = 1 << (c - 0xd4)
		}
		v.end++ // the type of the extension
	default:
	}
	return v.sized(p, v.class, v.bits)
}

// sized reads the contents of a str, bin or ext of size bytes, or sets the size of an array or a map.
func (v value) sized(p []byte, class class, size uint64) (value, fault) {
	v.class = class
	switch {
	case size > uint64(len(p)):
		return v, oversize
	case class >= classArray:
		v.n = int(size)
	case v.end+int(size) > len(p):
		return v, truncated
	default:
		v.bytes = p[v.end : v.end+int(size)]
		v.end += int(size)
	}
	return v, 0
}

func isNil(p []byte, i int) bool { return i < len(p) && p[i] == nilCode }

func isArray(p []byte, i int) bool {
	return i < len(p) && (p[i]>>4 == 0x90>>4 || p[i] == 0xdc || p[i] == 0xdd)
}

func isMap(p []byte, i int) bool {
	v, _ := readValue(p, i)
	return v.class == classMap
}

func (v value) float() (float64, bool) {
	switch v.class {
	case classUint:
		return float64(v.bits), true
	case classInt:
		return float64(int64(v.bits)), true
	case classFloat:
		return math.Float64frombits(v.bits), true
	default:
		return 0, false
	}
}

// int returns an integer, and whether the value is an integer that fits.
func (v value) int() (int64, bool) {
	return int64(v.bits), v.class == classInt || v.class == classUint && v.bits <= math.MaxInt64
}

// uint32 returns an integer, and whether the value is an integer that fits.
func (v value) uint32() (uint32, bool) {
	return uint32(v.bits), v.class == classUint && v.bits <= math.MaxUint32
}

// hash returns a block hash: an integer in two's complement, or the last eight bytes of a bin.
func (v value) hash() (uint64, bool) {
	switch v.class {
	case classUint, classInt:
		return v.bits, true
	case classBin:
		var h uint64
		for _, c := range v.bytes[max(0, len(v.bytes)-8):] {
			h = h<<8 | uint64(c)
		}
		return h, len(v.bytes) > 0
	default:
		return 0, false
	}
}

// skip validates the value at i, which is nested in depth arrays and maps, and returns where it ends.
func skip(p []byte, i, depth int) (int, fault) {
	class, n, i, f := readHeader(p, i)
	switch class {
	case classMap:
		n *= 2
	case classArray:
	default:
		return i, f
	}
	if f == 0 && depth == maxDepth {
		f = tooDeep
	}
	for ; n > 0 && f == 0; n-- {
		if i < len(p) && (p[i] <= maxFixint || p[i] == nilCode) {
			i++
			continue
		}
		i, f = skip(p, i, depth+1)
	}
	return i, f
}

// The functions below recognise the most frequent values of batches by their first byte. They
// leave other values and all faults to readValue.

// Codes of MessagePack.
const (
	maxFixint   = 0x7f
	nilCode     = 0xc0
	float64Code = 0xcb
	uint64Code  = 0xcf
)

// readHeader returns the class of the value at i. For an array or a map, it also returns how
// many elements or pairs there are, and where they begin.
func readHeader(p []byte, i int) (class class, n, end int, f fault) {
	if i+3 <= len(p) {
		c := p[i]
		switch n := int(c & 0x0f); {
		case n > len(p):
		case c>>4 == 0x90>>4:
			return classArray, n, i + 1, 0
		case c>>4 == 0x80>>4:
			return classMap, n, i + 1, 0
		case c == 0xdc:
			if n := int(binary.BigEndian.Uint16(p[i+1:])); n <= len(p) {
				return classArray, n, i + 3, 0
			}
		}
	}
	return readAnyHeader(p, i)
}

// readAnyHeader is readHeader for any value. It is a function of its own because readHeader would be slower with it.
func readAnyHeader(p []byte, i int) (class class, n, end int, f fault) {
	v, f := readValue(p, i)
	return v.class, v.n, v.end, f
}

// readText reads the string at i. Any other value is a badType.
func readText(p []byte, i int) (s []byte, end int, f fault) {
	if s := shortText(p, i); s != nil {
		return s, i + 1 + len(s), 0
	}
	v, f := readValue(p, i)
	if f == 0 && v.class != classStr {
		return nil, i, badType
	}
	return v.bytes, v.end, f
}

// readName is readText, but skips a value that is not a string, and returns nil for it. The value is nested in depth arrays and maps.
func readName(p []byte, i, depth int) (s []byte, end int, f fault) {
	s, end, f = readText(p, i)
	if f == badType {
		end, f = skip(p, i, depth)
	}
	return s, end, f
}

// shortText returns the string at i if it has fewer than 32 bytes. It returns nil for other values and for a truncated string.
func shortText(p []byte, i int) []byte {
	if i < len(p) {
		c := p[i]
		i++
		if end := i + int(c&0x1f); c>>5 == 0xa0>>5 && end <= len(p) {
			return p[i:end]
		}
	}
	return nil
}

// readFixed64 returns the eight bytes after i, and whether the code at i is the given code.
func readFixed64(p []byte, i int, code byte) (uint64, bool) {
	if i+9 <= len(p) && p[i] == code {
		return binary.BigEndian.Uint64(p[i+1:]), true
	}
	return 0, false
}
