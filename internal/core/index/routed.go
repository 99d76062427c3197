package index

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/internal/core/index/expected"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// ExpectedLimits bounds the blocks that ranks are expected to store, some 50 bytes each: in all, of a rank, and by the notes of a caller.
var ExpectedLimits = expected.Limits{All: 1 << 18, Rank: 1 << 16, Caller: 3 << 16}

// expectations are the blocks that ranks are expected to store, since requests were routed to them. They are no part of the state that follows from
// entries. The lock is taken after that of the index, if that is taken.
type expectations struct {
	blocks atomic.Int64 // of set, which matches and stores need not read while there are none

	mu  sync.Mutex // guards all below
	set *expected.Set[*rank]
}

// change calls a function with the set, and counts its blocks.
func (e *expectations) change(do func(*expected.Set[*rank])) {
	e.mu.Lock()
	defer e.mu.Unlock()
	do(e.set) // may replace it
	e.blocks.Store(int64(e.set.Blocks()))
}

// drop ends what is expected of a rank.
func (e *expectations) drop(r *rank) {
	if e.blocks.Load() > 0 {
		e.change(func(s *expected.Set[*rank]) { s.Drop(r) })
	}
}

// stored ends what is expected of a rank up to blocks that it has stored.
func (e *expectations) stored(r *rank, tokensHashes []uint64) {
	if e.blocks.Load() > 0 && len(tokensHashes) > 0 {
		e.change(func(s *expected.Set[*rank]) { s.Stored(r, tokensHashes) })
	}
}

// startOf identifies the prompts of a model.
func startOf(model string) uint64 { return xxh3.HashString(model) }

// NoteRouted notes, for a caller, that a dp rank was sent a request with a prompt, so that it is expected to store the prompt's whole blocks from now
// until a time. It returns false, and notes nothing, if the rank or its block size is not known, the prompt has no whole block of that size, or is given by
// block hashes, or there would be more expected blocks than ExpectedLimits.
func (x *Index) NoteRouted(caller, worker string, number uint32, p *Prompt, now, until time.Time) bool {
	hashes := p.TokensHashes
	if len(p.TokenIDs) > 0 {
		size := x.blockSizeOf(worker)
		if size == 0 {
			return false
		}
		hashes = kvblock.AppendTokensHashes(nil, p.TokenIDs, int(size), kvblock.Seed(p.LoRA, p.Salt), p.Eagle, nil)
	}
	if len(hashes) == 0 {
		return false
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(worker, number)
	if r == nil || p.BlockSize != 0 && p.BlockSize != r.worker.blockSize {
		return false
	}
	noted := false
	x.expected.change(func(s *expected.Set[*rank]) {
		s.Advance(now)
		noted = s.Note(caller, r, startOf(r.worker.model), hashes, until)
	})
	return noted
}

func (x *Index) blockSizeOf(worker string) uint32 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if w := x.workers[worker]; w != nil {
		return w.blockSize
	}
	return 0
}

// ExpectedBlocks returns the number of blocks that ranks are expected to store, with those of different requests counted for each.
func (x *Index) ExpectedBlocks() int { return int(x.expected.blocks.Load()) }

// expect sets m.expected to how many first blocks of a list of hashes ranks are expected to have.
func (m *Matches) expect(x *Index, q *Query, l hashList, hashes []uint64) {
	clear(m.expected)
	if q.Now.IsZero() || x.expected.blocks.Load() == 0 || len(hashes) == 0 {
		return
	}
	if m.expected == nil {
		m.expected = make(map[*rank]int)
	}
	x.expected.change(func(s *expected.Set[*rank]) {
		s.Advance(q.Now)
		match := func(model string) {
			s.Match(startOf(model), hashes, func(r *rank, blocks int) {
				if q.selects(l, r) {
					m.expected[r] = blocks
				}
			})
		}
		if q.Model != "" {
			match(q.Model)
			return
		}
		for model := range x.models {
			match(model)
		}
	})
}
