package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// learned says which groups hold the blocks of the main group, by content. A store of the main group tells the content of a block and its
// hash, and all attention groups hold a prefix under the same hash. So kvcast finds what the groups hold of a prompt without computing
// the engine's hashes.
type learned struct {
	// applies reports whether all that the engine's rule asks for are prefixes that end with a block of the main group.
	applies bool
	// groups are the described groups other than the main group.
	groups []uint64
	// words have which blocks a group holds in each tier: one bit for each of 64 places in a row, see wordKey. A bit counts while the main group
	// holds the block with the place: it is set anew when the main group stores the block.
	words [numGroupTiers]hashtable.Table[uint64]
	// ambiguous are places for which the main group has had several hashes, of which a group has held some.
	ambiguous hashtable.Table[struct{}]
}

// wordBits is the number of places of a word.
const wordBits = 64

// wordKey returns the key of the word that has a place for a group, which is less than hybrid.MaxGroups, 64.
func wordKey(place, group uint64) uint64 { return place&^(wordBits-1) | group }

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

// setLearned decides whether a rank, whose groups were described, learns, and learns what groups hold of its blocks, if it has not yet.
func (x *Index) setLearned(r *rank) {
	a := r.attention
	if !a.learnsNames() {
		x.forgetLearned(r)
		return
	}
	var others []uint64
	for _, g := range a.described.GetGroups() {
		if !g.GetMain() {
			others = append(others, uint64(g.GetIndex()))
		}
	}
	if a.learned.applies && slices.Equal(a.learned.groups, others) {
		return
	}
	x.forgetLearned(r)
	a.learned.applies, a.learned.groups = true, others
	x.learners++
	x.learnAgain(r)
}

// forgetLearned forgets what a rank has learned, which learns no more.
func (x *Index) forgetLearned(r *rank) {
	if r.learns() {
		r.attention.learned = learned{}
		x.learners--
	}
}

func (r *rank) learns() bool { return r.attention != nil && r.attention.learned.applies }

// learnAgain learns what the groups of a rank hold.
func (x *Index) learnAgain(r *rank) {
	a := r.attention
	a.learned.ambiguous = hashtable.New[struct{}]()
	for tier := range a.held {
		a.learned.words[tier] = hashtable.New[uint64]()
	}
	for tier := range a.held {
		for b := range a.held[tier].All() {
			x.learn(r, b.Key())
		}
	}
}

// learnAll learns which groups hold blocks that have got a place, or that a group other than the main group has stored or removed.
func (x *Index) learnAll(r *rank, hashes []uint64) {
	if !r.learns() {
		return
	}
	for _, hash := range hashes {
		x.learn(r, hash)
	}
	// Words of blocks that lost their place are left.
	a, l := r.attention, &r.attention.learned
	held := a.held[deviceTier].Len() + a.held[hostTier].Len()
	if words := l.words[deviceTier].Len() + l.words[hostTier].Len() + l.ambiguous.Len(); words > 2*len(l.groups)*held+1024 {
		x.learnAgain(r)
	}
}

// learn learns which groups hold a block, if it has a place.
func (x *Index) learn(r *rank, hash uint64) {
	place, only, ok := x.blocks.PlaceOf(r.blocks, hash)
	if !ok {
		return
	}
	a, l := r.attention, &r.attention.learned
	held := false
	for tier := range a.held {
		mask, _ := a.held[tier].Get(hash)
		for _, group := range l.groups {
			holds := mask&(1<<group) != 0
			held = held || holds || !only && l.holds(tier, group, place, 1) != 0
			l.set(tier, group, place, holds)
		}
	}
	switch {
	case only && l.ambiguous.Len() > 0:
		if s := l.ambiguous.Find(place); s != nil {
			l.ambiguous.Delete(s)
		}
	case !only && held:
		l.ambiguous.Put(place)
	}
}

// clearTier forgets what groups hold in a tier that is cleared.
func (l *learned) clearTier(tier int) {
	if l.applies {
		l.words[tier] = hashtable.New[uint64]()
	}
}

// set sets whether a group holds the block with a place.
func (l *learned) set(tier int, group, place uint64, holds bool) {
	bit := uint64(1) << (place % wordBits)
	if holds {
		w, _ := l.words[tier].Put(wordKey(place, group))
		w.Value |= bit
	} else if w := l.words[tier].Find(wordKey(place, group)); w != nil {
		if w.Value &^= bit; w.Value == 0 {
			l.words[tier].Delete(w)
		}
	}
}

// holds returns which of n blocks a group holds, as bits. The blocks have a place and those after it, in one word.
func (l *learned) holds(tier int, group, place uint64, n int) uint64 {
	word, _ := l.words[tier].Get(wordKey(place, group))
	return word >> (place % wordBits) & (1<<n - 1)
}

// areAmbiguous reports whether any of n blocks is ambiguous. The blocks have a place and those after it.
func (l *learned) areAmbiguous(place uint64, n int) bool {
	if l.ambiguous.Len() == 0 {
		return false
	}
	for i := range uint64(n) {
		if l.ambiguous.Find(place+i) != nil {
			return true
		}
	}
	return false
}
