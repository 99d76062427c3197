// Package blockpool implements the KV-cache block pool of an engine with prefix caching.
//
// Prompts and generated tokens flow in; the engine's store and remove events flow out. Equal calls
// produce equal events, and the contents of the pool are known after each.
package blockpool

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/wire"
)

// medium is vLLM's name for the accelerator's memory.
const medium = "GPU"

// Config sizes a Pool. The zero value is a small engine.
type Config struct {
	// Capacity is in blocks; 0 means 4,096.
	Capacity int
	// BlockSize is in tokens; 0 means 16.
	BlockSize int
	// HashSeed is the parent hash of first blocks: engines with different seeds have different
	// hashes for the same content.
	HashSeed uint64
	// VLLMHashes gives blocks the hashes that vLLM gives them by default; HashSeed is not used then.
	VLLMHashes bool
	// Groups are the attention groups beside full attention, which every engine has as its main group, 0; see Group. With any, events
	// name their group.
	Groups []Group
}

func (c Config) withDefaults() (Config, error) {
	if c.Capacity == 0 {
		c.Capacity = 4096
	}
	if c.BlockSize == 0 {
		c.BlockSize = 16
	}
	if c.Capacity < 0 || c.BlockSize < 0 {
		return c, errors.New("configure pool: capacity and block_size must be positive")
	}
	for _, g := range c.Groups {
		if g.Window < 0 || g.Window == 1 {
			return c, fmt.Errorf("configure pool: window of %d tokens; want at least 2, or 0 for a group of states", g.Window)
		}
	}
	if c.VLLMHashes && c.BlockSize > vllmhash.MaxUnit {
		return c, fmt.Errorf("configure pool: block_size %d; want at most %d with vLLM's hashes", c.BlockSize, vllmhash.MaxUnit)
	}
	return c, nil
}

// Hashes returns the hashes of the whole blocks of a prompt, in order.
func (c Config) Hashes(prompt []uint32) []uint64 {
	c, _ = c.withDefaults() // New reports the error
	h := newHasher(c)
	return h.extend(nil, prompt)
}

// Pool is a block pool with the rules of vLLM. A block is found by the hash of all tokens up to its
// end. The blocks of a finished request stay cached. New blocks evict the least recently used cached
// blocks, and the last block of a request first. A parent is therefore present when its child is
// stored, and is evicted after its child.
//
// As in vLLM, a prompt is never served entirely from the cache: the last token is always computed,
// so a prompt of whole blocks computes its last block again. The pool then has two copies of the
// last block, and emits an event for each. With further groups, a prefix is served if every group has what it needs of it.
//
// A Pool is not safe for concurrent use.
type Pool struct {
	cfg    Config
	blocks []block
	free   freeList
	groups []group // the main group, and Config.Groups
	digest uint64
	used   int // number of blocks that requests reference
	cached int // blocks of the main group with a hash
	stats  Stats
	hasher hasher
}

// block is a physical block.
type block struct {
	hash   uint64
	group  int // that it was cached for
	cached bool
	refs   int // requests that use it; at 0 it is in the free list
}

// New returns an empty Pool.
func New(cfg Config) (*Pool, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Pool{
		cfg:    cfg,
		blocks: make([]block, cfg.Capacity),
		free:   newFreeList(cfg.Capacity),
		groups: newGroups(cfg),
		hasher: newHasher(cfg),
	}, nil
}

// Request runs a request that generates nothing: it computes the part of the prompt that is not
// cached, and finishes. It returns the events of the step: a Removed for each evicted block, then
// one Stored for the run of new blocks. It returns false, without effect, if the prompt does not
// fit beside the blocks of running requests.
func (p *Pool) Request(prompt []uint32) ([]wire.Event, bool) {
	r, events, ok := p.Start(prompt)
	if ok {
		r.Finish()
	}
	return events, ok
}

// Reset empties the cache, and returns its Cleared event. As in vLLM, it returns false, without
// effect, while requests run.
func (p *Pool) Reset() ([]wire.Event, bool) {
	if !p.Restart() {
		return nil, false
	}
	return []wire.Event{{Kind: wire.KindCleared}}, true
}

