package wire

import (
	"encoding/binary"
	"math"
)

// readTokens reads a list of tokens: numbers, or lists of numbers, or strings
// among them, which are no token ids.
func (d *Decoder) readTokens(ev *Event, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if v.class != classArray {
		return i, badType
	}
	ev.Tokens, ev.OpaqueTokens, ev.Eagle = nil, false, false
	d.lists = lists{}
	if v.n > 0 && v.at < len(d.p) && codes[d.p[v.at]].class == classArray {
		return d.readLists(ev, v)
	}
	tokens := d.tokens.reserve(min(v.n, len(d.p)-v.at))
	i, opaque, f := scanList(tokens, d.p, v)
	if f != 0 {
		return i, f
	}
	if opaque {
		ev.OpaqueTokens = true
		return i, 0
	}
	ev.Tokens = d.tokens.take(v.n)
	return i, 0
}

// scanList reads the numbers of list v into tokens, which has room for them or
// for as many as there are bytes left. opaque tells that there were strings.
func scanList(tokens []uint32, p []byte, v value) (i int, opaque bool, f fault) {
	i = v.at
	k := 0
	for {
		k, i = scanTokens(tokens, k, p, i)
		if k == v.n {
			return i, opaque, 0
		}
		t, f := readValue(p, i)
		if f != 0 {
			return i, opaque, f
		}
		switch {
		case t.class == classUint && t.bits <= math.MaxUint32:
			tokens[k] = uint32(t.bits)
		case t.class == classStr:
			opaque = true
		default:
			return i, opaque, badType
		}
		k++
		i = t.at + t.n
	}
}

// tokenShift is how far eight bytes that begin with a number must be shifted, to
// the left and then to the right, to leave the number, by its code: 0 for codes
// that engines do not use for tokens.
var tokenShift = func() (t [256]struct{ left, right uint8 }) {
	for c := range 0x80 {
		t[c].right = 56
	}
	t[0xcc].left, t[0xcc].right = 8, 56
	t[0xcd].left, t[0xcd].right = 8, 48
	t[0xce].left, t[0xce].right = 8, 32
	return t
}()

// scanTokens fills tokens from k on with the numbers at p[i], as long as they
// are of the four codes that engines use and well inside the payload. It returns
// where it stopped in both.
//
// The widths of tokens mix at random, so a branch on them would be mispredicted
// for every other one, which costs more than the rest of decoding: the length is
// computed from the code. Where a run has one width throughout, as fixed-width
// encoders write it, even that chain of loads is spared.
func scanTokens(tokens []uint32, k int, p []byte, i int) (int, int) {
	for {
		for k+4 <= len(tokens) && i+24 <= len(p) &&
			p[i] == 0xce && p[i+5] == 0xce && p[i+10] == 0xce && p[i+15] == 0xce {
			t, b := tokens[k:k+4:k+4], p[i:i+20:i+20]
			t[0] = binary.BigEndian.Uint32(b[1:5])
			t[1] = binary.BigEndian.Uint32(b[6:10])
			t[2] = binary.BigEndian.Uint32(b[11:15])
			t[3] = binary.BigEndian.Uint32(b[16:20])
			k += 4
			i += 20
		}
		for range 8 {
			if k >= len(tokens) || i+8 > len(p) {
				return k, i
			}
			w := binary.BigEndian.Uint64(p[i : i+8 : i+8])
			c := p[i]
			shift := tokenShift[c]
			if shift.right == 0 {
				return k, i
			}
			tokens[k] = uint32(w << (shift.left & 63) >> (shift.right & 63))
			k++
			// 1 for a number that is its own code, 2, 3 and 5 for 0xcc, 0xcd and
			// 0xce.
			i += 1 + int(c>>7)<<(c&3)
		}
	}
}

// lists is how tokens were nested.
type lists struct {
	nested bool
	// inner is the length of the first list.
	inner int
	// last is the length of the last one.
	last int
	// ragged tells that another than the last has not the length of the first.
	ragged bool
}

// readLists reads tokens that come as lists in list v, one after the other.
func (d *Decoder) readLists(ev *Event, v value) (int, fault) {
	i := v.at
	d.lists.nested = true
	start := len(d.tokens.buf)
	for k := range v.n {
		l, f := readValue(d.p, i)
		if f != 0 {
			return i, f
		}
		if l.class != classArray {
			return i, badType
		}
		left := len(d.p) - l.at
		if k == 0 {
			d.lists.inner = l.n
			// One reservation for all, if they are as long as the first.
			room := left
			if l.n == 0 || v.n <= left/l.n {
				room = v.n * l.n
			}
			d.tokens.reserve(min(room, left))
			start = len(d.tokens.buf)
		} else if d.lists.last != d.lists.inner {
			d.lists.ragged = true
		}
		d.lists.last = l.n
		buf := d.tokens.buf
		used := len(buf)
		room := min(l.n, left)
		if cap(buf)-used < room {
			grown := make([]uint32, used-start, 2*(used-start)+room)
			copy(grown, buf[start:])
			buf, start, used = grown, 0, len(grown)
		}
		end, opaque, f := scanList(buf[used:used+room], d.p, l)
		if f != 0 {
			return end, f
		}
		i = end
		d.tokens.buf = buf[:used+room]
		ev.OpaqueTokens = ev.OpaqueTokens || opaque
	}
	if !ev.OpaqueTokens {
		end := len(d.tokens.buf)
		ev.Tokens = d.tokens.buf[start:end:end]
	}
	return i, 0
}

// pairs makes tokens of EAGLE's pairs (a, b), (b, c): all the firsts, and the
// last second.
func (l *lists) pairs(ev *Event) fault {
	if l.inner != 2 || l.last != 2 || l.ragged {
		return badType
	}
	ev.Eagle = true
	t := ev.Tokens
	if ev.OpaqueTokens {
		return 0
	}
	n := len(t) / 2
	last := t[2*n-1]
	for k := range n {
		t[k] = t[2*k]
	}
	t[n] = last
	ev.Tokens = t[: n+1 : n+1]
	return 0
}

// blocks takes the lists as blocks, whose length is the block size; the last may
// be shorter.
func (l *lists) blocks(ev *Event) fault {
	if l.ragged || l.last > l.inner {
		return badType
	}
	ev.BlockSize = uint32(l.inner)
	return 0
}
