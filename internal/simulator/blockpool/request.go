package blockpool

import (
	"slices"

	"github.com/kvcast/kvcast/internal/wire"
)

// Request is a running request. The pool does not evict its blocks until it finishes.
type Request struct {
	pool   *Pool
	tokens []uint32
	hashes []uint64 // of its whole blocks
	ids    [][]int  // the blocks that it uses, of each group
	stored int      // blocks of tokens that are stored
}

// Start starts a request with a prompt: cached blocks are reused, the others are computed and
// stored. It returns events and false as Pool.Request does.
//
// The events' tokens share the request's memory, and must not be modified.
func (p *Pool) Start(prompt []uint32) (*Request, []wire.Event, bool) {
	r := &Request{pool: p, tokens: slices.Clone(prompt), ids: make([][]int, len(p.groups))}
	r.hashes = p.hasher.extend(nil, prompt)
	whole := len(r.hashes)
	// The last token is computed, and so is its block.
	replayable := max(0, len(prompt)-1) / p.cfg.BlockSize
	hit := p.reusable(r.hashes[:replayable])
	idle := 0 // reused blocks that are in the free list
	for g := range p.groups {
		for _, h := range r.hashes[p.groups[g].first(hit):hit] {
			id := p.groups[g].copies[h][0]
			if p.blocks[id].refs == 0 {
				idle++
			}
			r.ids[g] = append(r.ids[g], id)
		}
	}
	stores := make([]span, len(p.groups))
	stores[0] = span{hit, whole}
	needed := whole - hit
	for g := range p.groups[1:] {
		s := span{max(hit, p.groups[1+g].first(replayable)), replayable}
		stores[1+g] = s
		needed += s.last - s.first
	}
	if needed > p.free.len-idle {
		return nil, nil, false
	}
	for _, ids := range r.ids {
		for _, id := range ids {
			p.touch(id)
		}
	}
	p.stats.Requests++
	p.stats.PromptTokens += uint64(len(prompt))
	p.stats.HitTokens += uint64(hit * p.cfg.BlockSize)
	r.stored = hit
	return r, r.store(stores), true
}

// span is the blocks from first to before last.
type span struct{ first, last int }

// Extend adds generated tokens, and returns the events of the blocks that they fill. It returns
// false, without effect, if no block is free.
func (r *Request) Extend(tokens ...uint32) ([]wire.Event, bool) {
	whole := (len(r.tokens) + len(tokens)) / r.pool.cfg.BlockSize
	if whole-r.stored > r.pool.free.len {
		return nil, false
	}
	r.tokens = append(r.tokens, tokens...)
	r.hashes = r.pool.hasher.extend(r.hashes, r.tokens)
	stores := make([]span, len(r.ids))
	stores[0] = span{r.stored, whole}
	return r.store(stores), true
}

// Finish ends the request. Its blocks stay cached until they are evicted.
func (r *Request) Finish() {
	for g, ids := range r.ids {
		r.pool.release(ids)
		r.ids[g] = nil
	}
}

// Tokens returns the prompt and the generated tokens, which must not be modified.
func (r *Request) Tokens() []uint32 { return slices.Clip(r.tokens) }

// Hashes returns the hashes of the request's blocks of the main group, in order; none when it has finished.
func (r *Request) Hashes() []uint64 { return slices.Clone(r.hashes[:len(r.ids[0])]) }

// store stores the blocks of each group that are named, and returns the events. As in vLLM, a store of any group has all tokens that were
// not stored before, and the hashes of the blocks that the group keeps, which may be none.
func (r *Request) store(blocks []span) []wire.Event {
	p, size := r.pool, r.pool.cfg.BlockSize
	whole := len(r.hashes)
	if r.stored == whole {
		return nil
	}
	var removes, stores []wire.Event
	for g, s := range blocks {
		ids, evicted := p.allocate(max(0, s.last-s.first))
		removes = append(removes, evicted...)
		ev := wire.Event{
			Kind:        wire.KindStored,
			BlockHashes: make([]uint64, 0, len(ids)),
			Tokens:      slices.Clip(r.tokens[r.stored*size : whole*size]),
			BlockSize:   uint32(size),
			Medium:      medium,
		}
		if r.stored > 0 {
			ev.Parent, ev.HasParent = r.hashes[r.stored-1], true
		}
		p.setGroup(&ev, g)
		for i, id := range ids {
			h := r.hashes[s.first+i]
			p.cache(id, g, h)
			ev.BlockHashes = append(ev.BlockHashes, h)
		}
		r.ids[g] = append(r.ids[g], ids...)
		stores = append(stores, ev)
	}
	r.stored = whole
	return append(removes, stores...)
}
