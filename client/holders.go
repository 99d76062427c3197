package client

import (
	"hash/maphash"
	"slices"
	"unsafe"
)

// tiers is a set of tiers: bit 0 is the device.
type tiers uint8

const (
	numTiers = 4
	allTiers = tiers(1<<numTiers - 1)
)

// member is a holder of a block, one of 1<<28 at most, and the tiers that it holds it
// in.
type member uint32

func newMember(holder uint32, t tiers) member { return member(holder)<<numTiers | member(t) }
func (m member) holder() uint32               { return uint32(m >> numTiers) }
func (m member) tiers() tiers                 { return tiers(m) & allTiers }

// holders is who holds a block: 0 for nobody, a member where it is one, and a set's
// number with setBit where they are several. Equal holders have equal numbers, which
// is how a prefix that many share is matched a block after the other without a look
// at each of them.
type holders uint64

const setBit holders = 1 << 63

// sets are the sets of several holders that blocks have, each kept once.
type sets struct {
	seed  maphash.Seed
	all   []holderSet
	free  []uint32 // numbers of sets that no block has
	known map[uint64]uint32
	room  []member
	one   [1]member
}

type holderSet struct {
	members []member // ascending, each holder once
	blocks  int      // that have it
	hash    uint64
}

func newSets() *sets {
	return &sets{seed: maphash.MakeSeed(), known: make(map[uint64]uint32)}
}

// members lists holders, ascending, into room where they are one. They are to be
// read, until the next change.
func (s *sets) members(h holders, room *[1]member) []member {
	switch {
	case h == 0:
		return nil
	case h&setBit == 0:
		room[0] = member(h)
		return room[:]
	}
	return s.all[uint32(h)].members
}

// change adds tiers of a holder, and takes others from it. The block's holders
// become what is returned, and those given are no longer its.
func (s *sets) change(h holders, holder uint32, add, remove tiers) holders {
	s.room = append(s.room[:0], s.members(h, &s.one)...)
	now := s.room
	i, found := slices.BinarySearchFunc(now, holder, func(m member, holder uint32) int {
		return int(m.holder()) - int(holder)
	})
	var t tiers
	if found {
		t = now[i].tiers()
	}
	switch t = t&^remove | add; {
	case found && t != 0:
		now[i] = newMember(holder, t)
	case found:
		now = slices.Delete(now, i, i+1)
	case t != 0:
		now = slices.Insert(now, i, newMember(holder, t))
	}
	s.room = now
	out := s.take(now)
	s.drop(h)
	return out
}

// take returns the holders that these members are, for one more block.
func (s *sets) take(members []member) holders {
	switch len(members) {
	case 0:
		return 0
	case 1:
		return holders(members[0])
	}
	h := maphash.Bytes(s.seed, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(members))), 4*len(members)))
	for {
		id, ok := s.known[h]
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
	s.known[h] = id
	return setBit | holders(id)
}

// drop takes a block from holders.
func (s *sets) drop(h holders) {
	if h&setBit == 0 {
		return
	}
	id := uint32(h)
	set := &s.all[id]
	if set.blocks--; set.blocks > 0 {
		return
	}
	delete(s.known, set.hash)
	*set = holderSet{}
	s.free = append(s.free, id)
}
