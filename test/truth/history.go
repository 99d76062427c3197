package truth

import (
	"maps"
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
	others []map[uint64]*presence // of the pool's further attention groups
	stored ring                   // the last blocks of stores of the main group
	kept   ring                   // the last blocks of stores of further groups
	gone   ring                   // blocks that were removed
}

// batchTime is the time of the batch that began a state, in microseconds since the Unix epoch.
type batchTime struct {
	micros int64
	state  state
}

// block is a block of the main attention group that is cached, or was in a state that is remembered.
type block struct {
	presence
	parent    uint64
	hasParent bool
	tokens    []uint32
}

// presence is when a block is cached.
type presence struct {
	copies  int
	changes []state // that began with the block's arrival and departure, in turn
}

// add adds a copy in the newest state.
func (p *presence) add(newest state) {
	if p.copies++; p.copies == 1 {
		p.changes = append(p.changes, newest)
	}
}

// remove removes copies, of which there are that many.
func (p *presence) remove(newest state, copies int) {
	if copies == 0 {
		return
	}
	if p.copies -= copies; p.copies == 0 {
		p.changes = append(p.changes, newest)
	}
}

// holds reports whether the block is cached in a state. A nil presence never is.
func (p *presence) holds(s state) bool {
	return p != nil && sort.Search(len(p.changes), func(i int) bool { return p.changes[i] > s })%2 == 1
}

// forget forgets what happened before a state, and reports whether nothing is left.
func (p *presence) forget(before state) bool {
	for len(p.changes) > 1 && p.changes[1] <= before { // it came and went
		p.changes = p.changes[2:]
	}
	return len(p.changes) == 0
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
	h := &history{pool: pool, keep: keep, blocks: make(map[uint64]*block)}
	for range pool.Groups {
		h.others = append(h.others, make(map[uint64]*presence))
	}
	return h
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
		switch e := &c.Events[i]; {
		case e.Kind == wire.KindCleared:
			h.clear()
		case e.GroupIdx > 0:
			h.change(h.others[e.GroupIdx-1], e)
		case e.Kind == wire.KindStored:
			h.store(e)
		case e.Kind == wire.KindRemoved:
			for _, hash := range e.BlockHashes {
				h.blocks[hash].remove(h.newest, 1)
				h.gone.add(hash)
			}
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
		b.add(h.newest)
		parent, hasParent = hash, true
	}
	h.stored.add(parent)
}

// change applies an event of a further attention group, which has blocks.
func (h *history) change(blocks map[uint64]*presence, e *wire.Event) {
	for _, hash := range e.BlockHashes {
		if e.Kind == wire.KindRemoved {
			blocks[hash].remove(h.newest, 1)
			h.gone.add(hash)
			continue
		}
		if blocks[hash] == nil {
			blocks[hash] = &presence{}
		}
		blocks[hash].add(h.newest)
	}
	if last := len(e.BlockHashes) - 1; e.Kind == wire.KindStored && last >= 0 {
		h.kept.add(e.BlockHashes[last])
	}
}

func (h *history) clear() {
	for _, b := range h.blocks {
		b.remove(h.newest, b.copies)
	}
	for _, blocks := range h.others {
		for _, p := range blocks {
			p.remove(h.newest, p.copies)
		}
	}
}

// oldest returns the oldest state that is remembered.
func (h *history) oldest() state { return max(h.newest, h.keep) - h.keep }

// forget forgets what happened before the oldest state.
func (h *history) forget() {
	oldest := h.oldest()
	h.times = slices.DeleteFunc(h.times, func(t batchTime) bool { return t.state < oldest })
	maps.DeleteFunc(h.blocks, func(_ uint64, b *block) bool { return b.forget(oldest) })
	for _, blocks := range h.others {
		maps.DeleteFunc(blocks, func(_ uint64, p *presence) bool { return p.forget(oldest) })
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

// of returns the presence of a block in a group, 0 for the main one; nil if it is not known.
func (h *history) of(group int, hash uint64) *presence {
	if group > 0 {
		return h.others[group-1][hash]
	}
	if b := h.blocks[hash]; b != nil {
		return &b.presence
	}
	return nil
}

// prefix returns the number of blocks of the longest prefix that the engine can reuse in a state: full attention needs all its blocks, a
// sliding window those that the next token attends to, and Mamba the state at its end.
func (h *history) prefix(hashes []uint64, s state) int {
	all := 0
	for all < len(hashes) && h.of(0, hashes[all]).holds(s) {
		all++
	}
	for n := all; n > 0; n-- {
		if h.serve(hashes[:n], s) {
			return n
		}
	}
	return 0
}

// serve reports whether the further groups have what they need of a prefix in a state, which the main group has.
func (h *history) serve(prefix []uint64, s state) bool {
	size := len(h.blocks[prefix[0]].tokens) // of a block, in tokens
	for g, group := range h.pool.Groups {
		for back := 0; back < len(prefix); back++ { // from the last block on
			isNeeded := back == 0
			if group.Window > 0 { // the Window-1 tokens before the next one
				isNeeded = back*size < group.Window-1
			}
			if isNeeded && !h.of(1+g, prefix[len(prefix)-1-back]).holds(s) {
				return false
			}
		}
	}
	return true
}

// prefixes returns the lengths of the longest prefix in the states of a window, ascending.
func (h *history) prefixes(hashes []uint64, w window) []int {
	states := []state{w.first}
	for _, hash := range hashes {
		for g := range 1 + len(h.others) {
			p := h.of(g, hash)
			if p == nil {
				continue
			}
			for _, s := range p.changes {
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
	switch {
	case h.kept.count > 0 && rng.IntN(2) == 0:
		r = &h.kept
	case rng.IntN(2) == 0:
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
