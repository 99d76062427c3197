package client

import (
	"math/rand/v2"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// state is what all workers hold: for each dp rank a table by block hash, and one
// index by sequence hash over all of them, so that a prompt's block is looked up
// once for all workers.
type state struct {
	seed    uint64
	workers map[string]*worker
	held    *table   // sequence hash to holders
	sets    *sets    // of the holders
	ranks   []*rank  // by holder; nil for one that no longer is
	vacant  []uint32 // holders that may be given out
	// twins are blocks of one rank and tier with equal sequence hashes, beyond the
	// first: engines may tell blocks apart by more than their tokens.
	twins map[twin]int
	// retired are ranks that were emptied or have left, and are still in the index,
	// where nobody sees them.
	retired []*retired
	applied int // blocks since the last sweep
}

// worker is what is known of a worker.
type worker struct {
	name  string
	model string
	// added is nil where nothing has told that the worker was added.
	added     *kvcastv1.WorkerAdded
	blockSize uint32 // 0: not known yet
	ranks     map[uint32]*rank
}

type twin struct {
	seq    uint64
	holder uint32
	tier   uint8
}

type retired struct {
	rank      *rank
	seg, slot int // where the sweep is
}

// indexBits chooses how many segments the index has.
const indexBits = 10

func newState() *state {
	seed := rand.Uint64()
	return &state{
		seed: seed, workers: make(map[string]*worker), held: newTable(indexBits, seed, false), sets: newSets(),
		twins: make(map[twin]int),
	}
}

// index tells that a rank has a sequence hash in some more tiers.
func (st *state) index(seq uint64, r *rank, add tiers) {
	now, _ := st.held.get(seq)
	var room [1]member
	if both := tiersOf(st.sets.members(holders(now), &room), r.holder) & add; both != 0 {
		for tier := range uint8(numTiers) {
			if both&(1<<tier) != 0 {
				st.twins[twin{seq, r.holder, tier}]++
			}
		}
		if add &^= both; add == 0 {
			return
		}
	}
	st.held.put(seq, uint64(st.sets.change(holders(now), r.holder, add, 0)), 0)
}

// unindex tells that a rank no longer has a sequence hash in some tiers.
func (st *state) unindex(seq uint64, r *rank, remove tiers) {
	if len(st.twins) > 0 {
		for tier := range uint8(numTiers) {
			key := twin{seq, r.holder, tier}
			if n := st.twins[key]; n > 0 && remove&(1<<tier) != 0 {
				remove &^= 1 << tier
				if st.twins[key] = n - 1; n == 1 {
					delete(st.twins, key)
				}
			}
		}
		if remove == 0 {
			return
		}
	}
	now, ok := st.held.get(seq)
	if !ok {
		return
	}
	if now = uint64(st.sets.change(holders(now), r.holder, 0, remove)); now == 0 {
		st.held.remove(seq)
	} else {
		st.held.put(seq, now, 0)
	}
}

func tiersOf(members []member, holder uint32) tiers {
	i, ok := slices.BinarySearchFunc(members, holder, func(m member, holder uint32) int {
		return int(m.holder()) - int(holder)
	})
	if !ok {
		return 0
	}
	return members[i].tiers()
}

// worker returns a worker, which comes to be where it is not known.
func (st *state) worker(name, model string) *worker {
	w := st.workers[name]
	if w == nil {
		w = &worker{name: name, model: model, ranks: make(map[uint32]*rank)}
		st.workers[name] = w
	}
	return w
}

// add makes a worker known, of which nothing is held yet.
func (st *state) add(name string, added *kvcastv1.WorkerAdded) *worker {
	st.forget(name)
	w := st.worker(name, added.GetModel())
	w.added, w.blockSize = added, added.GetBlockSize()
	return w
}

// forget lets go of a worker and all it holds.
func (st *state) forget(name string) {
	w := st.workers[name]
	if w == nil {
		return
	}
	for _, r := range w.ranks {
		st.retire(r)
	}
	delete(st.workers, name)
}

// rank returns a dp rank of a worker, which comes to be where it is not known.
func (st *state) rank(w *worker, number uint32) *rank {
	r := w.ranks[number]
	if r == nil {
		var holder uint32
		if n := len(st.vacant); n > 0 {
			holder, st.vacant = st.vacant[n-1], st.vacant[:n-1]
		} else {
			holder = uint32(len(st.ranks))
			st.ranks = append(st.ranks, nil)
		}
		r = newRank(w, number, holder, st.seed)
		w.ranks[number], st.ranks[holder] = r, r
	}
	return r
}

// retire takes a rank out of sight, at once however much it holds.
func (st *state) retire(r *rank) {
	st.ranks[r.holder] = nil
	st.retired = append(st.retired, &retired{rank: r})
}

// maxRetired is how many retired ranks there may be before an entry sees to them within:
// it may retire any number.
const maxRetired = 32

// minSweep is how many blocks are swept at a time, at least.
const minSweep = 1024

// sweep takes blocks of retired ranks out of the index, more of them than were
// stored since the last time.
func (st *state) sweep() {
	left := minSweep + 2*st.applied
	st.applied = 0
	for len(st.retired) > 0 && left > 0 {
		g := st.retired[0]
		if left = g.sweep(st, left); left > 0 {
			st.vacant = append(st.vacant, g.rank.holder)
			st.retired[0] = nil
			st.retired = st.retired[1:]
		}
	}
}

// sweep looks at so many places at most, and returns how many less it were where it
// has come to the end.
func (g *retired) sweep(st *state, left int) int {
	t := g.rank.table
	drop := func(val uint64, tag uint8) {
		if tag&(tagBare|tagWaiting) == 0 {
			st.unindex(val, g.rank, tiers(tag)&allTiers)
		}
	}
	if t.hasZero {
		drop(t.zero.val, t.zeroTag)
		t.remove(0)
	}
	for ; g.seg < len(t.segments); g.seg, g.slot = g.seg+1, 0 {
		s := &t.segments[g.seg]
		for ; g.slot < len(s.slots); g.slot++ {
			if left == 0 {
				return 0
			}
			left--
			if o := s.slots[g.slot]; o.key != 0 {
				drop(o.val, s.tags[g.slot])
			}
		}
	}
	return max(left, 1)
}
