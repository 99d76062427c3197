package wire

import "encoding/binary"

// tokenShifts is how far eight bytes that begin with a number must be shifted, to
// the left and then to the right, to leave the number, by its code: 0 for codes
// that engines do not use for tokens.
var tokenShifts = func() (t [256]struct{ left, right uint8 }) {
	for c := range 0x80 {
		t[c].right = 56
	}
	t[0xcc].left, t[0xcc].right = 8, 56
	t[0xcd].left, t[0xcd].right = 8, 48
	t[0xce].left, t[0xce].right = 8, 32
	return t
}()

// manyTokens is how many there must be for it to pay that their widths are looked
// at first.
const manyTokens = 64

// scanTokens fills tokens with the numbers from p[i] on, as long as they are of
// the four codes that engines use and well inside the payload. It returns how many
// it read, and where it stopped.
//
// The widths of tokens mix at random, so a branch on them would be mispredicted
// for every other one, which costs more than the rest of decoding: the length is
// computed from the code. That makes each token wait for the one before, but not
// where all have one width, as fixed-width encoders write them.
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
		// 1 for a number that is its own code, 2, 3 and 5 for 0xcc, 0xcd and 0xce.
		i += 1 + int(c>>7)<<(c&3)
	}
	return k, i
}

// allWide tells whether eight tokens in 40 bytes are all of code 0xce.
func allWide(p []byte) bool {
	const codes = 0xce | 0xce<<40 // the first and the sixth of eight bytes
	w := binary.LittleEndian.Uint64(p[0:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[10:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[20:]) ^ codes
	w |= binary.LittleEndian.Uint64(p[30:]) ^ codes
	return w&(0xff|0xff<<40) == 0
}
