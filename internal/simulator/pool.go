package simulator

import (
	"encoding/binary"
	"errors"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/ingest/wire"
)

// medium is what vLLM calls the memory of the accelerator.
const medium = "GPU"

// PoolConfig sizes a Pool. The zero value is a small engine.
type PoolConfig struct {
	// Capacity is in blocks; 0 means 4,096.
	Capacity int
	// BlockSize is in tokens; 0 means 16.
	BlockSize int
	// HashSeed is what a first block's hash begins with: engines with different
	// seeds name the same content differently.
	HashSeed uint64
}

func (c PoolConfig) withDefaults() (PoolConfig, error) {
	if c.Capacity == 0 {
		c.Capacity = 4096
	}
	if c.BlockSize == 0 {
		c.BlockSize = 16
	}
	if c.Capacity < 0 || c.BlockSize < 0 {
		return c, errors.New("configure pool: capacity and block_size must be positive")
	}
	return c, nil
}

// Pool is the block pool of an engine with prefix caching, as vLLM's: blocks are
// found by the hash of all tokens up to their end, a finished request leaves its
// blocks behind to be found again, and the least recently used of those make room
// for new ones, the end of a request before its beginning. So a parent is there
// when its child is stored, and leaves after it.
//
// Like vLLM's it never serves a whole prompt from the cache: the last token is
// always computed, so that a prompt of whole blocks sent again computes its last
// block again. The pool then holds two copies of that hash, tells of both when
// they come and when they go, and whoever follows must count.
//
// A Pool does no I/O and is for one goroutine.
type Pool struct {
	cfg    PoolConfig
	blocks []block
	free   freeList
	copies map[uint64][]int // blocks by hash, the oldest copy first
	digest uint64
	used   int // blocks that requests hold
	cached int // blocks with a hash
	stats  PoolStats
	bytes  []byte // of the tokens to be hashed
}

// block is a physical block.
type block struct {
	hash   uint64
	cached bool
	refs   int // requests that use it; at 0 it is in the free list
}

// NewPool returns an empty Pool.
func NewPool(cfg PoolConfig) (*Pool, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Pool{
		cfg:    cfg,
		blocks: make([]block, cfg.Capacity),
		free:   newFreeList(cfg.Capacity),
		copies: make(map[uint64][]int),
	}, nil
}

// Request runs a request that generates nothing: it computes what is not cached
// of the prompt, and finishes. It returns the events of the step: a Removed for
// each block that made room, then one Stored for the run of new blocks. It is
// false, and nothing happens, where the prompt does not fit beside what other
// requests hold.
func (p *Pool) Request(prompt []uint32) ([]wire.Event, bool) {
	r, events, ok := p.Start(prompt)
	if ok {
		r.Finish()
	}
	return events, ok
}

// Reset empties the cache, and returns the event that says so. Like vLLM's it is
// false, and nothing happens, while requests run.
func (p *Pool) Reset() ([]wire.Event, bool) {
	if !p.Restart() {
		return nil, false
	}
	return []wire.Event{{Kind: wire.KindCleared}}, true
}

// Restart empties the cache without a word, as a new process begins. It is false,
// and nothing happens, while requests run.
func (p *Pool) Restart() bool {
	if p.used > 0 {
		return false
	}
	clear(p.blocks)
	clear(p.copies)
	p.digest, p.cached = 0, 0
	return true
}

// Stats returns what all requests so far have asked for, resets and restarts
// notwithstanding.
func (p *Pool) Stats() PoolStats { return p.stats }

// Blocks returns the hashes held.
func (p *Pool) Blocks() map[uint64]struct{} {
	blocks := make(map[uint64]struct{}, len(p.copies))
	for h := range p.copies {
		blocks[h] = struct{}{}
	}
	return blocks
}

// Len returns the number of distinct hashes held.
func (p *Pool) Len() int { return len(p.copies) }

// Copies returns the number of blocks that hold them, at most the capacity.
func (p *Pool) Copies() int { return p.cached }

// Digest returns the XOR of splitmix64 over the distinct hashes held.
func (p *Pool) Digest() uint64 { return p.digest }

// take gives n blocks to a request, and returns a Removed for each hash that had
// to go. There must be as many free.
func (p *Pool) take(n int) (ids []int, events []wire.Event) {
	ids = make([]int, n)
	for i := range ids {
		id := p.free.pop()
		if p.blocks[id].cached {
			events = append(events, p.evict(id))
		}
		p.blocks[id].refs = 1
		p.used++
		ids[i] = id
	}
	return ids, events
}

func (p *Pool) evict(id int) wire.Event {
	h := p.blocks[id].hash
	p.blocks[id].cached = false
	p.cached--
	ids := p.copies[h]
	for i, other := range ids {
		if other == id {
			ids = append(ids[:i], ids[i+1:]...)
			break
		}
	}
	if len(ids) == 0 {
		delete(p.copies, h)
		p.digest ^= splitmix64(h)
	} else {
		p.copies[h] = ids
	}
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{h}, Medium: medium}
}

func (p *Pool) cache(id int, h uint64) {
	p.blocks[id].hash, p.blocks[id].cached = h, true
	p.cached++
	if len(p.copies[h]) == 0 {
		p.digest ^= splitmix64(h)
	}
	p.copies[h] = append(p.copies[h], id)
}

// touch gives a cached block to one more request.
func (p *Pool) touch(id int) {
	if p.blocks[id].refs == 0 {
		p.free.remove(id)
		p.used++
	}
	p.blocks[id].refs++
}

// release takes a request's blocks from it, the last one first: that is the order
// in which they will make room.
func (p *Pool) release(ids []int) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &p.blocks[ids[i]]
		b.refs--
		if b.refs == 0 {
			p.used--
			p.free.push(ids[i])
		}
	}
}

// hash names the block that continues parent with tokens.
func (p *Pool) hash(parent uint64, tokens []uint32) uint64 {
	p.bytes = p.bytes[:0]
	for _, t := range tokens {
		p.bytes = binary.LittleEndian.AppendUint32(p.bytes, t)
	}
	return xxh3.HashSeed(p.bytes, parent)
}

// splitmix64 is the first output of Vigna's generator of that name, seeded with x:
// https://prng.di.unimi.it/splitmix64.c.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// PoolStats are what requests have asked of a Pool.
type PoolStats struct {
	// Requests have begun.
	Requests uint64 `json:"requests"`
	// PromptTokens is the length of their prompts, and HitTokens how many of those
	// were found in the cache, in whole blocks.
	PromptTokens uint64 `json:"prompt_tokens"`
	HitTokens    uint64 `json:"hit_tokens"`
}

// HitRate is the part of all prompt tokens that the cache had, 0 to 1: what vLLM
// reports as its prefix cache hit rate.
func (s PoolStats) HitRate() float64 {
	if s.PromptTokens == 0 {
		return 0
	}
	return float64(s.HitTokens) / float64(s.PromptTokens)
}
