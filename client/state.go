package client

import (
	"github.com/kvcast/kvcast/internal/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// state is the blocks of all workers. Each dp rank has a table by block hash. One index by sequence hash has the
// blocks of all ranks, so that matching a prompt looks up each block once.
type state struct {
	workers     map[string]*worker
	index       hashtable.Table[uint64, struct{}] // holders, by sequence hash
	sets        *sets                             // sets of several holders in index
	ranks       []*rank                           // by holder; nil: unused or retired
	freeHolders []uint32                          // unused holders
	// duplicates counts the blocks of one rank and tier with equal sequence hashes, without the first block.
	// Engines may distinguish blocks by more than their tokens.
	duplicates map[duplicate]int
	// retired are removed ranks whose blocks are still in the index. Match ignores them.
	retired []*retiredRank
	stored  int // blocks stored since the last sweep
}

// worker is the state of a worker.
type worker struct {
	name      string
	model     string
	added     *kvcastv1.WorkerAdded // nil: not received
	blockSize uint32                // 0: unknown
	ranks     map[uint32]*rank
}

type duplicate struct {
	seq    uint64
	holder uint32
	tier   uint8
}

// retiredRank is a removed rank and the progress of the sweep of its table.
type retiredRank struct {
	rank  *rank
	from  uint64 // identifies the next segment to sweep, see hashtable.Table.SegmentAt
	slot  int    // next slot of the segment
	swept bool   // the sweep is complete
}

const (
	// maxSingleClears bounds the blocks that are removed one by one when a rank is cleared. A rank with more
	// blocks is replaced, which costs as much as some 64 removes.
	maxSingleClears = 64
	// maxRetired bounds the retired ranks: beyond it, each event sweeps. Otherwise only entries sweep, and one
	// entry could retire any number of ranks.
	maxRetired = 32
	// minSweep is the minimum number of slots that one sweep visits.
	minSweep = 1024
)

func newState() *state {
	return &state{
		workers: make(map[string]*worker), index: hashtable.New[uint64, struct{}](), sets: newSets(),
		duplicates: make(map[duplicate]int),
	}
}

func (st *state) applyEntry(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		st.applyEvent(e.GetWorker(), e.GetModel(), ev)
	}
}

func (st *state) applySnapshotWorker(s *kvcastv1.SnapshotWorker) {
	w := st.addWorker(s.GetWorker(), s.GetAdded())
	for _, n := range s.GetIncompleteRanks() {
		st.rank(w, n).incomplete = true
	}
}

// applySnapshotBlocks applies blocks of a snapshot. The worker keeps the block size of its SnapshotWorker, since
// the last block is not necessarily the newest.
func (st *state) applySnapshotBlocks(b *kvcastv1.SnapshotBlocks) {
	w := st.worker(b.GetWorker(), "")
	size := w.blockSize
	for _, ev := range b.GetEvents() {
		st.applyEvent(b.GetWorker(), "", ev)
	}
	if size != 0 {
		w.blockSize = size
	}
}

// applyEvent applies an event of a worker. It ignores events and tiers that this version does not know.
func (st *state) applyEvent(name, model string, ev *kvcastv1.RouterEvent) {
	if len(st.retired) > maxRetired {
		st.sweep()
	}
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_WorkerAdded:
		st.addWorker(name, kind.WorkerAdded)
		return
	case *kvcastv1.RouterEvent_WorkerRemoved:
		st.removeWorker(name)
		return
	case nil:
		return
	}
	r := st.rank(st.worker(name, model), ev.GetDpRank())
	tier, tierKnown := tierIndex(ev.GetTier())
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		if tierKnown {
			st.applyStored(r, tier, kind.Stored)
		}
	case *kvcastv1.RouterEvent_Removed:
		if tierKnown {
			for _, h := range kind.Removed.GetBlockHashes() {
				st.remove(r, tier, h)
			}
		}
	case *kvcastv1.RouterEvent_Cleared:
		st.applyCleared(r, kind.Cleared)
	case *kvcastv1.RouterEvent_Gap:
		r.gaps, r.lastGap, r.incomplete = r.gaps+1, kind.Gap, true
	}
}

// tierIndex returns the bit of a tier in tiers; ok is false if this version does not know the tier.
func tierIndex(t kvcastv1.Tier) (_ int, ok bool) {
	i := int(t) - 1
	return i, i >= 0 && i < numTiers
}

func (st *state) applyStored(r *rank, tier int, s *kvcastv1.Stored) {
	if size := s.GetBlockSize(); size != 0 {
		r.worker.blockSize = size // an engine may restart with another block size
	}
	b := storedBlock{parent: s.GetParentHash(), hasParent: s.ParentHash != nil}
	tokens := s.GetTokensHashes()
	for i, h := range s.GetBlockHashes() {
		b.hash = h
		if b.hasTokens = i < len(tokens); b.hasTokens {
			b.tokens = tokens[i]
		}
		st.store(r, tier, b)
		b.parent, b.hasParent = h, true
	}
	st.stored += len(s.GetBlockHashes())
}

