package index

import (
	"github.com/kvcast/kvcast/internal/core/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// learned are the engine's hashes of prefixes, here called names, as far as they follow from events. A store of the main group tells the
// content of a block and its hash, and all attention groups hold a prefix under the same hash. With the names, kvcast finds what the groups
// hold of a prompt without computing the engine's hashes.
//
// Only prefixes that a group other than the main group holds have a name. If a place has none, no such group holds the prefix.
type learned struct {
	// applies reports whether all that the engine's rule asks for are prefixes that end with a block of the main group.
	applies bool
	// hashes are the names by the places of their content in the tree; 0: there are several.
	hashes hashtable.Table[uint64]
}

// learnsNames reports whether the rule of a rank asks only for prefixes that end with a block of the main group. Where the hash unit is
// not known, Mamba groups may have states within a block.
func (a *attention) learnsNames() bool {
	if a.rule == nil || a.main < 0 || a.rule.Unit() != a.mainBlock {
		return false
	}
	for _, g := range a.described.GetGroups() {
		if g.GetKind() == kvcastv1.AttentionGroup_KIND_MAMBA && a.described.GetUnit() == 0 {
			return false
		}
	}
	return true
}

// setLearned decides whether names are learned for a rank, whose groups were described, and learns those of the blocks that it holds.
func (x *Index) setLearned(r *rank) {
	a := r.attention
	if applies := a.learnsNames(); applies != a.learned.applies {
		x.forgetLearned(r)
		if a.learned.applies = applies; applies {
			x.learners++
			r.learnAgain()
		}
	}
}

// forgetLearned forgets the names of a rank, for which none are learned any more.
func (x *Index) forgetLearned(r *rank) {
	if r.learns() {
		r.attention.learned = learned{}
		x.learners--
	}
}

func (r *rank) learns() bool { return r.attention != nil && r.attention.learned.applies }

// learnAgain learns the names of all blocks of a rank.
func (r *rank) learnAgain() {
	a := r.attention
	a.learned.hashes = hashtable.New[uint64]()
	for tier := range a.held {
		for b := range a.held[tier].All() {
			r.learn(b.Key())
		}
	}
}

// learnAll learns the names of blocks that have got a place, or that another group than the main group has stored.
func (r *rank) learnAll(hashes []uint64) {
	if !r.learns() {
		return
	}
	for _, hash := range hashes {
		if r.attention.holdsAny(hash) {
			r.learn(hash)
		}
	}
	// Names of blocks that got another place are left.
	a := r.attention
	if held := a.held[deviceTier].Len() + a.held[hostTier].Len(); a.learned.hashes.Len() > 2*held+1024 {
		r.learnAgain()
	}
}

// holdsAny reports whether a group other than the main group holds a block.
func (a *attention) holdsAny(hash uint64) bool {
	for tier := range a.held {
		if _, ok := a.held[tier].Get(hash); ok {
			return true
		}
	}
	return false
}

// learn learns the name of a block that another group than the main group holds, if it has a place.
func (r *rank) learn(hash uint64) {
	place, ok := r.blocks.Place(hash)
	if !ok {
		return
	}
	s, existed := r.attention.learned.hashes.Put(place)
	if existed && s.Value != hash && (s.Value == 0 || r.isAt(s.Value, place)) {
		hash = 0
	}
	s.Value = hash
}

// isAt reports whether the main group holds a block, which has a place.
func (r *rank) isAt(hash, place uint64) bool {
	at, ok := r.blocks.Place(hash)
	return ok && at == place
}

// nameAt returns the name of the prefix with a place, which the main group holds: 0 if no other group holds it. ok is false if that is not
// known.
func (x *Index) nameAt(r *rank, place uint64) (hash uint64, ok bool) {
	hash, found := r.attention.learned.hashes.Get(place)
	switch {
	case found && hash == 0, x.blocks.HasTwin(r.blocks, place):
		return 0, false
	case found && r.isAt(hash, place):
		return hash, true
	default:
		return 0, true
	}
}
