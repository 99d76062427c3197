package wire

import (
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"
)

// growList makes room for the n elements of the list at i, after checking that they are present.
func growList[T any](s *slab[T], p []byte, i, n int) fault {
	_, f := skip(p, i, fieldDepth)
	if f == 0 {
		s.grow(n)
	}
	return f
}

// hashList is a list of block hashes.
type hashList struct{}

func (hashList) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	p := d.p
	class, n, at, f := readHeader(p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badType
	}
	if n > MaxBlocks-d.hashes.len() {
		return i, tooManyBlocks
	}
	if !d.hashes.fits(n) {
		if f = growList(&d.hashes, p, i, n); f != 0 {
			return i, f
		}
	}
	hashes := d.hashes.room(n)
	i = at
	for k := range hashes {
		// Nearly all hashes have this encoding.
		h, ok := readFixed64(p, i, uint64Code)
		if ok {
			hashes[k] = h
			i += 9
			continue
		}
		v, f := readValue(p, i)
		if f != 0 {
			return i, f
		}
		if hashes[k], ok = v.hash(); !ok {
			return i, badType
		}
		i = v.end
	}
	ev.BlockHashes = d.hashes.allocate(n)
	return i, 0
}

func (hashList) isSet(ev *Event) bool { return len(ev.BlockHashes) > 0 }

func (hashList) append(dst []byte, ev *Event) []byte {
	return appendList(dst, ev.BlockHashes, msgp.AppendUint64)
}

// copyCounts is a list of remaining copies, one number per hash. A value of another type is
// skipped, because the remove is valid without the counts.
type copyCounts struct{}

func (copyCounts) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	if ev.Rare != nil {
		ev.Rare.RemainingCopies = nil
	}
	class, n, at, f := readHeader(d.p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray || n == 0 {
		return skip(d.p, i, fieldDepth)
	}
	if !d.tokens.fits(n) {
		if f = growList(&d.tokens, d.p, i, n); f != 0 {
			return i, f
		}
	}
	counts := d.tokens.room(n)
	end, hasStrings, f := readTokens(counts, d.p, at)
	if f == badType || hasStrings {
		return skip(d.p, i, fieldDepth)
	}
	if f == 0 {
		d.rareOf(ev).RemainingCopies = d.tokens.allocate(n)
	}
	return end, f
}

func (copyCounts) isSet(ev *Event) bool { return len(ev.rare().RemainingCopies) > 0 }

func (copyCounts) append(dst []byte, ev *Event) []byte {
	return appendList(dst, ev.rare().RemainingCopies, msgp.AppendUint32)
}

// appendList appends a list, each element with appendElement.
func appendList[T any](dst []byte, list []T, appendElement func(dst []byte, v T) []byte) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(list)))
	for _, v := range list {
		dst = appendElement(dst, v)
	}
	return dst
}

// tokenList is a list of tokens, or a list of lists of tokens. A token is a number, or a string as a placeholder.
type tokenList struct{}

func (tokenList) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	class, n, at, f := readHeader(d.p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badType
	}
	ev.Tokens, ev.OpaqueTokens, ev.Eagle = nil, false, false
	d.nesting = nesting{}
	if n > 0 && isArray(d.p, at) {
		return d.readNestedTokens(ev, n, at)
	}
	if !d.tokens.fits(n) {
		if f = growList(&d.tokens, d.p, i, n); f != 0 {
			return i, f
		}
	}
	tokens := d.tokens.room(n)
	k, at := scanTokens(tokens, d.p, at)
	if k != n {
		at, ev.OpaqueTokens, f = readTokens(tokens[k:], d.p, at)
		if f != 0 || ev.OpaqueTokens {
			return at, f
		}
	}
	ev.Tokens = d.tokens.allocate(n)
	return at, 0
}

// readNestedTokens reads the n lists of tokens from i on, and returns where they end. If
// their lengths are invalid for all producers, it stores no tokens.
func (d *Decoder) readNestedTokens(ev *Event, n, i int) (int, fault) {
	p := d.p
	total, end := 0, i
	for k := range n {
		class, length, _, f := readHeader(p, end)
		if f == 0 && class != classArray {
			f = badType
		}
		if f == 0 {
			d.nesting.add(k, length)
			total += length
			end, f = skip(p, end, fieldDepth+1)
		}
		if f != 0 {
			return end, f
		}
	}
	if d.nesting.ragged || d.nesting.last > d.nesting.inner {
		return end, 0
	}
	tokens := d.tokens.reserve(total)
	for range n {
		_, length, at, _ := readHeader(p, i)
		end, opaque, f := readTokens(tokens[:length], p, at)
		if f != 0 {
			return end, f
		}
		i = end
		ev.OpaqueTokens = ev.OpaqueTokens || opaque
		tokens = tokens[length:]
	}
	if !ev.OpaqueTokens {
		ev.Tokens = d.tokens.allocate(total)
	}
	return end, 0
}

func (tokenList) isSet(ev *Event) bool { return len(ev.Tokens) > 0 }

