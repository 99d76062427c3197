package simulator

import (
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Request is a request that runs: it holds the blocks it uses, and they stay in
// the pool until it finishes.
type Request struct {
	pool   *Pool
	tokens []uint32
	ids    []int
	last   uint64 // hash of the last block; the pool's seed where there is none
}

// Start begins a request with a prompt: the blocks that are cached are used again,
// the others are computed and stored. The events are a Removed for each block that
// made room, then one Stored for the run of new blocks. It is false, and nothing
// happens, where the prompt does not fit beside what other requests hold.
//
// The events' tokens are the request's memory; nobody changes them.
func (p *Pool) Start(prompt []uint32) (*Request, []wire.Event, bool) {
	r := &Request{pool: p, tokens: slices.Clone(prompt), last: p.cfg.HashSeed}
	size := p.cfg.BlockSize
	idle := 0 // cached blocks that the request takes out of the free list
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

// Extend adds generated tokens, and returns the events of the blocks that they
// fill: as Start does. It is false, and nothing happens, where there is no room.
func (r *Request) Extend(tokens ...uint32) ([]wire.Event, bool) {
	if (len(r.tokens)+len(tokens))/r.pool.cfg.BlockSize-len(r.ids) > r.pool.free.len {
		return nil, false
	}
	r.tokens = append(r.tokens, tokens...)
	return r.compute(), true
}

// Finish ends the request. Its blocks stay cached until others need the room.
func (r *Request) Finish() {
	r.pool.release(r.ids)
	r.ids = nil
}

// Tokens returns the prompt and what was generated, to read.
func (r *Request) Tokens() []uint32 { return slices.Clip(r.tokens) }

// Hashes returns the hashes of the blocks it holds, in order.
func (r *Request) Hashes() []uint64 {
	hashes := make([]uint64, len(r.ids))
	for i, id := range r.ids {
		hashes[i] = r.pool.blocks[id].hash
	}
	return hashes
}

// compute stores every whole block that the request has no block for yet.
func (r *Request) compute() []wire.Event {
	p, size := r.pool, r.pool.cfg.BlockSize
	first, end := len(r.ids), len(r.tokens)/size
	if first == end {
		return nil
	}
	ids, events := p.take(end - first)
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
