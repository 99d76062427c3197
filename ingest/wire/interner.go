package wire

import (
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

const (
	internedSets = 16
	internedWays = 4
	// maxInterned is in bytes. Longer strings are not remembered, so that an
	// interner holds 16 KiB at most.
	maxInterned = 256
	// maxLast is the length in bytes of the longest string that is remembered as
	// the last one of its field, so that a Decoder holds 1 KiB for each at most.
	maxLast = 1024
)

// interner remembers the strings it made last, so that those which come again
// cost no allocation. The zero value is ready.
type interner struct {
	slots [internedSets * internedWays]string
}

// string returns b as a string, and whether it is valid UTF-8.
func (t *interner) string(b []byte) (string, bool) {
	if len(b) == 0 {
		return "", true
	}
	if len(b) > maxInterned {
		return string(b), utf8.Valid(b)
	}
	first := xxh3.Hash(b) % internedSets * internedWays
	set := t.slots[first : first+internedWays]
	for k, s := range set {
		if s == string(b) {
			set[0], set[k] = s, set[0]
			return s, true
		}
	}
	if !utf8.Valid(b) {
		return "", false
	}
	// The one found or made last stands first and is spared.
	copy(set[1:], set)
	set[0] = string(b)
	return set[0], true
}