func (tokenList) append(dst []byte, ev *Event) []byte {
	tokens := ev.Tokens
	switch {
	case ev.OpaqueTokens:
		return msgp.AppendString(msgp.AppendArrayHeader(dst, 1), "")
	case ev.Eagle:
		dst = msgp.AppendArrayHeader(dst, uint32(len(tokens)-1))
		for k := range tokens[1:] {
			dst = appendList(dst, tokens[k:k+2], msgp.AppendUint32)
		}
		return dst
	default:
		return appendList(dst, tokens, msgp.AppendUint32)
	}
}

// readTokens fills tokens with the numbers from p[i] on. opaque reports whether there are strings among them.
func readTokens(tokens []uint32, p []byte, i int) (end int, opaque bool, f fault) {
	for len(tokens) > 0 {
		if k, at := scanTokens(tokens, p, i); k > 0 {
			tokens, i = tokens[k:], at
			continue
		}
		v, f := readValue(p, i)
		if f != 0 {
			return i, opaque, f
		}
		token, ok := v.uint32()
		if !ok && v.class != classStr {
			return i, opaque, badType
		}
		opaque = opaque || !ok
		tokens[0] = token
		tokens = tokens[1:]
		i = v.end
	}
	return i, opaque, 0
}

// nesting describes tokens that are encoded as lists.
type nesting struct {
	nested bool
	// inner is the length of the first list, and last the length of the last list.
	inner, last int
	// ragged reports whether a list other than the last has another length than the first.
	ragged bool
}

func (n *nesting) add(k, length int) {
	if k == 0 {
		*n = nesting{nested: true, inner: length, last: length}
	}
	n.ragged = n.ragged || n.last != n.inner
	n.last = length
}

// flattenPairs converts EAGLE's pairs (a, b), (b, c) to the tokens a, b, c: the first
// element of each pair, and the second element of the last pair.
func (n *nesting) flattenPairs(ev *Event) fault {
	if n.inner != 2 || n.last != 2 || n.ragged {
		return badType
	}
	ev.Eagle = true
	if ev.OpaqueTokens {
		return 0
	}
	t := ev.Tokens
	pairs := len(t) / 2
	last := t[2*pairs-1]
	for k := range pairs {
		t[k] = t[2*k]
	}
	t[pairs] = last
	ev.Tokens = t[: pairs+1 : pairs+1]
	return 0
}

// flattenBlocks treats the lists as blocks. Their length is the block size. The last block may be shorter.
func (n *nesting) flattenBlocks(ev *Event) fault {
	if n.ragged || n.last > n.inner {
		return badType
	}
	ev.BlockSize = uint32(n.inner)
	return 0
}

// tokenShifts are indexed by the code of a number. To extract the number, the eight bytes that begin with the code are shifted left and
// then right by this many bits. right is 0 for codes that engines do not use for tokens.
var tokenShifts = func() (t [256]struct{ left, right uint8 }) {
	for c := range 0x80 {
		t[c].right = 56
	}
	t[0xcc].left, t[0xcc].right = 8, 56
	t[0xcd].left, t[0xcd].right = 8, 48
	t[0xce].left, t[0xce].right = 8, 32
	return t
}()

// manyTokens is the length from which scanTokens tests first whether all tokens are wide.
const manyTokens = 64

// scanTokens fills tokens with the numbers from p[i] on. It stops at a number with another code than the four codes that engines use, and
// where fewer than eight bytes are left. It returns how many numbers it read, and where it stopped.
//
// The widths of tokens vary at random. A branch on the width would be mispredicted for every other token, which costs more than the rest of
// decoding. So the width is computed from the code. Then each token depends on the previous one, except in the loop for encoders that write
// all tokens with one width.
func scanTokens(tokens []uint32, p []byte, i int) (k, end int) {
	for len(tokens) >= manyTokens && k+8 <= len(tokens) && i+40 <= len(p) && allWide(p[i:i+40:i+40]) {
		for range 8 {
			tokens[k] = binary.BigEndian.Uint32(p[i+1:])
			k++
			i += 5
		}
	}
	for k < len(tokens) && i+8 <= len(p) {
		w := binary.BigEndian.Uint64(p[i : i+8 : i+8])
		c := p[i]
		shift := tokenShifts[c]
		if shift.right == 0 {
			break
		}
		tokens[k] = uint32(w << (shift.left & 63) >> (shift.right & 63))
		k++
		// 1 for codes up to 0x7f, which are the number itself; 2, 3 and 5 for 0xcc, 0xcd and 0xce.
		i += 1 + int(c>>7)<<(c&3)
	}
	return k, i
}

// allWide reports whether 40 bytes are eight tokens of code 0xce.
func allWide(p []byte) bool {
	const codes = 0xce | 0xce<<40 // the first and the sixth of eight bytes
	w := binary.LittleEndian.Uint64(p[0:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[10:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[20:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[30:]) ^ codes
	return w&(0xff|0xff<<40) == 0
}
