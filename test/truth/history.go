package truth

import (
	"math/rand/v2"
	"slices"
	"sort"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// state numbers what an engine has cached: 0 is the empty cache of the first incarnation, and each batch and each restart
// begins the next.
type state uint64

// window is the states that an answer may show, from first to last.
type window struct{ first, last state }

// history is what an engine has cached in its last states. It is derived from the engine's events, before faults.
type history struct {
	pool   blockpool.Config
	keep   state // number of states to remember
	newest state
	times  []batchTime // ascending, of batches
	blocks map[uint64]*block
	stored ring // the last blocks of stores
	gone   ring // blocks that were removed
}

// batchTime is the time of the batch that began a state, in microseconds since the Unix epoch.
type batchTime struct {
	micros int64
	state  state
}

// block is a block that is cached, or was in a state that is remembered.
type block struct {
	parent    uint64
	hasParent bool
	tokens    []uint32
	copies    int
	changes   []state // that began with the block's arrival and departure, in turn
}

// ring is the newest of some blocks. With the pools of simulated engines, about half of those that were stored are evicted.
type ring struct {
	hashes [2048]uint64
	count  int // of all that were added
}

func (r *ring) add(hash uint64) {
	r.hashes[r.count%len(r.hashes)] = hash
	r.count++
}

// draw returns one of the blocks; false if there is none.
func (r *ring) draw(rng *rand.Rand) (uint64, bool) {
	if r.count == 0 {
		return 0, false
	}
	return r.hashes[(r.count-1-rng.IntN(min(r.count, len(r.hashes))))%len(r.hashes)], true
}

func newHistory(pool blockpool.Config, keep state) *history {
	return &history{pool: pool, keep: keep, blocks: make(map[uint64]*block)}
}

// apply begins a state.
func (h *history) apply(c simulator.Change) {
	h.newest++
	if c.Time.IsZero() {
		h.clear()
		return
	}
	h.times = append(h.times, batchTime{c.Time.UnixMicro(), h.newest})
	for i := range c.Events {
		switch e := &c.Events[i]; e.Kind {
		case wire.KindStored:
			h.store(e)
		case wire.KindRemoved:
			for _, hash := range e.BlockHashes {
				h.remove(h.blocks[hash], 1)
				h.gone.add(hash)
			}
		case wire.KindCleared:
			h.clear()
		}
	}
	if h.newest%max(1, h.keep/4) == 0 {
		h.forget()
	}
}

func (h *history) store(e *wire.Event) {
	parent, hasParent := e.Parent, e.HasParent
	for i, hash := range e.BlockHashes {
		b := h.blocks[hash]
		if b == nil {
			b = &block{parent: parent, hasParent: hasParent, tokens: e.Tokens[i*int(e.BlockSize) : (i+1)*int(e.BlockSize)]}
			h.blocks[hash] = b
		}
		if b.copies++; b.copies == 1 {
			b.changes = append(b.changes, h.newest)
		}
		parent, hasParent = hash, true
	}
	h.stored.add(parent)
}

// remove removes copies of a block, which has that many.
func (h *history) remove(b *block, copies int) {
	if b.copies -= copies; b.copies == 0 {
		b.changes = append(b.changes, h.newest)
	}
}

func (h *history) clear() {
	for _, b := range h.blocks {
		if b.copies > 0 {
			h.remove(b, b.copies)
		}
	}
}

// oldest returns the oldest state that is remembered.
func (h *history) oldest() state { return max(h.newest, h.keep) - h.keep }

// forget forgets what happened before the oldest state.
func (h *history) forget() {
	oldest := h.oldest()
	h.times = slices.DeleteFunc(h.times, func(t batchTime) bool { return t.state < oldest })
	for hash, b := range h.blocks {
		for len(b.changes) > 1 && b.changes[1] <= oldest { // it came and went
			b.changes = b.changes[2:]
		}
		if len(b.changes) == 0 {
			delete(h.blocks, hash)
		}
	}
}

// after returns the state that a batch began, from the time of the batch in an entry; false if it is not remembered. Entries have
// the precision of a float64.
func (h *history) after(unixNano int64) (state, bool) {
	micros := (unixNano + 500) / 1000
	i, ok := slices.BinarySearchFunc(h.times, micros, func(t batchTime, micros int64) int { return int(t.micros - micros) })
	if !ok {
		return 0, false
	}
	return h.times[i].state, true
}

// holds reports whether a block is cached in a state.
func (h *history) holds(hash uint64, s state) bool {
	b := h.blocks[hash]
	if b == nil {
		return false
	}
	return sort.Search(len(b.changes), func(i int) bool { return b.changes[i] > s })%2 == 1
}

// prefix returns the length of the longest prefix of blocks that is cached in a state.
func (h *history) prefix(hashes []uint64, s state) int {
	for n, hash := range hashes {
		if !h.holds(hash, s) {
			return n
		}
	}
	return len(hashes)
}

// prefixes returns the lengths of the longest prefix in the states of a window, ascending.
func (h *history) prefixes(hashes []uint64, w window) []int {
	states := []state{w.first}
	for _, hash := range hashes {
		if b := h.blocks[hash]; b != nil {
			for _, s := range b.changes {
				if w.first < s && s <= w.last {
					states = append(states, s)
				}
			}
		}
	}
	slices.Sort(states)
	var lengths []int
	for _, s := range slices.Compact(states) {
		lengths = append(lengths, h.prefix(hashes, s))
	}
	slices.Sort(lengths)
	return slices.Compact(lengths)
}

// newestPrompt returns the prompt that was stored last; nil if there is none.
func (h *history) newestPrompt() []uint32 {
	if h.stored.count == 0 {
		return nil
	}
	return h.prompt(h.stored.hashes[(h.stored.count-1)%len(h.stored.hashes)])
}

// draw returns a prompt that ends with a block that was stored or removed lately; nil if there is none.
func (h *history) draw(rng *rand.Rand) []uint32 {
	r := &h.stored
	if rng.IntN(2) == 0 {
		r = &h.gone
	}
	hash, ok := r.draw(rng)
	if !ok {
		return nil
	}
	return h.prompt(hash)
}

// prompt returns the prompt that ends with a block; nil if it is forgotten in part.
func (h *history) prompt(last uint64) []uint32 {
	var chunks [][]uint32
	for hash := last; ; {
		b := h.blocks[hash]
		if b == nil {
			return nil
		}
		chunks = append(chunks, b.tokens)
		if !b.hasParent {
			slices.Reverse(chunks)
			return slices.Concat(chunks...)
		}
		hash = b.parent
	}
}