func (st *state) applyCleared(r *rank, c *kvcastv1.Cleared) {
	for _, t := range c.GetTiers() {
		if tier, ok := tierIndex(t); ok {
			st.clearTier(r, tier)
		}
	}
	if len(c.GetTiers()) == 0 {
		r = st.clearRank(r)
	}
	if c.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
		r.incomplete = true // the engine may still hold blocks
	}
}

// clearRank removes all blocks of a rank, and returns the rank or its replacement.
func (st *state) clearRank(r *rank) *rank {
	if r.table.Len() <= maxSingleClears {
		for tier := range numTiers {
			st.clearTier(r, tier)
		}
		r.reset()
		return r
	}
	st.retire(r)
	delete(r.worker.ranks, r.number)
	empty := st.rank(r.worker, r.number)
	empty.gaps, empty.lastGap = r.gaps, r.lastGap
	return empty
}

// worker returns the worker with a name, and creates it if it does not exist.
func (st *state) worker(name, model string) *worker {
	w := st.workers[name]
	if w == nil {
		w = &worker{name: name, model: model, ranks: make(map[uint32]*rank)}
		st.workers[name] = w
	}
	return w
}

// addWorker adds a worker without blocks, or replaces the existing worker.
func (st *state) addWorker(name string, added *kvcastv1.WorkerAdded) *worker {
	st.removeWorker(name)
	w := st.worker(name, added.GetModel())
	w.added, w.blockSize = added, added.GetBlockSize()
	return w
}

func (st *state) removeWorker(name string) {
	if w := st.workers[name]; w != nil {
		for _, r := range w.ranks {
			st.retire(r)
		}
		delete(st.workers, name)
	}
}

// rank returns a dp rank of a worker, and creates it if it does not exist.
func (st *state) rank(w *worker, number uint32) *rank {
	r := w.ranks[number]
	if r == nil {
		var holder uint32
		if n := len(st.freeHolders); n > 0 {
			holder, st.freeHolders = st.freeHolders[n-1], st.freeHolders[:n-1]
		} else {
			holder = uint32(len(st.ranks))
			st.ranks = append(st.ranks, nil)
		}
		r = newRank(w, number, holder)
		w.ranks[number], st.ranks[holder] = r, r
	}
	return r
}

// addToIndex adds a sequence hash of a rank in some tiers.
func (st *state) addToIndex(seq uint64, r *rank, add tiers) {
	current, _, _ := st.index.Get(seq)
	var buf [1]member
	if both := tiersOf(st.sets.members(holders(current), &buf), r.holder) & add; both != 0 {
		for tier := range uint8(numTiers) {
			if both&(1<<tier) != 0 {
				st.duplicates[duplicate{seq, r.holder, tier}]++
			}
		}
		if add &^= both; add == 0 {
			return
		}
	}
	st.index.Set(seq, uint64(st.sets.change(holders(current), r.holder, add, 0)), struct{}{})
}

// removeFromIndex removes a sequence hash of a rank in some tiers.
func (st *state) removeFromIndex(seq uint64, r *rank, remove tiers) {
	if len(st.duplicates) > 0 {
		for tier := range uint8(numTiers) {
			key := duplicate{seq, r.holder, tier}
			if n := st.duplicates[key]; n > 0 && remove&(1<<tier) != 0 {
				remove &^= 1 << tier
				if st.duplicates[key] = n - 1; n == 1 {
					delete(st.duplicates, key)
				}
			}
		}
		if remove == 0 {
			return
		}
	}
	current, _, ok := st.index.Get(seq)
	if !ok {
		return
	}
	if current = uint64(st.sets.change(holders(current), r.holder, 0, remove)); current == 0 {
		st.index.Remove(seq)
	} else {
		st.index.Set(seq, current, struct{}{})
	}
}

// retire removes a rank from all matches at once. Later sweeps remove its blocks from the index.
func (st *state) retire(r *rank) {
	st.ranks[r.holder] = nil
	st.retired = append(st.retired, &retiredRank{rank: r})
}

// sweep removes blocks of retired ranks from the index. It visits twice as many slots as blocks were stored since
// the last sweep, so that retired blocks cannot accumulate.
func (st *state) sweep() {
	budget := minSweep + 2*st.stored
	st.stored = 0
	for len(st.retired) > 0 && budget > 0 {
		g := st.retired[0]
		if budget = g.sweep(st, budget); budget > 0 {
			st.freeHolders = append(st.freeHolders, g.rank.holder)
			st.retired[0] = nil
			st.retired = st.retired[1:]
		}
	}
}

// sweep visits up to budget slots. It returns the rest of the budget, which is positive exactly if the sweep of
// the rank is complete.
func (g *retiredRank) sweep(st *state, budget int) int {
	for !g.swept {
		s, next := g.rank.table.SegmentAt(g.from)
		for ; g.slot < len(s.Slots); g.slot++ {
			if budget == 0 {
				return 0
			}
			budget--
			if tag := s.Tags[g.slot]; s.Slots[g.slot].Used() && tag&(tagNoContent|tagOrphan) == 0 {
				st.removeFromIndex(s.Slots[g.slot].Value, g.rank, tiers(tag)&allTiers)
			}
		}
		g.from, g.slot, g.swept = next, 0, next == 0
	}
	return max(budget, 1)
}
