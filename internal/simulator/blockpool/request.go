package blockpool

import (
	"slices"

	"github.com/kvcast/kvcast/internal/wire"
)

// Request is a running request. The pool does not evict its blocks until it finishes.
type Request struct {
	pool   *Pool
	tokens []uint32
	ids    []int
	last   uint64 // hash of the last block; the pool's HashSeed before the first
}

// Start starts a request with a prompt: cached blocks are reused, the others are computed and
// stored. It returns events and false as Pool.Request does.
//
// The events' tokens share the request's memory, and must not be modified.
func (p *Pool) Start(prompt []uint32) (*Request, []wire.Event, bool) {
	r := &Request{pool: p, tokens: slices.Clone(prompt), last: p.cfg.HashSeed}
	size := p.cfg.BlockSize
	idle := 0 // reused blocks that are in the free list
	for end := size; end < len(prompt); end += size {
		h := p.hash(r.last, prompt[end-size:end])
		copies := p.copies[h]
		if len(copies) == 0 {
			break
		}
		if p.blocks[copies[0]].refs == 0 {
			idle++
		}
		r.ids, r.last = append(r.ids, copies[0]), h
	}
	if len(prompt)/size-len(r.ids) > p.free.len-idle {
		return nil, nil, false
	}
	for _, id := range r.ids {
		p.touch(id)
	}
	p.stats.Requests++
	p.stats.PromptTokens += uint64(len(prompt))
	p.stats.HitTokens += uint64(len(r.ids) * size)
	return r, r.compute(), true
}

// Extend adds generated tokens, and returns the events of the blocks that they fill. It returns
// false, without effect, if no block is free.
func (r *Request) Extend(tokens ...uint32) ([]wire.Event, bool) {
	if (len(r.tokens)+len(tokens))/r.pool.cfg.BlockSize-len(r.ids) > r.pool.free.len {
		return nil, false
	}
	r.tokens = append(r.tokens, tokens...)
	return r.compute(), true
}

// Finish ends the request. Its blocks stay cached until they are evicted.
func (r *Request) Finish() {
	r.pool.release(r.ids)
	r.ids = nil
}

// Tokens returns the prompt and the generated tokens, which must not be modified.
func (r *Request) Tokens() []uint32 { return slices.Clip(r.tokens) }

// Hashes returns the hashes of the request's blocks, in order.
func (r *Request) Hashes() []uint64 {
	hashes := make([]uint64, len(r.ids))
	for i, id := range r.ids {
		hashes[i] = r.pool.blocks[id].hash
	}
	return hashes
}

// compute stores every whole block of tokens that has no block yet.
func (r *Request) compute() []wire.Event {
	p, size := r.pool, r.pool.cfg.BlockSize
	first, end := len(r.ids), len(r.tokens)/size
	if first == end {
		return nil
	}
	ids, events := p.allocate(end - first)
	store := wire.Event{
		Kind:        wire.KindStored,
		BlockHashes: make([]uint64, 0, end-first),
		Tokens:      slices.Clip(r.tokens[first*size : end*size]),
		BlockSize:   uint32(size),
		Medium:      medium,
	}
	if first > 0 {
		store.Parent, store.HasParent = r.last, true
	}
	for i, id := range ids {
		at := (first + i) * size
		r.last = p.hash(r.last, r.tokens[at:at+size])
		p.cache(id, r.last)
		store.BlockHashes = append(store.BlockHashes, r.last)
	}
	r.ids = append(r.ids, ids...)
	return append(events, store)
}
