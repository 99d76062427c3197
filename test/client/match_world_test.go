package client_test

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// variant is how the content of blocks is hashed.
type variant struct {
	lora, salt string
	eagle      bool
}

var variants = []variant{{}, {lora: "l"}, {salt: "s"}, {lora: "l", salt: "s"}, {eagle: true}}

func (v variant) hashes(tokens []uint32, blockSize int) []uint64 {
	return kvblock.AppendTokensHashes(nil, tokens, blockSize, kvblock.Seed(v.lora, v.salt), v.eagle, nil)
}

// worldBlock is a block that an engine holds.
type worldBlock struct {
	prefix string // the tokens hashes of the block and all before it
	tier   kvblock.Tier
}

// worldEngine is an engine of one dp rank.
type worldEngine struct {
	blocks  map[worldBlock]uint64 // block hashes
	gap     bool                  // a gap was reported since the last restart or clear
	omitted bool                  // events of other groups were reported since the last restart
}

// worldWorker is a worker with its engines, by dp rank.
type worldWorker struct {
	name, model string
	blockSize   int
	lane        feed.Lane
	engines     map[uint32]*worldEngine
}

// world has engines as they are, without indexes, and matches prompts one by one.
type world struct {
	h       *fixture
	workers map[string]*worldWorker
	batches int64
}

func (w *world) batch(to *worldWorker, rank uint32, b feed.Batch) {
	w.batches++
	b.Rank, b.EngineTime, b.IngestTime = rank, w.batches, w.batches
	to.lane.Batch(&b)
}

// prefixOf names the content of a prompt's blocks up to the last of the tokens hashes.
func prefixOf(hashes []uint64) string { return fmt.Sprint(hashes) }

// blockHash returns the hash that every engine gives to a block.
func blockHash(prefix string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(prefix))
	return h.Sum64()
}

// drawTokens draws the tokens of up to four blocks and a part of one. Few differ, so that equal prefixes are frequent.
func drawTokens(t *rapid.T, blockSize int) []uint32 {
	tokens := make([]uint32, rapid.IntRange(blockSize, 4*blockSize+1).Draw(t, "tokens"))
	if rapid.Bool().Draw(t, "differs") {
		tokens[rapid.IntRange(0, len(tokens)-1).Draw(t, "at")] = 1
	}
	return tokens
}

// drawVariant draws a variant, mostly the base model.
func drawVariant(t *rapid.T) variant {
	return variants[max(0, rapid.IntRange(-4, len(variants)-1).Draw(t, "variant"))]
}

// step changes a worker.
func (w *world) step(t *rapid.T) {
	name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "worker")
	to := w.workers[name]
	if to == nil {
		to = &worldWorker{name: name, model: rapid.SampledFrom([]string{"m", "n"}).Draw(t, "model"), engines: make(map[uint32]*worldEngine)}
		to.blockSize = rapid.IntRange(1, 2).Draw(t, "block size")
		to.lane = w.h.Pipeline.AddWorker(feed.Worker{Name: name, Model: to.model, BlockSize: uint32(to.blockSize), Endpoint: name + ":80"})
		w.workers[name] = to
	}
	rank := rapid.Uint32Range(0, 1).Draw(t, "rank")
	e := to.engines[rank]
	if e == nil {
		e = &worldEngine{blocks: make(map[worldBlock]uint64)}
		to.engines[rank] = e
	}
	switch rapid.IntRange(0, 19).Draw(t, "kind") {
	default:
		w.store(t, to, rank, e)
	case 0, 1, 2, 3, 4, 5:
		w.remove(t, to, rank, e)
	case 6:
		to.lane.Restarted(feed.Restart{Rank: rank})
		*e = worldEngine{blocks: make(map[worldBlock]uint64)}
	case 7:
		w.batch(to, rank, feed.Batch{Events: []wire.Event{{Kind: wire.KindCleared}}})
		*e = worldEngine{blocks: make(map[worldBlock]uint64), omitted: e.omitted}
	case 8:
		to.lane.Gap(feed.Gap{Rank: rank, Reason: feed.GapReplayForgotten})
		e.gap = true
	case 9:
		w.batch(to, rank, feed.Batch{GroupsOmitted: true})
		e.omitted = true
	case 10:
		w.removeWorker(name)
	}
}

func (w *world) removeWorker(name string) {
	w.h.Pipeline.RemoveWorker(name, feed.RemovedDeregistered)
	delete(w.workers, name)
}

// store stores the blocks of a prompt in one tier, after those that the engine holds in some tier.
func (w *world) store(t *rapid.T, to *worldWorker, rank uint32, e *worldEngine) {
	v := drawVariant(t)
	hashes := v.hashes(drawTokens(t, to.blockSize), to.blockSize)
	tier := kvblock.Tier(rapid.IntRange(1, 4).Draw(t, "tier"))
	held := 0
	for held < len(hashes) && e.holds(prefixOf(hashes[:held+1]), 0) {
		held++
	}
	from := rapid.IntRange(0, held).Draw(t, "from")
	ev := wire.Event{Kind: wire.KindStored, Tier: tier, BlockSize: uint32(to.blockSize), LoRAName: v.lora, CacheSalt: v.salt, Eagle: v.eagle}
	if from > 0 {
		ev.HasParent, ev.Parent = true, blockHash(prefixOf(hashes[:from]))
	}
	for i := from; i < len(hashes) && !e.holds(prefixOf(hashes[:i+1]), tier); i++ { // a second copy would need a second remove
		prefix := prefixOf(hashes[:i+1])
		ev.BlockHashes = append(ev.BlockHashes, blockHash(prefix))
		ev.TokensHashes = append(ev.TokensHashes, hashes[i])
		e.blocks[worldBlock{prefix, tier}] = blockHash(prefix)
	}
	if len(ev.BlockHashes) > 0 {
		w.batch(to, rank, feed.Batch{Events: []wire.Event{ev}})
	}
}

