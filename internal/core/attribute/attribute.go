// Package attribute stores each combination of LoRA adapter, cache salt and block size once, so
// that a block needs only the number of its combination.
//
// Combinations flow in, numbers of slots flow out. The memory of all slots and strings is
// reserved in a budget of the process, since engines choose the strings.
package attribute

import (
	"iter"
	"strings"
)

// Set is a combination of attributes that many blocks share.
type Set struct {
	LoRA string
	// Salt is the cache salt; empty where the owner's blocks do not depend on it.
	Salt string
	// BlockSize is in tokens; 0 if unknown.
	BlockSize uint32
}

// Interner gives each set in use the number of a slot, and frees the slot when nothing uses it. Numbers of free slots are used again.
//
// Memory of strings is reserved while their set is in use. Memory of slots is reserved for as many sets with strings
// as were in use at once, until all slots are free, since neither the slots nor their index shrink before. A set
// without strings needs no reservation: an owner has at most two, with its block size and with none.
type Interner struct {
	slots []slot
	index map[Set]uint32
	free  []uint32
	// recent is the most recently acquired slot, which is usually acquired next.
	recent uint32
	budget Budget
	// stringBytes and the memory of reserved slots are reserved in the budget. named are the sets with strings.
	stringBytes     int64
	named, reserved int
}

type slot struct {
	set  Set
	uses int
}

// slotBytes bounds the memory of a slot: 48 bytes, and up to twice as much in the index, which is partly unused after it has grown.
const slotBytes = 160

// Budget is where memory is reserved, in bytes. See budget.Budget for the methods.
type Budget interface {
	Reserve(n int64) bool
	Release(n int64)
	// Adjust adds n, which may be negative, even beyond the limit.
	Adjust(n int64)
}

// unlimited is a Budget that counts nothing.
type unlimited struct{}

func (unlimited) Reserve(int64) bool { return true }
func (unlimited) Release(int64)      {}
func (unlimited) Adjust(int64)       {}

// NewInterner returns an empty interner whose memory is reserved in a budget. A nil budget is unlimited.
func NewInterner(b Budget) Interner {
	if b == nil {
		b = unlimited{}
	}
	return Interner{budget: b}
}

// stringBytes returns the memory of a set's strings: an allocation each, of a multiple of 16 bytes.
func (s *Set) stringBytes() int64 { return int64((len(s.LoRA)+15)&^15 + (len(s.Salt)+15)&^15) }

// Acquire returns the slot of a set, and counts a use of it. It copies the strings of a new set.
// ok is false if the budget has no memory left.
func (in *Interner) Acquire(set Set) (i uint32, ok bool) {
	if i := int(in.recent); i < len(in.slots) && in.slots[i].uses > 0 && in.slots[i].set == set {
		in.slots[i].uses++
		return in.recent, true
	}
	if i, ok = in.index[set]; !ok {
		if !in.reserve(&set) {
			return 0, false
		}
		i = in.add(set)
	}
	in.recent = i
	in.slots[i].uses++
	return i, true
}

// reserve reserves the memory of a new set, and reports whether the budget had it.
func (in *Interner) reserve(set *Set) bool {
	text, slot := set.stringBytes(), int64(0)
	if text == 0 {
		return true
	}
	if in.named == in.reserved {
		slot = 1
	}
	if !in.budget.Reserve(text + slot*slotBytes) {
		return false
	}
	in.stringBytes += text
	in.reserved += int(slot)
	in.named++
	return true
}

func (in *Interner) add(set Set) (i uint32) {
	if in.index == nil {
		in.index = make(map[Set]uint32)
	}
	set.LoRA, set.Salt = strings.Clone(set.LoRA), strings.Clone(set.Salt)
	if n := len(in.free); n > 0 {
		i, in.free = in.free[n-1], in.free[:n-1]
	} else {
		i = uint32(len(in.slots))
		in.slots = append(in.slots, slot{})
	}
	in.slots[i].set = set
	in.index[set] = i
	return i
}

// Use counts more uses of a slot in use.
func (in *Interner) Use(i uint32, uses int) { in.slots[i].uses += uses }

// Release ends a use of a slot.
func (in *Interner) Release(i uint32) {
	in.slots[i].uses--
	if in.slots[i].uses == 0 {
		in.freeSlot(i)
	}
}

func (in *Interner) freeSlot(i uint32) {
	s := &in.slots[i]
	if text := s.set.stringBytes(); text > 0 {
		in.stringBytes -= text
		in.named--
		in.budget.Release(text)
	}
	delete(in.index, s.set)
	*s = slot{}
	in.free = append(in.free, i)
	if len(in.index) == 0 && in.reserved > 0 {
		in.Reset()
	}
}

// Reset frees all slots, whatever uses they have.
func (in *Interner) Reset() {
	in.budget.Release(in.bytes())
	*in = NewInterner(in.budget)
}

// WithoutLimit calls do, in which the budget refuses nothing, and then reserves in the budget what the
// interner has more than before. It is for state that was recovered.
func (in *Interner) WithoutLimit(do func()) {
	b, before := in.budget, in.bytes()
	in.budget = unlimited{}
	do()
	in.budget = b
	b.Adjust(in.bytes() - before)
}

// bytes returns the memory that is reserved.
func (in *Interner) bytes() int64 { return in.stringBytes + int64(in.reserved)*slotBytes }

// Reserved returns the number of slots whose memory is reserved.
func (in *Interner) Reserved() int { return in.reserved }

// ReserveSlots reserves the memory of n slots, unless that of more is reserved, while some set is in use. It must be
// called within WithoutLimit.
func (in *Interner) ReserveSlots(n int) { in.reserved = max(in.reserved, n) }

// SetBudget moves the reservations to a budget, even beyond its limit.
func (in *Interner) SetBudget(b Budget) {
	in.budget.Adjust(-in.bytes())
	in.budget = b
	b.Adjust(in.bytes())
}

// At returns the set of a slot; the empty set if the slot is free.
func (in *Interner) At(i uint32) Set { return in.slots[i].set }

// Slots returns the number of slots, free ones included.
func (in *Interner) Slots() int { return len(in.slots) }

// Len returns the number of sets in use.
func (in *Interner) Len() int { return len(in.index) }

// All yields the sets in use, by slot.
func (in *Interner) All() iter.Seq2[uint32, Set] {
	return func(yield func(uint32, Set) bool) {
		for i := range in.slots {
			if in.slots[i].uses > 0 && !yield(uint32(i), in.slots[i].set) {
				return
			}
		}
	}
}
