package radix

import (
	"github.com/kvcast/kvcast/internal/core/hashtable"
)

const (
	// minTokens is the minimum capacity of a new run.
	minTokens = 4
	// chunkRuns is the number of runs that are allocated together.
	chunkRuns = 64
)

// tree is a compressed radix tree: a forest of runs, one root for each model. A run is never split: where it holds a
// prefix of another sequence of blocks, the rest of that sequence is a run of its own, which follows a block within.
// Runs have numbers from 1, so that the tables that refer to them have no pointers for the garbage collector.
type tree struct {
	// chunks has runs by number. With pointers to arrays, an index expression would load an array's first element too, to check
	// the pointer: a cache miss.
	chunks [][]run
	runs   uint32   // numbers that are or were in use, including 0
	free   []uint32 // unused numbers below runs
	// byHead finds the run that follows a block and begins with some tokens hash.
	byHead hashtable.Index
	// headMask is the bits of the keys in use; all, except in tests of collisions.
	headMask uint64
	limits   limits
	holdings []holding // reused by run.update
	// unheld has the numbers of the unheld runs, oldest first, and of runs that were unheld.
	unheld                   []uint32
	unheldRuns, detachedRuns int // numbers of such runs
	retained                 retained
}

func newTree() tree {
	t := tree{byHead: hashtable.NewIndex(), headMask: ^uint64(0), limits: defaults}
	t.add() // 0 is no run
	return t
}

// run returns a run by its number.
func (t *tree) run(id uint32) *run { return &t.chunks[id/chunkRuns][id%chunkRuns] }

// headHash returns the hash of a run in byHead. Hash depends on a random seed, so that nobody can choose tokens whose hashes are equal.
func (t *tree) headHash(after position, tokens uint64) uint64 {
	return hashtable.Hash((hashtable.Hash(tokens) ^ (uint64(after.run)<<32 | uint64(after.offset))) & t.headMask)
}

// add adds a run without blocks and returns its number.
func (t *tree) add() (id uint32) {
	if n := len(t.free); n > 0 {
		id, t.free = t.free[n-1], t.free[:n-1]
	} else {
		if id = t.runs; id%chunkRuns == 0 {
			t.chunks = append(t.chunks, make([]run, chunkRuns))
		}
		t.runs++
	}
	r := t.run(id)
	r.holdings.few = r.first[:0]
	return id
}

func (t *tree) drop(id uint32) {
	r := t.run(id)
	if r.unheld {
		t.unheldRuns--
	}
	if r.detached {
		t.detachedRuns--
	}
	t.dropIDs(r)
	*r = run{queued: r.queued, generation: r.generation + 1}
	t.free = append(t.free, id)
}

// follow returns the block with a tokens hash that follows the block p.
func (t *tree) follow(p position, tokens uint64) (_ position, ok bool) {
	r := t.run(p.run)
	if next := p.offset + 1; next < uint32(len(r.tokens)) && r.tokens[next] == tokens {
		return position{p.run, next}, true
	}
	if _, ok := r.findBranch(p.offset); !ok {
		return position{}, false
	}
	id := t.byHead.Find(t.headHash(p, tokens), func(id uint32) bool {
		r := t.run(id)
		return r.after == p && r.tokens[0] == tokens
	})
	return position{id, 0}, id != 0
}

// place returns the block with the first of some tokens hashes that follows the block p, and creates it if it does not
// exist. The caller must call hold for the block, and is likely to call place for the other hashes.
func (t *tree) place(p position, tokens []uint64) position {
	if at, ok := t.follow(p, tokens[0]); ok {
		return at
	}
	r := t.run(p.run)
	if n := uint32(len(r.tokens)); p.offset+1 == n && n < t.limits.run {
		t.grow(r, 1, len(tokens))
		r.tokens = append(r.tokens, tokens[0])
		return position{p.run, n}
	}
	id := t.add()
	r = t.run(id)
	r.after = p
	r.tokens = append(make([]uint64, 0, max(minTokens, min(len(tokens), int(t.limits.run)))), tokens[0])
	t.run(p.run).addBranch(p.offset)
	t.byHead.Add(t.headHash(p, tokens[0]), id)
	return position{id, 0}
}

