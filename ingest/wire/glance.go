package wire

import "encoding/binary"

// A batch of one block is some thirty values, and nearly all are of a few codes.
// Here are those told by their first byte, where readValue would take longer than
// all else together. What a glance does not tell, and all that may be wrong, is
// left to readValue.

// glanceString returns the string at i if it has less than 32 bytes and lies
// inside the payload; else nil.
func glanceString(p []byte, i int) []byte {
	if i < len(p) {
		c := p[i]
		i++
		if end := i + int(c&0x1f); c>>5 == 0xa0>>5 && end <= len(p) {
			return p[i:end]
		}
	}
	return nil
}

// readString returns the string at i, and where it ends. Another value, which
// stands inside depth arrays and maps, is skipped, and the string nil.
func readString(p []byte, i, depth int) (s []byte, end int, f fault) {
	if s := glanceString(p, i); s != nil {
		return s, i + 1 + len(s), 0
	}
	v, f := readValue(p, i)
	if f != 0 {
		return nil, i, f
	}
	if v.class != classStr {
		end, f = skip(p, i, depth)
		return nil, end, f
	}
	end = v.at + v.n
	return p[v.at:end], end, 0
}

// glance64 returns the number at i if it is of this code, which is one of those
// with eight bytes after it.
func glance64(p []byte, i int, code byte) (uint64, bool) {
	if i+9 <= len(p) && p[i] == code {
		return binary.BigEndian.Uint64(p[i+1:]), true
	}
	return 0, false
}

// readNest is readValue for what is mostly an array or a map: of those it returns
// the class, how many elements or pairs it has, and where they begin.
func readNest(p []byte, i int) (class class, n, at int, f fault) {
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
	return readAnyNest(p, i)
}

func readAnyNest(p []byte, i int) (class class, n, at int, f fault) {
	v, f := readValue(p, i)
	return v.class, v.n, v.at, f
}
