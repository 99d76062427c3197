package client

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// tierIndex returns the place of a tier, or false for one that this version does
// not know, whose blocks are left out.
func tierIndex(t kvcastv1.Tier) (int, bool) {
	i := int(t) - 1
	return i, i >= 0 && i < numTiers
}

// entry applies an entry.
func (st *state) entry(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		st.event(e.GetWorker(), e.GetModel(), ev)
	}
}

// snapshotWorker applies a worker of a snapshot.
func (st *state) snapshotWorker(s *kvcastv1.SnapshotWorker) {
	w := st.add(s.GetWorker(), s.GetAdded())
	for _, n := range s.GetIncompleteRanks() {
		st.rank(w, n).incomplete = true
	}
}

// snapshotBlocks applies blocks of a snapshot. They come in no order of time, so the
// worker keeps the block size that the snapshot says it has.
func (st *state) snapshotBlocks(b *kvcastv1.SnapshotBlocks) {
	w := st.worker(b.GetWorker(), "")
	size := w.blockSize
	for _, ev := range b.GetEvents() {
		st.event(b.GetWorker(), "", ev)
	}
	if size != 0 {
		w.blockSize = size
	}
}

// event applies an event of a worker as the contract says.
func (st *state) event(name, model string, ev *kvcastv1.RouterEvent) {
	if len(st.retired) > maxRetired {
		st.sweep()
	}
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_WorkerAdded:
		st.add(name, kind.WorkerAdded)
		return
	case *kvcastv1.RouterEvent_WorkerRemoved:
		st.forget(name)
		return
	case nil:
		return // of a kind that this version does not know
	}
	w := st.worker(name, model)
	r := st.rank(w, ev.GetDpRank())
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		if tier, ok := tierIndex(ev.GetTier()); ok {
			st.stored(r, tier, kind.Stored)
		}
	case *kvcastv1.RouterEvent_Removed:
		if tier, ok := tierIndex(ev.GetTier()); ok {
			for _, h := range kind.Removed.GetBlockHashes() {
				st.remove(r, tier, h)
			}
		}
	case *kvcastv1.RouterEvent_Cleared:
		st.cleared(r, kind.Cleared)
	case *kvcastv1.RouterEvent_Gap:
		r.gaps, r.gap, r.incomplete = r.gaps+1, kind.Gap, true
	}
}

func (st *state) stored(r *rank, tier int, s *kvcastv1.Stored) {
	if size := s.GetBlockSize(); size != 0 {
		r.worker.blockSize = size // an engine may restart with another one
	}
	b := storing{parent: s.GetParentHash(), hasParent: s.ParentHash != nil}
	tokens := s.GetTokensHashes()
	for i, h := range s.GetBlockHashes() {
		b.hash = h
		if b.hashed = i < len(tokens); b.hashed {
			b.tokens = tokens[i]
		}
		st.store(r, tier, b)
		b.parent, b.hasParent = h, true
	}
	st.applied += len(s.GetBlockHashes())
}

// clearAtOnce is how many blocks are cleared one by one; another rank costs as much.
const clearAtOnce = 64

// clear empties a rank, and returns what stands in its place.
func (st *state) clear(r *rank) *rank {
	if r.table.n <= clearAtOnce {
		for tier := range numTiers {
			st.clearTier(r, tier)
		}
		r.reset()
		return r
	}
	st.retire(r)
	delete(r.worker.ranks, r.number)
	empty := st.rank(r.worker, r.number)
	empty.gaps, empty.gap = r.gaps, r.gap
	return empty
}

func (st *state) cleared(r *rank, c *kvcastv1.Cleared) {
	for _, t := range c.GetTiers() {
		if tier, ok := tierIndex(t); ok {
			st.clearTier(r, tier)
		}
	}
	if len(c.GetTiers()) == 0 {
		r = st.clear(r)
	}
	if c.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
		// The view is empty now; the engine is not.
		r.incomplete = true
	}
}
