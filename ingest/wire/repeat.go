package wire

import (
	"math/bits"
	"math/rand/v2"
)

const (
	// fewHashes are compared each with each, which is cheaper than a table.
	fewHashes = 6
	// maxRepeatSlots is how large a table is kept for the next store: 1 MiB.
	maxRepeatSlots = 1 << 16
)

// repeats finds out whether a hash comes twice in a list. It uses its table
// again: a slot counts only if it carries the turn of the present list.
type repeats struct {
	slots []repeatSlot
	turn  uint64
	// mix is odd and random, so that hashes which would crowd the table can not
	// be known beforehand. Chance may still crowd it: that costs time alone.
	mix uint64
}

type repeatSlot struct {
	hash uint64
	turn uint64
}

func newRepeats() repeats { return repeats{mix: rand.Uint64() | 1} }

// in tells whether any hash repeats.
func (r *repeats) in(hashes []uint64) bool {
	if len(hashes) <= fewHashes {
		for k, h := range hashes {
			for _, g := range hashes[:k] {
				if g == h {
					return true
				}
			}
		}
		return false
	}
	// A hash may be a single byte of the payload, but few such differ: a long list
	// gets its large table only once the first half of it has not repeated.
	n := min(len(hashes), maxRepeatSlots/2)
	for !r.inTable(hashes[:n]) {
		if n == len(hashes) {
			return false
		}
		n = min(len(hashes), 2*n)
	}
	return true
}

// inTable is in for a list of any length but 0.
func (r *repeats) inTable(hashes []uint64) bool {
	// Half of the slots stay empty, so that a search is short.
	width := bits.Len(uint(2*len(hashes) - 1))
	if len(r.slots) < 1<<width {
		r.slots = make([]repeatSlot, 1<<width)
		r.turn = 0
	}
	slots := r.slots[:1<<width]
	r.turn++
	if len(r.slots) > maxRepeatSlots {
		r.slots = nil
	}
	mask := len(slots) - 1
	shift := 64 - width
	for _, h := range hashes {
		at := int(h * r.mix >> shift)
		for slots[at&mask].turn == r.turn {
			if slots[at&mask].hash == h {
				return true
			}
			at++
		}
		slots[at&mask] = repeatSlot{hash: h, turn: r.turn}
	}
	return false
}