// remove removes one block of one tier, perhaps with children.
func (w *world) remove(t *rapid.T, to *worldWorker, rank uint32, e *worldEngine) {
	if len(e.blocks) == 0 {
		return
	}
	all := slices.SortedFunc(maps.Keys(e.blocks), func(a, b worldBlock) int {
		return cmp.Or(cmp.Compare(a.prefix, b.prefix), cmp.Compare(a.tier, b.tier))
	})
	b := rapid.SampledFrom(all).Draw(t, "block")
	w.batch(to, rank, feed.Batch{Events: []wire.Event{{Kind: wire.KindRemoved, Tier: b.tier, BlockHashes: []uint64{e.blocks[b]}}}})
	delete(e.blocks, b)
}

// holds reports whether the engine holds a block in a tier; 0: in any.
func (e *worldEngine) holds(prefix string, tier kvblock.Tier) bool {
	for any := kvblock.Tier(1); any <= 4; any++ {
		if _, ok := e.blocks[worldBlock{prefix, any}]; ok && (tier == 0 || tier == any) {
			return true
		}
	}
	return false
}

// match returns the longest prefixes of a prompt, without the help of an index.
func (w *world) match(p client.Prompt, workers []string, limit int) (out []client.Match) {
	for name, to := range w.workers {
		if p.Model != "" && p.Model != to.model || len(workers) > 0 && !slices.Contains(workers, name) || p.BlockSize != 0 && p.BlockSize != to.blockSize {
			continue
		}
		hashes := p.TokensHashes
		if p.Tokens != nil {
			hashes = variant{p.LoRA, p.Salt, p.Eagle}.hashes(p.Tokens, to.blockSize)
		}
		for rank, e := range to.engines {
			prefix := func(tier kvblock.Tier) (n int) {
				if p.BlockHashes != nil {
					for n < len(p.BlockHashes) && e.holdsHash(p.BlockHashes[n], tier) {
						n++
					}
					return n
				}
				for n < len(hashes) && e.holds(prefixOf(hashes[:n+1]), tier) {
					n++
				}
				return n
			}
			m := client.Match{Worker: name, Model: to.model, Endpoint: name + ":80", Rank: rank, Blocks: prefix(0), Trust: kvcastv1.Trust_TRUST_EXACT}
			for tier := range m.TierBlocks[1:] {
				m.TierBlocks[tier+1] = prefix(kvblock.Tier(tier + 1))
				m.TierTokens[tier+1] = m.TierBlocks[tier+1] * to.blockSize
			}
			m.Tokens = m.Blocks * to.blockSize
			if e.omitted {
				m.Trust = kvcastv1.Trust_TRUST_UPPER_BOUND
			}
			if e.gap {
				m.Trust, m.Reasons = kvcastv1.Trust_TRUST_DEGRADED, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_GAP}
			}
			m.TierTrust = inAllTiers(m.Trust)
			if m.Blocks > 0 {
				out = append(out, m)
			}
		}
	}
	slices.SortFunc(out, func(a, b client.Match) int {
		return cmp.Or(b.Blocks-a.Blocks, b.TierBlocks[1]-a.TierBlocks[1], cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	if limit > 0 {
		out = out[:min(limit, len(out))]
	}
	return out
}

func (e *worldEngine) holdsHash(hash uint64, tier kvblock.Tier) bool {
	for b, h := range e.blocks {
		if h == hash && (tier == 0 || tier == b.tier) {
			return true
		}
	}
	return false
}

// drawPrompt draws a prompt in one of the three forms.
func drawPrompt(t *rapid.T, model string) client.Prompt {
	p := client.Prompt{Model: model}
	size := rapid.IntRange(1, 2).Draw(t, "prompt's block size")
	if rapid.Bool().Draw(t, "with block size") {
		p.BlockSize = size
	}
	v := drawVariant(t)
	tokens := drawTokens(t, size)
	hashes := v.hashes(tokens, size)
	switch rapid.IntRange(0, 3).Draw(t, "form") {
	case 0:
		p.TokensHashes = hashes
	case 1:
		for i := range hashes {
			p.BlockHashes = append(p.BlockHashes, blockHash(prefixOf(hashes[:i+1])))
		}
	default:
		p.Tokens, p.LoRA, p.Salt, p.Eagle = tokens, v.lora, v.salt, v.eagle
	}
	if len(hashes) == 0 { // an EAGLE block needs the next token
		p.TokensHashes, p.BlockHashes, p.Tokens = nil, nil, tokens
	}
	return p
}
