package wire

import (
	"encoding/binary"
	"math"
)

// maxDepth is how many arrays and maps may stand inside one another, the batch
// itself included. No engine nests deeper than eight.
const maxDepth = 16

// class is what a MessagePack value is. Integers are told apart by sign, not by
// code: engines write non-negative ones under signed codes too.
type class uint8

const (
	classReserved class = iota
	classNil
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

// code is what the first byte of a value tells: its class, and how many bytes
// after it hold the number or the length.
type code struct {
	class class
	width uint8
}

var codes = func() (t [256]code) {
	for c := range t {
		switch {
		case c <= 0x7f:
			t[c].class = classUint
		case c <= 0x8f:
			t[c].class = classMap
		case c <= 0x9f:
			t[c].class = classArray
		case c <= 0xbf:
			t[c].class = classStr
		case c >= 0xe0:
			t[c].class = classInt
		}
	}
	for c, v := range map[int]code{
		0xc0: {classNil, 0}, 0xc2: {classBool, 0}, 0xc3: {classBool, 0},
		0xc4: {classBin, 1}, 0xc5: {classBin, 2}, 0xc6: {classBin, 4},
		0xc7: {classExt, 1}, 0xc8: {classExt, 2}, 0xc9: {classExt, 4},
		0xca: {classFloat, 4}, 0xcb: {classFloat, 8},
		0xcc: {classUint, 1}, 0xcd: {classUint, 2}, 0xce: {classUint, 4}, 0xcf: {classUint, 8},
		0xd0: {classInt, 1}, 0xd1: {classInt, 2}, 0xd2: {classInt, 4}, 0xd3: {classInt, 8},
		0xd4: {classExt, 0}, 0xd5: {classExt, 0}, 0xd6: {classExt, 0}, 0xd7: {classExt, 0}, 0xd8: {classExt, 0},
		0xd9: {classStr, 1}, 0xda: {classStr, 2}, 0xdb: {classStr, 4},
		0xdc: {classArray, 2}, 0xdd: {classArray, 4},
		0xde: {classMap, 2}, 0xdf: {classMap, 4},
	} {
		t[c] = v
	}
	return t
}()

// value is a MessagePack value up to its contents: a scalar whole, the extent of
// a string, the number of elements of an array or map.
type value struct {
	class class
	// at is where the contents begin. A scalar has none: it ends there.
	at int
	// n is the length in bytes of a str, bin or ext, which lies inside the
	// payload, or the number of an array's elements or a map's pairs, which is
	// no more than the payload has bytes.
	n int
	// bits is the number: two's complement, 0 or 1, or a float64's bits.
	bits uint64
}

// float returns a number as a float64.
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

// int returns an integer that an int64 can hold.
func (v value) int() (int64, bool) {
	switch v.class {
	case classUint:
		return int64(v.bits), v.bits <= math.MaxInt64
	case classInt:
		return int64(v.bits), true
	default:
		return 0, false
	}
}

// readValue reads the value at i.
func readValue(p []byte, i int) (value, fault) {
	if i >= len(p) {
		return value{}, truncated
	}
	c := p[i]
	i++
	v := value{class: codes[c].class, at: i}
	width := int(codes[c].width)
	if width != 0 {
		if len(p)-i < width {
			return v, truncated
		}
		v.at += width
		switch width {
		case 1:
			v.bits = uint64(p[i])
		case 2:
			v.bits = uint64(binary.BigEndian.Uint16(p[i:]))
		case 4:
			v.bits = uint64(binary.BigEndian.Uint32(p[i:]))
		default:
			v.bits = binary.BigEndian.Uint64(p[i:])
		}
	}
	switch v.class {
	case classReserved:
		return v, badCode
	case classNil:
	case classBool:
		v.bits = uint64(c & 1)
	case classUint:
		if width == 0 {
			v.bits = uint64(c)
		}
	case classInt:
		if width == 0 {
			v.bits = uint64(int64(int8(c)))
			break
		}
		shift := uint(64 - 8*width)
		v.bits = uint64(int64(v.bits<<shift) >> shift)
		if int64(v.bits) >= 0 {
			v.class = classUint
		}
	case classFloat:
		if width == 4 {
			v.bits = math.Float64bits(float64(math.Float32frombits(uint32(v.bits))))
		}
	default:
		return v.sized(p, c)
	}
	return v, 0
}

// sized completes a value that has a length, whose code is c.
func (v value) sized(p []byte, c byte) (value, fault) {
	if codes[c].width == 0 {
		switch v.class {
		case classStr:
			v.bits = uint64(c & 0x1f)
		case classExt:
			v.bits = 1 << (c - 0xd4)
		default:
			v.bits = uint64(c & 0x0f)
		}
	}
	if v.bits > uint64(len(p)) {
		return v, oversize
	}
	v.n = int(v.bits)
	if v.class == classArray || v.class == classMap {
		return v, 0
	}
	if v.class == classExt {
		v.at++ // the type of the extension
	}
	if len(p)-v.at < v.n {
		return v, truncated
	}
	return v, 0
}

// skip returns where the value at i ends, which stands inside depth arrays and
// maps. All that is in it is checked.
func skip(p []byte, i, depth int) (int, fault) {
	var left [maxDepth + 1]int
	outer := depth
	for {
		v, f := readValue(p, i)
		if f != 0 {
			return i, f
		}
		i = v.at
		switch v.class {
		case classStr, classBin, classExt:
			i += v.n
		case classArray, classMap:
			if depth == maxDepth {
				return i, tooDeep
			}
			depth++
			left[depth] = v.n
			if v.class == classMap {
				left[depth] *= 2
			}
		default:
		}
		for depth > outer && left[depth] == 0 {
			depth--
		}
		if depth == outer {
			return i, 0
		}
		left[depth]--
	}
}
