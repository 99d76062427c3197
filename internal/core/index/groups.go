package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Tiers of attention groups: kvcast follows other groups than the main group in device and host memory.
const (
	deviceTier = iota
	hostTier
	numGroupTiers
)

// attention is what is known of the attention groups of a dp rank.
type attention struct {
	// described is the last Groups that holds; nil: blocks came before it, from the middle of a stream.
	described *kvcastv1.Groups
	// rule is the engine's rule; nil: it cannot be applied.
	rule *hybrid.Rule
	// hashing is how the engine computes hashes; nil: that is unknown.
	hashing *hashing
	learned learned
	// main is the index of the main group; -1: there is none. mainBlock is the number of tokens in its blocks.
	main, mainBlock int
	// held are the groups that hold a block, by hash, in each tier: bit n is group n. They do not include whole blocks of the
	// main group.
	held [numGroupTiers]hashtable.Table[uint64]
	// digests are those of held.
	digests [numGroupTiers]Digest
}

// withAttention returns the attention groups of a rank, which it adds if there are none.
func (r *rank) withAttention() *attention {
	if r.attention == nil {
		r.attention = &attention{main: -1}
		for tier := range r.attention.held {
			r.attention.held[tier] = hashtable.New[uint64]()
		}
	}
	return r.attention
}

// groups returns the groups that are described.
func (r *rank) groups() *kvcastv1.Groups {
	if r.attention == nil {
		return nil
	}
	return r.attention.described
}

// followed reports whether the engine's rule can be applied: to prompts given by token ids, or also to others.
func (r *rank) followed() bool {
	return r.attention != nil && (r.attention.hashing != nil || r.attention.learned.applies)
}

// setGroups applies a Groups event.
func (x *Index) setGroups(r *rank, g *kvcastv1.Groups) {
	x.dropHashing(r)
	a := r.withAttention()
	a.described, a.rule, a.main, a.mainBlock = g, nil, -1, 0
	var groups []hybrid.Group
	for _, d := range g.GetGroups() {
		groups = append(groups, hybrid.Group{
			Index: int(d.GetIndex()), Kind: hybrid.Kind(d.GetKind()), BlockSize: int(d.GetBlockSize()), Window: int(d.GetWindow()),
			Chunk: int(d.GetChunk()), Drops: d.GetDrops(),
		})
		if d.GetMain() {
			a.main, a.mainBlock = int(d.GetIndex()), int(d.GetBlockSize())
		}
	}
	if w := r.worker; a.main < 0 && w.blockSize == 0 { // no Stored tells it
		for _, g := range groups {
			if g.BlockSize > int(w.blockSize) {
				x.setBlockSize(w, uint32(g.BlockSize))
			}
		}
	}
	if rule, err := hybrid.New(groups, int(g.GetUnit())); err == nil && g.GetMissing() == "" {
		if x.lastRule == nil || !x.lastRule.Equal(&rule) {
			x.lastRule = &rule
		}
		a.rule = x.lastRule
	}
	x.models[r.worker.model].addHashing(r, g)
	x.setLearned(r)
}

// clearGroups removes the blocks of all attention groups but the main group from some tiers; from all if none is named.
func (r *rank) clearGroups(tiers []kvcastv1.Tier) {
	if r.attention == nil {
		return
	}
	for tier := range r.attention.held {
		if len(tiers) == 0 || slices.Contains(tiers, kvcastv1.Tier(tier+1)) {
			r.attention.held[tier] = hashtable.New[uint64]()
			r.attention.digests[tier] = Digest{}
			r.attention.learned.clearTier(tier)
		}
	}
}

// forgetGroups forgets the attention groups of a rank whose engine restarted.
func (x *Index) forgetGroups(r *rank) {
	x.dropHashing(r)
	x.forgetLearned(r)
	r.attention = nil
}

// holdGroup changes whether an attention group holds blocks.
func (r *rank) holdGroup(tier int, group uint64, hashes []uint64, holds bool) {
	if tier >= numGroupTiers || group >= hybrid.MaxGroups {
		return
	}
	a := r.withAttention()
	t, d, bit := &a.held[tier], &a.digests[tier], uint64(1)<<group
	t.Prefetch(hashes)
	for _, hash := range hashes {
		if holds {
			b, _ := t.Put(hash)
			if b.Value&bit != 0 {
				continue
			}
			b.Value |= bit
			d.Blocks++
		} else {
			b := t.Find(hash)
			if b == nil || b.Value&bit == 0 {
				continue
			}
			if b.Value &^= bit; b.Value == 0 {
				t.Delete(b)
			}
			d.Blocks--
		}
		d.XOR ^= kvblock.GroupDigest(group, hash)
	}
}

// groupEncoded applies an encoded GroupStored or GroupRemoved.
func (x *Index) groupEncoded(r *rank, tier int, b []byte, holds bool) error {
	d := &x.decoder
	var group uint64
	var err error
	if group, d.blocks, err = encode.GroupBlocks(b, d.blocks[:0]); err != nil {
		return err
	}
	x.applyGroup(r, tier, group, d.blocks, holds)
	d.reset()
	return nil
}

// applyGroup applies a GroupStored, or a GroupRemoved.
func (x *Index) applyGroup(r *rank, tier int, group uint64, hashes []uint64, holds bool) {
	if holds {
		r.usedTiers |= 1 << tier
	} else {
		r.removed = x.seq + 1
	}
	r.holdGroup(tier, group, hashes, holds)
	x.learnAll(r, hashes)
}
