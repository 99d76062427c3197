package index

import (
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// learned are the engine's hashes of the main group's blocks, by the place of their content in the tree. Other groups hold blocks under
// the same hashes: so the prefixes that they hold are found also for prompts whose hashes kvcast cannot compute. The value is 0 where two
// hashes have the same content, so that it is not known which one the engine would use.
type learned struct {
	// applies reports whether the hashes of the main group's blocks are all that the engine's rule asks for.
	applies bool
	hashes  hashtable.Table[uint64]
}

// learnsNames reports whether the rule of a rank asks only for prefixes that end with a block of the main group. Where the hash unit is
// not known, Mamba groups may have states within a block.
func (a *attention) learnsNames() bool {
	if a.rule == nil || a.main < 0 || a.rule.Unit() != a.mainBlock {
		return false
	}
	for _, g := range a.described.GetGroups() {
		if hybrid.Kind(g.GetKind()) == hybrid.Mamba && a.described.GetUnit() == 0 {
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
			x.learnAgain(r)
		}
	}
}

// forgetLearned forgets the names of a rank, for which none are learned any more.
func (x *Index) forgetLearned(r *rank) {
	if r.attention != nil && r.attention.learned.applies {
		r.attention.learned = learned{}
		x.learners--
	}
}

// learnAgain learns the names of all blocks of a rank.
func (x *Index) learnAgain(r *rank) {
	names := &r.attention.learned
	names.hashes = hashtable.New[uint64]()
	if r.heldBlocks() == 0 {
		return
	}
	var blocks []radix.Block
	for from, more := uint64(0), true; more; more = from != 0 {
		blocks, from = x.blocks.Scan(r.blocks, from, blocks[:0])
		for i := range blocks {
			r.learn(blocks[i].Hash)
		}
	}
}

// learnStored learns the names of blocks that were stored.
func (x *Index) learnStored(r *rank, hashes []uint64) {
	if r.attention == nil || !r.attention.learned.applies {
		return
	}
	for _, hash := range hashes {
		r.learn(hash)
	}
	// Names of blocks that got another place are left.
	if held := r.heldBlocks(); r.attention.learned.hashes.Len() > int(held)*3/2+1024 {
		x.learnAgain(r)
	}
}

// heldBlocks returns the number of blocks of the main group, those in several tiers counted as many times.
func (r *rank) heldBlocks() (n uint64) {
	for tier := range NumTiers {
		n += r.digest(tier).Blocks
	}
	return n
}

// nameAt returns the engine's hash of the content with a place, if it is known.
func (r *rank) nameAt(place uint64) (hash uint64, ok bool) {
	if hash, ok = r.attention.learned.hashes.Get(place); !ok || hash == 0 {
		return 0, false
	}
	at, ok := r.blocks.Place(hash)
	return hash, ok && at == place
}

// learn learns the name of a block, if its place is known.
func (r *rank) learn(hash uint64) {
	place, ok := r.blocks.Place(hash)
	if !ok {
		return
	}
	s, existed := r.attention.learned.hashes.Put(place)
	if existed && s.Value != hash {
		if was, ok := r.blocks.Place(s.Value); s.Value == 0 || ok && was == place {
			hash = 0
		}
	}
	s.Value = hash
}

// unlearn forgets the names of blocks that are about to be removed from a tier, unless another tier has them.
func (r *rank) unlearn(tier int, hashes []uint64) {
	if r.attention == nil || !r.attention.learned.applies {
		return
	}
	names := &r.attention.learned.hashes
	for _, hash := range hashes {
		if r.blocks.Tiers(hash) != 1<<tier {
			continue
		}
		place, ok := r.blocks.Place(hash)
		if !ok {
			continue
		}
		if s := names.Find(place); s != nil && s.Value == hash {
			names.Delete(s)
		}
	}
}

// unlearnCleared forgets the names of blocks that were cleared.
func (x *Index) unlearnCleared(r *rank) {
	if r.attention != nil && r.attention.learned.applies {
		x.learnAgain(r)
	}
}
