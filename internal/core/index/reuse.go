package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// reuse is how much of a prompt an engine with several attention groups can reuse, in tokens.
type reuse struct {
	known bool
	tiers [numGroupTiers]uint32 // of each tier alone
	total uint32                // of device memory, and what host memory adds to it
	// endedBy is the attention group that ends the prefix in each tier; hybrid.NoGroup if none does.
	endedBy [numGroupTiers]int8
	// continues reports whether a tier below host memory, of which other groups are not known, holds the main group's next block.
	continues bool
}

// isNothing reports whether a rank with several attention groups can reuse nothing, though its main group holds blocks.
func (u *reuse) isNothing(f *radix.Match) bool { return u.known && u.total == 0 && f.Blocks == 0 }

// walk sets the ends of a walk, which the main group alone has had, to what the engine can reuse. In lower tiers than host memory, they
// remain those of the main group where it has further blocks.
func (u *reuse) walk(ends *[NumTiers]int, blockSize uint32) {
	main := ends[hostTier]
	ends[deviceTier], ends[hostTier] = int(u.tiers[deviceTier]/blockSize), int(u.total/blockSize)
	for tier := numGroupTiers; tier < NumTiers; tier++ {
		if ends[tier] == main {
			ends[tier] = ends[hostTier]
		}
	}
}

// applyGroups applies the rules of engines with several attention groups to what the matcher has found for a prompt and a block size. It
// adds the ranks whose main group holds no block, or which have none.
func (m *Matches) applyGroups(x *Index, q *Query, l hashList) {
	m.reuses, m.last.rank = m.reuses[:0], nil
	all := m.namesOf(l.prompt)
	if len(all) == 0 && x.learners == 0 {
		return
	}
	for i := range m.matcher.Found {
		f := &m.matcher.Found[i]
		r := f.Rank.Owner.(*rank)
		u := m.applyRule(x, all, f, r, q, l)
		if m.reuses = append(m.reuses, u); u.known && i < len(m.matcher.Walks) {
			u.walk(&m.matcher.Walks[i].Ends, r.worker.blockSize)
		}
	}
	for _, h := range all {
		for _, r := range h.hashing.ranks {
			if m.matcher.Has(r.blocks) || !x.needsNames(r) || h.path != r.attention.pathOf(q.Prompts[l.prompt].LoRA) {
				continue
			}
			f := radix.Match{Rank: r.blocks}
			if u := m.applyRule(x, all, &f, r, q, l); u.total > 0 {
				m.matcher.Found, m.reuses = append(m.matcher.Found, f), append(m.reuses, u)
				if q.Walk {
					var w radix.Walk
					u.walk(&w.Ends, r.worker.blockSize)
					m.matcher.Walks = append(m.matcher.Walks, w)
				}
			}
		}
	}
}

// applyRule applies a rank's rule to a match, if the hashes of the prompt are known for its engine. all are those that were computed for
// the prompt.
func (m *Matches) applyRule(x *Index, all []names, f *radix.Match, r *rank, q *Query, l hashList) (u reuse) {
	p := &q.Prompts[l.prompt]
	if r.attention == nil || l.size != r.worker.blockSize && (l.size != 0 || len(p.TokenIDs) > 0) || q.Model != "" && q.Model != r.worker.model ||
		q.Worker != nil && !q.Worker(r.worker.name) {
		return reuse{}
	}
	needsNames := x.needsNames(r)
	if !needsNames && m.last.isOf(r, f) {
		u = m.last.reuse
	} else {
		computed, computable := r.attention.computed(all, p)
		if !needsNames || computed == nil && !computable {
			if n := m.namesFor(x, r, f, p, l); n != nil {
				u = m.reuse(r, n, &f.TierBlocks)
			}
		}
		if !u.known && computed != nil {
			u = m.reuse(r, computed, &f.TierBlocks)
		}
		m.lacksNames = m.lacksNames || !u.known && computed == nil && computable
	}
	if !u.known {
		return reuse{}
	}
	size := int(r.worker.blockSize)
	for tier, tokens := range u.tiers {
		if int(tokens) != f.TierBlocks[tier]*size { // most often equal, and a division takes time
			f.TierBlocks[tier] = int(tokens) / size
		}
	}
	switch {
	case u.continues:
		f.Blocks = max(f.Blocks, int(u.total)/size)
	case int(u.total) != f.Blocks*size:
		f.Blocks = int(u.total) / size
	}
	f.Blocks = max(f.Blocks, slices.Max(f.TierBlocks[:]))
	return u
}

// lastReuse is what the rule found last for a prompt and a block size, and what it follows from: a rank that holds the same can reuse the same.
type lastReuse struct {
	rank          *rank      // nil: nothing was found
	blocks, dense int        // of the prompt, that the main group holds in some tier, and in device memory
	words         []heldWord // at most maxHeldWords; one more: there were too many
	reuse         reuse
}

// maxHeldWords bounds the time of a comparison. Most answers follow from one word of each group.
const maxHeldWords = 64

// heldWord is what a group holds of some places of a word: held, of those in mask.
type heldWord struct{ key, mask, held uint64 }

// isComparable reports whether a rank can have the result of another one, or give it its own: what it can reuse depends only on what its
// groups hold in device memory, as it has learned it.
func (r *rank) isComparable() bool {
	return r.usedTiers == 1<<deviceTier && r.attention.learned.ambiguous.Len() == 0
}

