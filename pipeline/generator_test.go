package pipeline_test

import (
	"fmt"
	"time"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Time passes in steps, and no timeout is a multiple of a step, so that no call coincides
// with a timeout.
const (
	generatorStep    = 4 * time.Millisecond
	generatorTimeout = 10 * time.Millisecond
)

// generator draws calls as engines make them, with so few distinct blocks that they collide
// often.
type generator struct {
	t       *rapid.T
	time    int64
	workers map[string]*generatorWorker
	names   []string
	// copies reports whether sources use any copy rule, rather than only the default.
	copies bool
	// groups reports whether engines with one source have several attention groups.
	groups bool
}

// generatorWorker records the last event, since only similar events merge.
type generatorWorker struct {
	there  bool
	rank   uint32
	like   wire.Event
	last   uint64
	stored []uint64
	rawIDs map[int]uint64
	// sources is 0 for a worker with one source.
	sources int
	// rules are the copy rules by source.
	rules map[int]feed.CopyRule
	// prompt are the blocks of the last root store of several blocks.
	prompt []uint64
}

// drawCalls draws calls of 1 to 3 workers. With passing, time passes between them; with
// copies, engines announce blocks that they reuse.
func drawCalls(t *rapid.T, passing, copies bool) []call {
	return (&generator{t: t, copies: copies}).calls(passing)
}

// calls draws calls.
func (g *generator) calls(passing bool) []call {
	t := g.t
	g.workers = make(map[string]*generatorWorker)
	for i := range rapid.IntRange(1, 3).Draw(t, "workers") {
		name := fmt.Sprintf("worker-%d", i)
		g.names = append(g.names, name)
		g.workers[name] = &generatorWorker{}
	}
	var calls []call
	for range rapid.IntRange(1, 60).Draw(t, "calls") {
		calls = append(calls, g.call(passing))
	}
	return append(calls, call{Close: true})
}

// chance returns true in 1 of n cases.
func (g *generator) chance(n int, label string) bool {
	return rapid.IntRange(0, n-1).Draw(g.t, label) == n-1
}

func (g *generator) call(passing bool) call {
	name := rapid.SampledFrom(g.names).Draw(g.t, "worker")
	w := g.workers[name]
	if !w.there {
		return g.add(name, w)
	}
	g.time++
	switch rapid.IntRange(0, 29).Draw(g.t, "call") {
	case 29:
		w.there = false
		return call{Worker: name, Remove: rapid.SampledFrom([]feed.RemoveReason{
			feed.RemovedDeregistered, feed.RemovedDisconnected, feed.RemovedDiscovery,
		}).Draw(g.t, "remove reason")}
	case 28:
		return call{Worker: name, Restarted: &feed.Restart{Source: g.source(w), Rank: g.rank(w), At: g.time}}
	case 27, 26, 25, 24:
		return call{Worker: name, Gap: &feed.Gap{
			Source: g.source(w),
			Rank:   g.rank(w),
			Reason: rapid.SampledFrom([]feed.GapReason{
				feed.GapReplayUnavailable, feed.GapReplayIncomplete, feed.GapReplayForgotten,
				feed.GapPossibleRestart, feed.GapAmbiguousPublisher, feed.GapJoinedLate,
			}).Draw(g.t, "gap reason"),
			FirstSeq: rapid.Uint64Range(0, 3).Draw(g.t, "first seq"),
			LastSeq:  rapid.Uint64Range(0, 300).Draw(g.t, "last seq"),
			Missed:   rapid.Uint64Range(0, 300).Draw(g.t, "missed"),
			At:       g.time,
		}}
	case 23, 22, 21, 20, 19, 18, 17:
		if passing {
			return call{Pass: generatorStep * time.Duration(rapid.IntRange(1, 4).Draw(g.t, "steps"))}
		}
	}
	return call{Worker: name, Batch: g.batch(w)}
}

func (g *generator) add(name string, w *generatorWorker) call {
	*w = generatorWorker{there: true, like: wire.Event{Tier: kvblock.TierDevice, BlockSize: 2}, rawIDs: make(map[int]uint64), rules: make(map[int]feed.CopyRule)}
	worker := feed.Worker{Name: name, Model: rapid.SampledFrom([]string{"", "m", "Qwen/Qwen3-0.6B"}).Draw(g.t, "model")}
	if g.chance(2, "described") {
		worker.BlockSize = 16
		worker.Endpoint = "10.0.0.5:8000"
		worker.Ranks = []uint32{0, 1, 300}
		worker.Labels = map[string]string{"zone": "a", "empty": "", "": "nameless", "gpu": "h100"}
	}
	if g.chance(2, "several sources") {
		w.sources = rapid.IntRange(2, 3).Draw(g.t, "sources")
		w.like.TokensHashes = []uint64{}
		worker.Sources = []feed.Engine{feed.EngineVLLM, feed.EngineKVBM, feed.EngineVLLM}[:w.sources]
		worker.Consolidate = rapid.SampledFrom([]feed.Consolidate{
			"", feed.ConsolidateDedup, feed.ConsolidatePassthrough,
		}).Draw(g.t, "consolidate")
	}
	return call{Worker: name, Add: &worker}
}

// source draws one of the worker's sources.
func (g *generator) source(w *generatorWorker) int {
	return rapid.IntRange(0, max(0, w.sources-1)).Draw(g.t, "source")
}

// rank draws a rank, mostly the previous one.
func (g *generator) rank(w *generatorWorker) uint32 {
	if g.chance(5, "other rank") {
		w.rank = rapid.SampledFrom([]uint32{0, 1, 200}).Draw(g.t, "rank")
	}
	return w.rank
}

func (g *generator) batch(w *generatorWorker) *feed.Batch {
	b := &feed.Batch{Rank: g.rank(w), EngineTime: g.time * 1000, IngestTime: g.time*1000 + 1}
	if w.sources > 0 {
		b.Source = g.source(w)
	} else if g.chance(4, "second source") {
		b.Source = 1
	}
	b.CopyRule = g.rule(w, b.Source)
	if g.chance(10, "no engine time") {
		b.EngineTime = 0
	}
	b.GroupsOmitted = g.chance(5, "groups omitted")
	if g.groups && w.sources == 0 && g.chance(3, "groups described") {
		b.Groups = &kvcastv1.Groups{Unit: rapid.Uint32Range(1, 2).Draw(g.t, "unit")}
	}
	if g.chance(10, "doubt") {
		b.Doubts = []feed.Doubt{{
			Reason: rapid.SampledFrom([]feed.GapReason{feed.GapEventsSkipped, feed.GapBlockSizeMismatch, feed.GapUnknownContent, feed.GapTierNotCleared, feed.GapCopiesUnsure, feed.GapConnectorTier, feed.GapRelayed}).Draw(g.t, "reason"),
			Tiers:  rapid.SampledFrom([]kvblock.Tiers{kvblock.AllTiers, kvblock.LowerTiers, 1 << w.like.Tier}).Draw(g.t, "tiers"),
		}}
	}
	var events []wire.Event
	for range rapid.IntRange(0, 6).Draw(g.t, "events") {
		switch {
		case g.copies && g.chance(3, "announces"):
			events = append(events, g.announcement(w)...)
		case g.groups && w.sources == 0 && g.chance(2, "of a group"):
			events = append(events, g.groupEvent())
		default:
			events = append(events, g.event(w))
		}
	}
	for _, e := range events {
		if g.chance(20, "hole") {
			w.rawIDs[b.Source]++
		}
		w.rawIDs[b.Source]++
		e.RawID = w.rawIDs[b.Source]
		b.Events = append(b.Events, e)
	}
	return b
}

// groupEvent draws a store or a remove of an attention group other than the main group.
func (g *generator) groupEvent() wire.Event {
	return wire.Event{
		Kind:        rapid.SampledFrom([]wire.Kind{wire.KindStored, wire.KindRemoved}).Draw(g.t, "kind"),
		Tier:        rapid.SampledFrom([]kvblock.Tier{kvblock.TierDevice, kvblock.TierDevice, kvblock.TierHostPinned}).Draw(g.t, "tier"),
		Group:       rapid.SampledFrom([]uint8{1, 3}).Draw(g.t, "group"),
		BlockHashes: rapid.SliceOfNDistinct(rapid.Uint64Range(0, 9), 0, 4, rapid.ID).Draw(g.t, "blocks"),
	}
}

// rule returns the copy rule of a source.
func (g *generator) rule(w *generatorWorker, source int) feed.CopyRule {
	if !g.copies {
		return feed.CopyRuleCounted
	}
	if _, drawn := w.rules[source]; !drawn {
		w.rules[source] = rapid.SampledFrom([]feed.CopyRule{
			feed.CopyRuleDetected, feed.CopyRuleDetected, feed.CopyRuleDetected,
			feed.CopyRuleCounted, feed.CopyRuleAnnouncedLast,
		}).Draw(g.t, "copy rule")
	}
	return w.rules[source]
}

// announcement draws the events of an engine that announces reused blocks, or similar ones:
// a store of a prompt from the root, and a store that continues it.
func (g *generator) announcement(w *generatorWorker) []wire.Event {
	again := w.like
	again.Kind, again.Tier = wire.KindStored, kvblock.TierDevice
	if len(w.prompt) < 2 || g.chance(4, "new prompt") {
		w.prompt = rapid.SliceOfNDistinct(rapid.Uint64Range(0, 15), 1, 4, rapid.ID).Draw(g.t, "prompt")
	}
	again.BlockHashes = w.prompt
	if again.TokensHashes != nil {
		again.TokensHashes = g.contents(w, again)
	}
	w.stored = append(w.stored, w.prompt...)
	w.last = w.prompt[len(w.prompt)-1]
	g.say(&again)
	events := []wire.Event{again}
	if g.chance(5, "something between") {
		events = append(events, g.event(w))
	}
	next := g.store(w)
	if !g.chance(6, "not continued") {
		next.HasParent, next.Parent = true, w.prompt[len(w.prompt)-1]
	}
	return append(events, next)
}

// say sometimes sets an event's group, origin or remaining copies.
func (g *generator) say(e *wire.Event) {
	if !g.copies {
		return
	}
	if g.chance(6, "group") {
		e.HasGroupIdx, e.GroupIdx = true, int64(rapid.IntRange(0, 1).Draw(g.t, "group index"))
	}
	if !g.chance(12, "says") {
		return
	}
	if e.Kind == wire.KindStored {
		e.Origin = rapid.SampledFrom([]wire.Origin{wire.OriginNew, wire.OriginReused}).Draw(g.t, "origin")
		return
	}
	e.Rare = &wire.Rare{RemainingCopies: make([]uint32, len(e.BlockHashes))}
	for i := range e.Rare.RemainingCopies {
		e.Rare.RemainingCopies[i] = uint32(rapid.IntRange(0, 2).Draw(g.t, "remaining"))
	}
}

func (g *generator) event(w *generatorWorker) wire.Event {
	g.vary(&w.like)
	switch rapid.IntRange(0, 24).Draw(g.t, "kind") {
	case 24:
		e := wire.Event{Kind: wire.KindCleared}
		if g.chance(2, "of a tier") {
			e.Tier = kvblock.TierDevice
			if g.chance(2, "named") {
				e.Tier, e.Medium = w.like.Tier, "named"
			}
		}
		return e
	case 23, 22, 21, 20, 19, 18, 17, 16:
		e := wire.Event{Kind: wire.KindRemoved, Tier: w.like.Tier}
		for range rapid.IntRange(0, 4).Draw(g.t, "blocks removed") {
			e.BlockHashes = append(e.BlockHashes, g.known(w))
		}
		g.say(&e)
		return e
	}
	return g.store(w)
}

// store draws a store, which usually continues the last one.
func (g *generator) store(w *generatorWorker) wire.Event {
	e := w.like
	e.Kind = wire.KindStored
	switch rapid.IntRange(0, 9).Draw(g.t, "parent") {
	default:
		e.HasParent, e.Parent = true, w.last
	case 6:
		e.HasParent, e.Parent = true, 0
	case 7:
		e.HasParent, e.Parent = true, g.known(w)
	case 8, 9:
	}
	n := rapid.IntRange(0, 4).Draw(g.t, "blocks stored")
	if g.chance(30, "long store") {
		n = 12
	}
	for range n {
		w.last = g.hash()
		w.stored = append(w.stored, w.last)
		e.BlockHashes = append(e.BlockHashes, w.last)
	}
	if w.like.TokensHashes != nil {
		e.TokensHashes = g.contents(w, e)
	}
	e.ReplacesBlockSize = g.copies && e.BlockSize != 0 && g.chance(40, "replaces the block size")
	g.say(&e)
	tokens := n * int(e.BlockSize)
	switch rapid.IntRange(0, 9).Draw(g.t, "tokens") {
	case 7:
		tokens = 0
	case 8:
		tokens += 3
	case 9:
		tokens = max(0, tokens-1)
	}
	for i := range tokens {
		e.Tokens = append(e.Tokens, uint32(i*i*97))
	}
	return e
}

// contents draws the tokens hashes of a store's blocks.
func (*generator) contents(w *generatorWorker, e wire.Event) (all []uint64) {
	for _, h := range e.BlockHashes {
		if w.sources > 0 && h < 8 {
			h = 0 // several names for one content
		}
		all = append(all, h*31+uint64(e.BlockSize))
	}
	return all
}

// vary sometimes changes one of the fields that must be equal for events to merge.
func (g *generator) vary(like *wire.Event) {
	switch rapid.IntRange(0, 29).Draw(g.t, "vary") {
	case 23, 24, 25:
		like.Tier = kvblock.Tier(rapid.IntRange(1, kvblock.TierEnd-1).Draw(g.t, "tier"))
	case 26:
		like.LoRAName = rapid.SampledFrom([]string{"", "adapter", "åäö"}).Draw(g.t, "lora")
	case 27:
		like.CacheSalt = rapid.SampledFrom([]string{"", "salt", "pepper"}).Draw(g.t, "salt")
	case 28:
		like.BlockSize = rapid.SampledFrom([]uint32{0, 1, 2, 3}).Draw(g.t, "block size")
	case 29:
		like.TokensHashes = rapid.SampledFrom([][]uint64{nil, {}}).Draw(g.t, "hashed")
	}
}

// hash draws a block hash, which may be 0.
func (g *generator) hash() uint64 {
	h := rapid.Uint64Range(0, 15).Draw(g.t, "hash")
	if h == 15 {
		return 1<<64 - 1
	}
	return h
}

// known draws a block hash, mostly of a block that was stored before.
func (g *generator) known(w *generatorWorker) uint64 {
	if len(w.stored) == 0 || g.chance(6, "any hash") {
		return g.hash()
	}
	return w.stored[len(w.stored)-1-rapid.IntRange(0, min(8, len(w.stored)-1)).Draw(g.t, "known")]
}
