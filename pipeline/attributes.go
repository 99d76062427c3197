package pipeline

import (
	"strings"

	"github.com/kvcast/kvcast/internal/budget"
)

// attr are attributes that many blocks share.
type attr struct {
	lora string
	// salt is the cache salt, used by trackers only.
	salt      string
	blockSize uint32
}

// attributes assigns each attr in use a slot, so that a block stores only the slot's number.
// A slot is freed when no block uses it. The memory is reserved in a budget of the process:
// that of the strings while the attr is in use, and that of the slots until all are free,
// since neither the slots nor their index shrink before. An attr without strings is not
// accounted: there are at most two, with the worker's block size and with none.
type attributes struct {
	slots []attrSlot
	index map[attr]uint32
	free  []uint32
	// recent caches the most recently requested slot, which is usually requested next.
	recent uint32
	// bytes is the budget; slotBytes and stringBytes are reserved in it.
	bytes                  *budget.Budget
	slotBytes, stringBytes int64
}

type attrSlot struct {
	attr   attr
	blocks int
}

// attrSlotBytes bounds the size of a slot: 48 bytes, and up to twice as much in the index,
// part of which is free after it has grown.
const attrSlotBytes = 160

// stringBytes returns the memory of an attr's strings: an allocation each, of a multiple of
// 16 bytes.
func (v *attr) stringBytes() int64 { return int64((len(v.lora)+15)&^15 + (len(v.salt)+15)&^15) }

// slot returns the slot of an attr. ok is false where there is no memory for it.
func (a *attributes) slot(v attr) (i uint32, ok bool) {
	if i := int(a.recent); i < len(a.slots) && a.slots[i].blocks > 0 && a.slots[i].attr == v {
		return a.recent, true
	}
	if i, ok = a.index[v]; ok {
		a.recent = i
		return i, true
	}
	if !a.reserve(&v) {
		return 0, false
	}
	if a.index == nil {
		a.index = make(map[attr]uint32)
	}
	v.lora, v.salt = strings.Clone(v.lora), strings.Clone(v.salt) // a batch's strings are the caller's memory
	if n := len(a.free); n > 0 {
		i, a.free = a.free[n-1], a.free[:n-1]
	} else {
		i = uint32(len(a.slots))
		a.slots = append(a.slots, attrSlot{})
	}
	a.slots[i] = attrSlot{attr: v}
	a.index[v] = i
	a.recent = i
	return i, true
}

// reserve reserves the memory of a new attr in the budget, and reports whether there was room.
func (a *attributes) reserve(v *attr) bool {
	text, slot := v.stringBytes(), int64(0)
	if text == 0 {
		return true
	}
	if len(a.free) == 0 {
		slot = attrSlotBytes
	}
	if !a.bytes.Take(text + slot) {
		return false
	}
	a.stringBytes += text
	a.slotBytes += slot
	return true
}

func (a *attributes) use(i uint32) { a.slots[i].blocks++ }

func (a *attributes) release(i uint32) {
	a.slots[i].blocks--
	a.tidy(i)
}

// tidy frees a slot that no block uses, and all where none is used.
func (a *attributes) tidy(i uint32) {
	s := &a.slots[i]
	if s.blocks > 0 {
		return
	}
	text := s.attr.stringBytes()
	a.stringBytes -= text
	a.bytes.Release(text)
	delete(a.index, s.attr)
	*s = attrSlot{}
	a.free = append(a.free, i)
	if len(a.index) == 0 && a.slotBytes > 0 {
		a.drop()
	}
}

// drop frees all slots.
func (a *attributes) drop() {
	a.bytes.Release(a.slotBytes + a.stringBytes)
	*a = attributes{bytes: a.bytes}
}