// grow makes room in a run for some tokens, unless there is. More are expected.
func (t *tree) grow(r *run, tokens, expected int) {
	if n := len(r.tokens); n+tokens > cap(r.tokens) {
		room := min(max(n/4+minTokens, expected), int(t.limits.run)-n)
		r.tokens = append(make([]uint64, 0, n+room), r.tokens...)
	}
}

// stretch is consecutive blocks of a run, from an offset up to another one, exclusive. The zero value has none.
type stretch struct{ run, from, to uint32 }

func (p position) stretch() stretch { return stretch{p.run, p.offset, p.offset + 1} }

// extend adds a stretch, if it is adjacent or the first.
func (s *stretch) extend(o stretch) (ok bool) {
	switch {
	case s.from == s.to:
		*s = o
	case o.run == s.run && o.from == s.to:
		s.to = o.to
	case o.run == s.run && o.to == s.from:
		s.from = o.from
	default:
		return false
	}
	return true
}

// hold adds a name of each block to a tier of a rank, given by its bit.
func (t *tree) hold(s stretch, rank uint32, tier uint8) {
	if s.from == s.to {
		return
	}
	r := t.run(s.run)
	if r.unheld {
		r.unheld = false
		t.unheldRuns--
	}
	if !r.holdsAny(rank, s.from, s.to, tier) {
		r.hold(rank, s.from, s.to, tier, t)
		return
	}
	for offset := s.from; offset < s.to; offset++ {
		if r.tiers(rank, offset)&tier != 0 {
			r.addTwin(offset, rank, tier)
		} else {
			r.hold(rank, offset, offset+1, tier, t)
		}
	}
}

// release removes a name of each block from a tier of a rank, which must have one.
func (t *tree) release(s stretch, rank uint32, tier uint8) {
	if s.from == s.to {
		return
	}
	r := t.run(s.run)
	if len(r.twins()) == 0 {
		r.release(rank, s.from, s.to, tier, t)
	} else {
		for offset := s.from; offset < s.to; offset++ {
			if !r.removeTwin(offset, rank, tier) {
				r.release(rank, offset, offset+1, tier, t)
			}
		}
	}
	if int(s.to) == len(r.tokens) {
		t.trim(s.run)
	}
	t.noteUnheld(s.run)
}

// releaseRun removes all names in some tiers of a rank from a run. It does nothing if there are none, even if the run no longer exists.
func (t *tree) releaseRun(id, rank uint32, tiers uint8) {
	r := t.run(id)
	if !r.holdsAny(rank, 0, t.limits.run, tiers) {
		return
	}
	r.unplain(rank, t)
	r.update(rank, 0, uint32(len(r.tokens)), 0, tiers, t)
	r.settle(rank, t)
	r.removeTwins(rank, tiers)
	t.trim(id)
	t.noteUnheld(id)
}

// trim drops the blocks at the end of a run that are not needed. If none are left, it drops the run, and continues with the run before.
func (t *tree) trim(id uint32) {
	for {
		r := t.run(id)
		if r.detached && len(r.branches) == 0 {
			t.drop(id)
			return
		}
		needed := r.needed()
		if needed >= uint32(len(r.tokens)) { // greater for a root and a detached run
			return
		}
		if needed > 0 {
			r.truncate(needed, t)
			return
		}
		after := t.detach(id)
		t.drop(id)
		id = after
	}
}

// detach makes a run follow no block, and returns the run that it followed.
func (t *tree) detach(id uint32) (after uint32) {
	r := t.run(id)
	t.byHead.Remove(t.headHash(r.after, r.tokens[0]), id)
	t.run(r.after.run).removeBranch(r.after.offset)
	return r.after.run
}
