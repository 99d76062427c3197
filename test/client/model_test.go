package client_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// model is a simple reference implementation of View: the checker's view, and the sequence hashes of its blocks. It
// matches by reading every block of every rank.
type model struct {
	view  *checker.View
	known map[place]map[uint64]*block // by block hash
}

type place struct {
	worker string
	rank   uint32
}

// block is a block's sequence hash, or what is needed to compute it.
type block struct {
	seq            uint64
	hasSeq         bool
	tokens, parent uint64
	orphan         bool // tokens and parent are set; the parent's sequence hash is unknown
}

func newModel() *model {
	return &model{view: checker.NewView(), known: make(map[place]map[uint64]*block)}
}

func (m *model) apply(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		m.view.ApplyEvent(e.GetWorker(), ev)
		p := place{e.GetWorker(), ev.GetDpRank()}
		if ev.GetWorkerAdded() != nil || ev.GetWorkerRemoved() != nil {
			maps.DeleteFunc(m.known, func(q place, _ map[uint64]*block) bool { return q.worker == p.worker })
			continue
		}
		if s := ev.GetStored(); s != nil {
			m.store(p, ev.GetTier(), s)
		}
		// Remove blocks that are in no tier.
		held := m.blocks(p)
		maps.DeleteFunc(m.known[p], func(h uint64, _ *block) bool { return !held[h] })
	}
}

func (m *model) store(p place, tier kvcastv1.Tier, s *kvcastv1.Stored) {
	known := m.known[p]
	if known == nil {
		known = make(map[uint64]*block)
		m.known[p] = known
	}
	parent, root := s.GetParentHash(), s.ParentHash == nil
	for i, h := range s.GetBlockHashes() {
		k := known[h]
		if k == nil {
			k = new(block)
			known[h] = k
		}
		_, isHeld := m.view.Blocks(p.worker, p.rank, kvcastv1.Tier_TIER_DEVICE)[h]
		isCopy := tier != kvcastv1.Tier_TIER_DEVICE && (isHeld || k.hasSeq || k.orphan)
		if len(s.GetTokensHashes()) > 0 && !isCopy {
			tokens := s.GetTokensHashes()[i]
			parentBlock := known[parent]
			switch {
			case root:
				*k = block{hasSeq: true, seq: tokens}
			case parentBlock != nil && parentBlock.hasSeq:
				*k = block{hasSeq: true, seq: kvblock.SequenceHash(parentBlock.seq, tokens)}
			case !k.hasSeq:
				*k = block{orphan: true, tokens: tokens, parent: parent}
			}
		}
		m.adopt(known)
		parent, root = h, false
	}
}

// adopt computes the sequence hashes of orphans whose parent has a sequence hash.
func (m *model) adopt(known map[uint64]*block) {
	for again := true; again; {
		again = false
		for _, k := range known {
			if parentBlock := known[k.parent]; k.orphan && parentBlock != nil && parentBlock.hasSeq {
				*k = block{hasSeq: true, seq: kvblock.SequenceHash(parentBlock.seq, k.tokens)}
				again = true
			}
		}
	}
}

func (m *model) blocks(p place) map[uint64]bool {
	held := make(map[uint64]bool)
	for tier := range kvcastv1.Tier_name {
		for h := range m.view.Blocks(p.worker, p.rank, kvcastv1.Tier(tier)) {
			held[h] = true
		}
	}
	return held
}

// match returns the longest prefixes, in the order of View.Match.
func (m *model) match(hashes []uint64) []client.Match {
	var out []client.Match
	for p, known := range m.known {
		tiers := map[kvcastv1.Tier]map[uint64]bool{0: {}} // sequence hashes; 0 is any
		for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
			tiers[tier] = make(map[uint64]bool)
			for h := range m.view.Blocks(p.worker, p.rank, tier) {
				if k := known[h]; k != nil && k.hasSeq {
					tiers[tier][k.seq] = true
					tiers[0][k.seq] = true
				}
			}
		}
		found := client.Match{Worker: p.worker, Rank: p.rank, Trust: kvcastv1.Trust_TRUST_EXACT}
		if m.view.Incomplete(p.worker, p.rank) {
			found.Trust = kvcastv1.Trust_TRUST_DEGRADED
		}
		for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
			found.TierTrust[tier] = kvcastv1.Trust_TRUST_EXACT
			if m.view.IncompleteIn(p.worker, p.rank, tier) {
				found.TierTrust[tier] = kvcastv1.Trust_TRUST_DEGRADED
			}
		}
		found.Blocks = prefix(tiers[0], hashes)
		for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
			found.TierBlocks[tier] = prefix(tiers[tier], hashes)
		}
		if found.Blocks > 0 {
			out = append(out, found)
		}
	}
	slices.SortFunc(out, func(a, b client.Match) int {
		return cmp.Or(b.Blocks-a.Blocks, b.TierBlocks[1]-a.TierBlocks[1], cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	return out
}

// inAllTiers returns the trust of each tier if it is the same.
func inAllTiers(t kvcastv1.Trust) [kvcastv1.Tier_TIER_EXTERNAL + 1]kvcastv1.Trust {
	return [...]kvcastv1.Trust{0, t, t, t, t}
}

func prefix(held map[uint64]bool, hashes []uint64) int {
	seq := uint64(0)
	for i, tokens := range hashes {
		if seq = kvblock.SequenceHash(seq, tokens); i == 0 {
			seq = tokens
		}
		if !held[seq] {
			return i
		}
	}
	return len(hashes)
}

// difference returns an error that describes how a View differs from the model; nil: it does not.
func (m *model) difference(v *client.View) error {
	var names []string
	for _, w := range v.Workers() {
		names = append(names, w.Name)
		for _, r := range w.Ranks {
			if got, want := r.Incomplete, m.view.Incomplete(w.Name, r.Rank); got != want {
				return fmt.Errorf("%s, rank %d: incomplete is %t, want %t", w.Name, r.Rank, got, want)
			}
			if got, want := r.Gaps, len(m.view.Gaps(w.Name, r.Rank)); got < uint64(want) { // Cleared events count too
				return fmt.Errorf("%s, rank %d: %d gaps, want at least %d", w.Name, r.Rank, got, want)
			}
			for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
				want := client.BlocksDigest{
					Blocks: uint64(m.view.Count(w.Name, r.Rank, tier)), XOR: m.view.Digest(w.Name, r.Rank, tier),
				}
				if got := r.Blocks[tier]; got != want {
					return fmt.Errorf("%s, rank %d, %v: %+v, want %+v", w.Name, r.Rank, tier, got, want)
				}
			}
			for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
				for h := range m.view.Blocks(w.Name, r.Rank, tier) {
					if !slices.Contains(v.Holds(w.Name, r.Rank, h), tier) {
						return fmt.Errorf("%s, rank %d: block %d is not in %v", w.Name, r.Rank, h, tier)
					}
				}
			}
		}
		for _, rank := range m.view.Ranks(w.Name) {
			if !slices.ContainsFunc(w.Ranks, func(r client.Rank) bool { return r.Rank == rank }) {
				return fmt.Errorf("%s: no rank %d", w.Name, rank)
			}
		}
	}
	if want := m.view.Workers(); !slices.Equal(names, want) {
		return fmt.Errorf("workers %v, want %v", names, want)
	}
	return nil
}
