package client_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// model is a View without an index: the checker's view, and what is known of sequence hashes.
// It matches by looking at every block of every rank.
type model struct {
	view  *checker.View
	known map[place]map[uint64]*knowledge
}

type place struct {
	worker string
	rank   uint32
}

// knowledge is what is known of a block.
type knowledge struct {
	seq            uint64
	named          bool
	tokens, parent uint64
	waits          bool
}

func newModel() *model {
	return &model{view: checker.NewView(), known: make(map[place]map[uint64]*knowledge)}
}

func (m *model) apply(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		m.view.ApplyEvent(e.GetWorker(), ev)
		p := place{e.GetWorker(), ev.GetDpRank()}
		if ev.GetWorkerAdded() != nil || ev.GetWorkerRemoved() != nil {
			maps.DeleteFunc(m.known, func(q place, _ map[uint64]*knowledge) bool { return q.worker == p.worker })
			continue
		}
		if s := ev.GetStored(); s != nil {
			m.learn(p, s)
		}
		// Blocks without a tier are dropped.
		held := m.held(p)
		maps.DeleteFunc(m.known[p], func(h uint64, _ *knowledge) bool { return !held[h] })
	}
}

func (m *model) learn(p place, s *kvcastv1.Stored) {
	known := m.known[p]
	if known == nil {
		known = make(map[uint64]*knowledge)
		m.known[p] = known
	}
	parent, root := s.GetParentHash(), s.ParentHash == nil
	for i, h := range s.GetBlockHashes() {
		k := known[h]
		if k == nil {
			k = new(knowledge)
			known[h] = k
		}
		if len(s.GetTokensHashes()) > 0 {
			tokens := s.GetTokensHashes()[i]
			over := known[parent]
			switch {
			case root:
				*k = knowledge{named: true, seq: tokens}
			case over != nil && over.named:
				*k = knowledge{named: true, seq: wire.SequenceHash(over.seq, tokens)}
			case !k.named:
				*k = knowledge{waits: true, tokens: tokens, parent: parent}
			}
		}
		m.settle(known)
		parent, root = h, false
	}
}

// settle computes the sequence hashes of blocks whose parent has one.
func (m *model) settle(known map[uint64]*knowledge) {
	for again := true; again; {
		again = false
		for _, k := range known {
			if over := known[k.parent]; k.waits && over != nil && over.named {
				*k = knowledge{named: true, seq: wire.SequenceHash(over.seq, k.tokens)}
				again = true
			}
		}
	}
}

func (m *model) held(p place) map[uint64]bool {
	held := make(map[uint64]bool)
	for tier := range kvcastv1.Tier_name {
		for h := range m.view.Blocks(p.worker, p.rank, kvcastv1.Tier(tier)) {
			held[h] = true
		}
	}
	return held
}

// match returns the longest prefixes.
func (m *model) match(hashes []uint64) []client.Match {
	var out []client.Match
	for p, known := range m.known {
		tiers := map[kvcastv1.Tier]map[uint64]bool{0: {}} // sequence hashes; 0 is any
		for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
			tiers[tier] = make(map[uint64]bool)
			for h := range m.view.Blocks(p.worker, p.rank, tier) {
				if k := known[h]; k != nil && k.named {
					tiers[tier][k.seq] = true
					tiers[0][k.seq] = true
				}
			}
		}
		found := client.Match{Worker: p.worker, Rank: p.rank, Incomplete: m.view.Incomplete(p.worker, p.rank)}
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

func prefix(held map[uint64]bool, hashes []uint64) int {
	seq := uint64(0)
	for i, tokens := range hashes {
		if seq = wire.SequenceHash(seq, tokens); i == 0 {
			seq = tokens
		}
		if !held[seq] {
			return i
		}
	}
	return len(hashes)
}

// difference describes where a View differs from the model.
func (m *model) difference(v *client.View) error {
	var names []string
	for _, w := range v.Workers() {
		names = append(names, w.Name)
		for _, r := range w.Ranks {
			if got, want := r.Incomplete, m.view.Incomplete(w.Name, r.Rank); got != want {
				return fmt.Errorf("%s, rank %d: incomplete is %t, want %t", w.Name, r.Rank, got, want)
			}
			if got, want := r.Gaps, len(m.view.Gaps(w.Name, r.Rank)); got != uint64(want) {
				return fmt.Errorf("%s, rank %d: %d gaps, want %d", w.Name, r.Rank, got, want)
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
