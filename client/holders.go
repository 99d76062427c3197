package client

import (
	"cmp"
	"hash/maphash"
	"slices"
	"unsafe"
)

// tiers is a set of tiers. Bit n is tier n+1 of kvcastv1.Tier, so bit 0 is TIER_DEVICE.
type tiers uint8

const (
	numTiers = 4
	allTiers = tiers(1<<numTiers - 1)
)

// member is the number of a holder, which is below 1<<28, and the tiers in which the holder has a block.
type member uint32

func newMember(holder uint32, t tiers) member { return member(holder)<<numTiers | member(t) }
func (m member) holder() uint32               { return uint32(m >> numTiers) }
func (m member) tiers() tiers                 { return tiers(m) & allTiers }

// findMember returns the index of a holder in ascending members, or the index at which to insert it.
func findMember(members []member, holder uint32) (_ int, found bool) {
	return slices.BinarySearchFunc(members, holder, func(m member, holder uint32) int { return cmp.Compare(m.holder(), holder) })
}

// tiersOf returns the tiers of a holder; none if it is not a member.
func tiersOf(members []member, holder uint32) tiers {
	if i, ok := findMember(members, holder); ok {
		return members[i].tiers()
	}
	return 0
}

// holders encodes the holders of a block: 0 for none, a member for one holder, and setBit with an index of
// sets.all for several. Equal holders have equal values, so that matching compares one value per block of a shared
// prefix instead of all holders.
type holders uint64

const setBit holders = 1 << 63

// sets has the distinct sets of two or more holders, with reference counts.
type sets struct {
	seed    maphash.Seed
	all     []holderSet
	free    []uint32          // unused indexes of all
	byHash  map[uint64]uint32 // index in all, by hash of the members
	scratch []member          // reused by change
	single  [1]member         // reused by change
}

type holderSet struct {
	members []member // ascending by holder
	blocks  int      // number of blocks with these holders
	hash    uint64   // key in byHash
}

func newSets() *sets {
	return &sets{seed: maphash.MakeSeed(), byHash: make(map[uint64]uint32)}
}

// members returns the members of h, ascending. A single member is stored in buf. The result is valid until the
// next change and must not be modified.
func (s *sets) members(h holders, buf *[1]member) []member {
	switch {
	case h == 0:
		return nil
	case h&setBit == 0:
		buf[0] = member(h)
		return buf[:]
	}
	return s.all[uint32(h)].members
}

// change removes and adds tiers of one holder, and returns the new holders. It releases a reference to h and adds
// a reference to the result.
func (s *sets) change(h holders, holder uint32, add, remove tiers) holders {
	s.scratch = append(s.scratch[:0], s.members(h, &s.single)...)
	members := s.scratch
	i, found := findMember(members, holder)
	var t tiers
	if found {
		t = members[i].tiers()
	}
	switch t = t&^remove | add; {
	case found && t != 0:
		members[i] = newMember(holder, t)
	case found:
		members = slices.Delete(members, i, i+1)
	case t != 0:
		members = slices.Insert(members, i, newMember(holder, t))
	}
	s.scratch = members
	out := s.reference(members)
	s.release(h)
	return out
}

// reference returns the holders with these members, and adds a reference.
func (s *sets) reference(members []member) holders {
	switch len(members) {
	case 0:
		return 0
	case 1:
		return holders(members[0])
	}
	h := maphash.Bytes(s.seed, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(members))), 4*len(members)))
	for {
		id, ok := s.byHash[h]
		if !ok {
			break
		}
		if slices.Equal(s.all[id].members, members) {
			s.all[id].blocks++
			return setBit | holders(id)
		}
		h++
	}
	id := uint32(len(s.all))
	if n := len(s.free); n > 0 {
		id, s.free = s.free[n-1], s.free[:n-1]
	} else {
		s.all = append(s.all, holderSet{})
	}
	s.all[id] = holderSet{members: slices.Clone(members), blocks: 1, hash: h}
	s.byHash[h] = id
	return setBit | holders(id)
}

func (s *sets) release(h holders) {
	if h&setBit == 0 {
		return
	}
	id := uint32(h)
	set := &s.all[id]
	if set.blocks--; set.blocks > 0 {
		return
	}
	delete(s.byHash, set.hash)
	*set = holderSet{}
	s.free = append(s.free, id)
}
