package wire

import "math"

// readTokens reads a list of tokens: numbers, or lists of numbers, or strings
// among them, which are no token ids.
func (d *Decoder) readTokens(ev *Event, i int) (int, fault) {
	class, n, i, f := readNest(d.p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badType
	}
	ev.Tokens, ev.OpaqueTokens, ev.Eagle = nil, false, false
	d.lists = lists{}
	if n > 0 && i < len(d.p) && codes[d.p[i]].class == classArray {
		return d.readLists(ev, n, i)
	}
	tokens := d.tokens.room(n)
	if len(tokens) != n {
		// Room only for tokens that are there.
		end, opaque, f := checkList(d.p, n, i)
		if f != 0 || opaque {
			ev.OpaqueTokens = opaque
			return end, f
		}
		tokens = d.tokens.grow(n)
	}
	k, i := scanTokens(tokens, d.p, i)
	if k != n {
		var opaque bool
		i, opaque, f = readList(tokens[k:], d.p, i)
		if f != 0 || opaque {
			ev.OpaqueTokens = opaque
			return i, f
		}
	}
	ev.Tokens = d.tokens.take(n)
	return i, 0
}

// readList reads as many numbers as tokens has room for. opaque tells that there
// were strings among them.
func readList(tokens []uint32, p []byte, i int) (end int, opaque bool, f fault) {
	for {
		k, at := scanTokens(tokens, p, i)
		i = at
		if k == len(tokens) {
			return i, opaque, 0
		}
		t, f := readValue(p, i)
		if f == 0 {
			f = t.token()
		}
		if f != 0 {
			return i, opaque, f
		}
		if t.class == classStr {
			opaque = true
		} else {
			tokens[k] = uint32(t.bits)
		}
		tokens = tokens[k+1:]
		i = t.at + t.n
	}
}

// checkList is readList for n tokens without the tokens.
func checkList(p []byte, n, i int) (end int, opaque bool, f fault) {
	for range n {
		t, f := readValue(p, i)
		if f == 0 {
			f = t.token()
		}
		if f != 0 {
			return i, opaque, f
		}
		opaque = opaque || t.class == classStr
		i = t.at + t.n
	}
	return i, opaque, 0
}

// token tells whether a value may stand among tokens: as one, or in the place of
// one.
func (v value) token() fault {
	if v.class == classStr || v.class == classUint && v.bits <= math.MaxUint32 {
		return 0
	}
	return badType
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

// readLists reads tokens that come as n lists, one after the other.
func (d *Decoder) readLists(ev *Event, n, i int) (int, fault) {
	d.lists.nested = true
	_, inner, _, f := readNest(d.p, i)
	if f != 0 {
		return i, f
	}
	d.lists.inner = inner
	left := len(d.p) - i
	room := left
	if inner == 0 || n <= left/inner {
		room = n * inner
	}
	tokens := d.tokens.room(room)
	if len(tokens) != room {
		// Room only for tokens that are there.
		count, f := d.checkLists(n, i)
		if f != 0 {
			return i, f
		}
		tokens = d.tokens.grow(count)
	}
	used := 0
	for k := range n {
		class, l, at, f := readNest(d.p, i)
		if f != 0 {
			return i, f
		}
		if class != classArray {
			return i, badType
		}
		if k > 0 && d.lists.last != inner {
			d.lists.ragged = true
		}
		d.lists.last = l
		var opaque bool
		if l <= inner && l <= len(tokens)-used {
			i, opaque, f = readList(tokens[used:used+l], d.p, at)
			used += l
		} else {
			// Longer than the first, which no dialect allows, or cut off.
			i, opaque, f = checkList(d.p, l, at)
		}
		if f != 0 {
			return i, f
		}
		ev.OpaqueTokens = ev.OpaqueTokens || opaque
	}
	if !ev.OpaqueTokens {
		ev.Tokens = d.tokens.take(used)
	}
	return i, 0
}

// checkLists counts the tokens in the n lists from i on, those left out that are
// longer than the first.
func (d *Decoder) checkLists(n, i int) (count int, f fault) {
	for range n {
		class, l, at, f := readNest(d.p, i)
		if f != 0 {
			return 0, f
		}
		if class != classArray {
			return 0, badType
		}
		if i, _, f = checkList(d.p, l, at); f != 0 {
			return 0, f
		}
		if l <= d.lists.inner {
			count += l
		}
	}
	return count, 0
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