// isOf reports whether what was found last also holds for a rank with a match of the main group.
func (u *lastReuse) isOf(r *rank, f *radix.Match) bool {
	if u.rank == nil || u.blocks != f.Blocks || u.dense != f.TierBlocks[deviceTier] || u.rank.worker.model != r.worker.model ||
		u.rank.worker.blockSize != r.worker.blockSize || !r.isComparable() {
		return false
	}
	a, b := u.rank.attention, r.attention
	if a.main != b.main || !a.rule.Equal(b.rule) {
		return false
	}
	for i := range u.words {
		w := &u.words[i]
		if word, _ := b.learned.words[deviceTier].Get(w.key); word&w.mask != w.held {
			return false
		}
	}
	return true
}

// holder implements hybrid.Holder for a prompt, a rank and a tier.
type holder struct {
	rank  *rank
	tier  int
	names *names
	// dense is the number of tokens that the main group holds from the first on.
	dense int
	// unknown reports whether it was asked for a prefix without a name, so that the answer is not known.
	unknown bool
	// last gets what a group holds; nil: that is not kept.
	last *lastReuse
}

func (h *holder) Run(group, from, step, n int) (run int, ok bool) {
	a := h.rank.attention
	if group == a.main && h.tier == deviceTier && step%a.mainBlock == 0 && from%a.mainBlock == 0 {
		return min(max((h.dense-from)/step, 0), n), true // without blocks that follow a missing one
	}
	return 0, false
}

func (h *holder) Held(group, from, step, n int) (held uint64) {
	a := h.rank.attention
	if group != a.main && step == h.names.unit && h.names.places != nil {
		return h.learned(uint64(group), from/step, n)
	}
	if run, ok := h.Run(group, from, step, n); ok {
		return 1<<run - 1
	}
	for i := range n {
		at := from + (i+1)*step
		switch {
		case group != a.main || at%a.mainBlock != 0:
			if h.holds(uint64(group), at) {
				held |= 1 << i
			}
		case at <= h.dense || h.tier == hostTier && h.holdsMain(at): // what host memory adds may begin within a prompt
			held |= 1 << i
		}
	}
	return held
}

// holds reports whether a group holds the prefix of a number of tokens.
func (h *holder) holds(group uint64, tokens int) bool {
	if h.names.places != nil {
		return h.learned(group, tokens/h.names.unit-1, 1) != 0
	}
	mask, _ := h.rank.attention.held[h.tier].Get(h.names.hashes[tokens/h.names.unit-1])
	return mask&(1<<group) != 0
}

// learned returns which of n blocks from one on a group holds, as bits.
func (h *holder) learned(group uint64, block, n int) (held uint64) {
	l, end := &h.rank.attention.learned, min(block+n, h.names.held/h.names.unit)
	h.unknown = h.unknown || end < block+n
	for first := block; block < end; {
		place, blocks := h.names.places.Place(h.rank.blocks, block)
		if blocks = min(blocks, end-block, wordBits-int(place%wordBits)); blocks == 0 || l.areAmbiguous(place, blocks) {
			h.unknown = true
			return held
		}
		bits := l.holds(h.tier, group, place, blocks)
		if h.last != nil && len(h.last.words) <= maxHeldWords {
			shift := place % wordBits
			h.last.words = append(h.last.words, heldWord{wordKey(place, group), (1<<blocks - 1) << shift, bits << shift})
		}
		held |= bits << (block - first)
		block += blocks
	}
	return held
}

// holdsMain reports whether the main group holds the block that ends with a number of tokens.
func (h *holder) holdsMain(tokens int) bool {
	n := h.names
	if n.places == nil {
		return h.rank.blocks.Tiers(n.hashes[tokens/n.unit-1])&(1<<h.tier) != 0
	}
	place, blocks := n.places.Place(h.rank.blocks, tokens/n.unit-1)
	return blocks > 0 && n.index.blocks.Holds(h.rank.blocks, place, h.tier)
}

// extend extends the blocks that the main group holds by those whose content is unknown.
func (h *holder) extend() {
	block, end := h.rank.attention.mainBlock, h.names.hashed
	if block == 0 {
		h.dense = 0
		return
	}
	if h.names.places != nil { // by content, only blocks whose content is known are found
		return
	}
	for h.dense+block <= end && h.holdsMain(h.dense+block) {
		h.dense += block
	}
}

// reuse returns how much of a prompt a rank can reuse. blocks are those that the main group holds in each tier.
func (m *Matches) reuse(r *rank, n *names, blocks *[NumTiers]int) (u reuse) {
	rule, keeps := r.attention.rule, n.places != nil && r.isComparable()
	if keeps {
		m.last = lastReuse{blocks: n.held / n.unit, dense: blocks[deviceTier], words: m.last.words[:0]}
	}
	u.known = true
	for tier := range numGroupTiers {
		u.endedBy[tier] = hybrid.NoGroup
		if r.usedTiers&(1<<tier) == 0 {
			continue
		}
		h := &m.holders[tier]
		*h = holder{rank: r, tier: tier, names: n, dense: blocks[tier] * r.attention.mainBlock}
		if h.extend(); keeps {
			h.last = &m.last
		}
		tokens, endedBy := rule.Longest(h, n.limit, n.hashed)
		u.tiers[tier], u.endedBy[tier] = uint32(tokens), int8(endedBy)
		if u.total = u.tiers[deviceTier]; tier == hostTier {
			u.total = uint32(rule.LongestWithHost(h, int(u.total), n.limit, n.hashed))
		}
		u.known = u.known && !h.unknown
	}
	for tier := numGroupTiers; tier < NumTiers; tier++ {
		h := holder{rank: r, tier: tier, names: n}
		next := (int(u.total)/max(1, r.attention.mainBlock) + 1) * r.attention.mainBlock
		u.continues = u.continues || r.usedTiers&(1<<tier) != 0 && 0 < next && next <= n.hashed && h.holdsMain(next)
	}
	if keeps && u.known && len(m.last.words) <= maxHeldWords {
		m.last.rank, m.last.reuse = r, u
	}
	return u
}