// Restart empties the cache without an event, as a new process does. It returns false, without
// effect, while requests run.
func (p *Pool) Restart() bool {
	if p.used > 0 {
		return false
	}
	clear(p.blocks)
	for i := range p.groups {
		clear(p.groups[i].copies)
	}
	p.digest, p.cached = 0, 0
	return true
}

// Stats returns the statistics of all requests so far, across resets and restarts.
func (p *Pool) Stats() Stats { return p.stats }

// Blocks returns the hashes in the pool, of the main group.
func (p *Pool) Blocks() map[uint64]struct{} {
	blocks := make(map[uint64]struct{}, p.Len())
	for h := range p.groups[0].copies {
		blocks[h] = struct{}{}
	}
	return blocks
}

// Capacity returns the number of blocks.
func (p *Pool) Capacity() int { return p.cfg.Capacity }

// BlockSize returns the block size in tokens.
func (p *Pool) BlockSize() int { return p.cfg.BlockSize }

// FurtherBlocks returns the most blocks of further groups that a request uses at a time.
func (p *Pool) FurtherBlocks() (n int) {
	for i := range p.groups[1:] {
		n += p.groups[1+i].most()
	}
	return n
}

// Len returns the number of distinct hashes in the pool, of the main group.
func (p *Pool) Len() int { return len(p.groups[0].copies) }

// Copies returns how many blocks the main group has cached, several with the same hash included: at most the capacity.
func (p *Pool) Copies() int { return p.cached }

// Digest returns the XOR of splitmix64 over the distinct hashes in the pool, of the main group.
func (p *Pool) Digest() uint64 { return p.digest }

// allocate assigns n blocks to a request, and returns a Removed for each cached block that it
// evicts. At least n blocks must be free.
func (p *Pool) allocate(n int) (ids []int, events []wire.Event) {
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
	b := &p.blocks[id]
	b.cached = false
	g := &p.groups[b.group]
	ids := g.copies[b.hash]
	if i := slices.Index(ids, id); len(ids) == 1 {
		delete(g.copies, b.hash)
	} else {
		g.copies[b.hash] = slices.Delete(ids, i, i+1)
	}
	if b.group == 0 {
		p.cached--
		if len(g.copies[b.hash]) == 0 {
			p.digest ^= SplitMix64(b.hash)
		}
	}
	ev := wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{b.hash}, Medium: medium}
	p.setGroup(&ev, b.group)
	return ev
}

// setGroup sets the group of an event. With the main group alone, events name none.
func (p *Pool) setGroup(ev *wire.Event, group int) {
	if len(p.groups) == 1 {
		return
	}
	ev.GroupIdx, ev.HasGroupIdx = int64(group), true
	if ev.Kind == wire.KindStored { // as in vLLM, only stores have the kind
		ev.SpecKind, ev.Rare = p.groups[group].kind, p.groups[group].fields
	}
}

func (p *Pool) cache(id, group int, h uint64) {
	b := &p.blocks[id]
	b.hash, b.group, b.cached = h, group, true
	g := &p.groups[group]
	if group == 0 {
		p.cached++
		if len(g.copies[h]) == 0 {
			p.digest ^= SplitMix64(h)
		}
	}
	g.copies[h] = append(g.copies[h], id)
}

// touch adds a request's reference to a cached block.
func (p *Pool) touch(id int) {
	if p.blocks[id].refs == 0 {
		p.free.remove(id)
		p.used++
	}
	p.blocks[id].refs++
}

// release removes a request's references, the last block first. Blocks are evicted in this order.
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

// SplitMix64 returns the first output of Vigna's SplitMix64 generator with seed x:
// https://prng.di.unimi.it/splitmix64.c.
func SplitMix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Stats are the statistics of a Pool's requests.
type Stats struct {
	// Requests is the number of requests started.
	Requests uint64 `json:"requests"`
	// PromptTokens is the number of tokens of all prompts. HitTokens is the number of prompt tokens
	// in cached blocks.
	PromptTokens uint64 `json:"prompt_tokens"`
	HitTokens    uint64 `json:"hit_tokens"`
}

// HitRate returns the share of prompt tokens that were cached, 0 to 1, which vLLM calls its prefix
// cache hit rate.
func (s Stats) HitRate() float64 {
	if s.PromptTokens == 0 {
		return 0
	}
	return float64(s.HitTokens) / float64(s.PromptTokens)
}
