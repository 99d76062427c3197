package pipeline

import (
	"cmp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// gapReasons is a set of reasons of Gaps: bit n is reason n.
type gapReasons uint32

func (r gapReasons) has(reason kvcastv1.Gap_Reason) bool { return r&(1<<uint(reason)) != 0 }

// maxDetailBytes is the length of Gap.detail, in bytes.
const maxDetailBytes = 200

// detailOf returns a text for Gap.detail.
func detailOf(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxDetailBytes)], "")
}

// reportDoubts emits Gaps for the doubts of a batch, after its events: a clear in the batch may precede what was left out.
func (l *Lane) reportDoubts(b *feed.Batch) {
	for _, d := range b.Doubts {
		l.reportDoubt(b.Rank, b.Source, d)
	}
}

// doubt reports a doubt of the pipeline's own, and logs it.
func (l *Lane) doubt(b *feed.Batch, d feed.Doubt) {
	if l.reportDoubt(b.Rank, b.Source, d) {
		l.logDoubt(b, d)
	}
}

// reportDoubt emits a Gap, unless one was emitted for the reason, and with the size of chunks, in all of the tiers since they were cleared: reported is
// false then. Routers hold the blocks of deduplicated sources in one tier, so that a doubt about another concerns it.
func (l *Lane) reportDoubt(rank uint32, source int, d feed.Doubt) (reported bool) {
	r := l.rank(rank)
	if d.Tiers != kvblock.AllTiers {
		l.markUsed(rank, r, source, d.Tiers)
	}
	if l.consolidation == dedup {
		d.Tiers, d.ChunkTokens = kvblock.AllTiers, 0
	}
	if d.Reason == feed.GapReplayUnproved {
		l.markUnproved(rank, r, source, true)
	} else {
		l.markIncomplete(rank, r, source) // also if another source has caused the report
	}
	if d.Reason == feed.GapTierNotCleared && r.sources != nil {
		r.sources.unseen[source] &^= d.Tiers
		l.log.sourcesChanged(rank)
	}
	if r.hasReported(kvcastv1.Gap_Reason(d.Reason), d.Tiers) && (d.ChunkTokens == 0 || d.ChunkTokens == r.chunkTokens) {
		return false
	}
	r.chunkTokens = cmp.Or(d.ChunkTokens, r.chunkTokens)
	l.flush(flushUnmergeable)
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_Reason(d.Reason), Tiers: tiersOf(d.Tiers), Detail: detailOf(d.Detail), ChunkTokens: d.ChunkTokens},
	}})
	return true
}

// markUnproved records whether a source's replay socket may be another engine's.
func (l *Lane) markUnproved(rank uint32, r *rankState, source int, unproved bool) {
	if l.consolidation == oneSource {
		return
	}
	if s := l.sources(rank, r); s.unproved[source] != unproved {
		s.unproved[source] = unproved
		l.log.sourcesChanged(rank)
	}
}

// repeatUnproved is called after a Cleared of some tiers (none: all), which ends all doubts about them. It emits the Gap for REPLAY_UNPROVED again while it
// holds for another source.
func (l *Lane) repeatUnproved(rank uint32, r *rankState, tiers ...kvcastv1.Tier) {
	if slices.Contains(r.sources.unproved, true) {
		l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_Gap{
			Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_UNPROVED, Tiers: tiers},
		}})
	}
}

// resolveUnproved emits that the replay socket is the engine's, if it was reported that it may be another's.
func (l *Lane) resolveUnproved(b *feed.Batch) {
	const reason = kvcastv1.Gap_REASON_REPLAY_UNPROVED
	r := l.rank(b.Rank)
	l.markUnproved(b.Rank, r, b.Source, false)
	if r.sources != nil && slices.Contains(r.sources.unproved, true) {
		return
	}
	if !slices.ContainsFunc(r.reported[:], func(reported gapReasons) bool { return reported.has(reason) }) {
		return
	}
	l.flush(flushUnmergeable)
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(b.Rank), Event: &kvcastv1.RouterEvent_Resolved{
		Resolved: &kvcastv1.Resolved{Reasons: []kvcastv1.Gap_Reason{reason}},
	}})
}

// hasReported reports whether Gaps have reported a reason in all of the tiers since they were cleared.
func (r *rankState) hasReported(reason kvcastv1.Gap_Reason, tiers kvblock.Tiers) bool {
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		if tiers.Has(tier) && !r.reported[tier].has(reason) {
			return false
		}
	}
	return true
}

// tiersOf returns the tiers of a set as an event names them: none if it has all.
func tiersOf(set kvblock.Tiers) (tiers []kvcastv1.Tier) {
	if set == kvblock.AllTiers {
		return nil
	}
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		if set.Has(tier) {
			tiers = append(tiers, kvcastv1.Tier(tier))
		}
	}
	return tiers
}

// doubtUnknown reports that the content of a store's blocks is unknown, if it names hashes only, and a block is held in no
// tier: a hash names the same content in each tier. It may be unknown as well if that was reported of another tier.
func (l *Lane) doubtUnknown(b *feed.Batch, e *wire.Event) {
	for tier, reported := range l.rank(b.Rank).reported {
		if reported.has(kvcastv1.Gap_REASON_UNKNOWN_CONTENT) && kvblock.Tier(tier) != e.Tier {
			l.doubt(b, feed.Doubt{
				Reason: feed.GapUnknownContent, Tiers: 1 << e.Tier, Detail: "a store of hashes alone may name a block of unknown content",
			})
			return
		}
	}
	for _, hash := range e.BlockHashes {
		if e.Tier > kvblock.TierDevice && l.names(b, wire.PartBefore(hash)) { // a chunk, of which only the last block is known here
			l.doubt(b, feed.Doubt{Reason: feed.GapConnectorTier, Tiers: 1 << e.Tier, Detail: "a store of hashes alone names a chunk"})
		}
		if !l.names(b, hash) {
			l.doubt(b, feed.Doubt{
				Reason: feed.GapUnknownContent, Tiers: 1 << e.Tier, Detail: "a store of hashes alone names a block that is in no tier",
			})
			return
		}
	}
}

// contradicts reports whether a store of blocks in a tier below device memory says of a block that device memory holds that
// it has another parent. vLLM's offload connector does so in hybrid models: it takes the tokens and the parent of another
// block. What device memory holds is right, since the engine computed it. No run of device memory may be pending.
func (l *Lane) contradicts(b *feed.Batch, e *wire.Event, hasParent bool) bool {
	device := l.rank(b.Rank).tables[kvblock.TierDevice]
	if l.consolidation == dedup || e.Tier <= kvblock.TierDevice || device == nil {
		return false
	}
	parent := e.Parent
	for _, hash := range e.BlockHashes {
		// A chunk's blocks have parents within the chunk, and blocks that were stored by their hashes alone have none.
		held, inChunk := device.blocks.table.Find(hash), hasParent && parent == wire.PartBefore(hash)
		if held != nil && device.attrs.At(held.Value.attr).BlockSize > 0 && !inChunk {
			if heldParent := held.Value.flags&flagParent != 0; heldParent != hasParent || hasParent && held.Value.parent != parent {
				return true
			}
		}
		parent, hasParent = hash, true
	}
	return false
}

// storeWithoutContent applies a store whose content is not that of its blocks: its hashes alone, which name the blocks that other tiers
// hold.
func (l *Lane) storeWithoutContent(b *feed.Batch, e *wire.Event, why string) {
	l.doubt(b, feed.Doubt{Reason: feed.GapUnknownContent, Tiers: 1 << e.Tier, Detail: why})
	hashes := *e
	hashes.Parent, hashes.HasParent, hashes.TokensHashes, hashes.Tokens = 0, false, nil, nil
	if l.consolidation != oneSource {
		l.consolidate(b, &hashes)
	} else {
		l.store(b, &hashes)
	}
}

// named returns a store of copies without their content, if the tracker knows all of them by their hashes: the store may lack a part of it.
func (l *Lane) named(b *feed.Batch, e *wire.Event) *wire.Event {
	for _, hash := range e.BlockHashes {
		if !l.names(b, hash) {
			return e
		}
	}
	without := *e
	without.TokensHashes, without.Tokens = nil, nil
	return &without
}

// names reports whether a source's hash names a block of the rank.
func (l *Lane) names(b *feed.Batch, hash uint64) bool {
	if tr := l.tracker(b.Rank); tr != nil {
		return tr.Resolves(b.Source, hash)
	}
	return l.known(b.Rank, hash)
}

// clearEvent applies an engine's clear of all tiers, or of one. If the engine names no tier, and its clears are of device
// memory, the other tiers that it has used may be cleared as well or not.
func (l *Lane) clearEvent(b *feed.Batch, e *wire.Event) {
	if l.consolidation != oneSource {
		l.clearSourceEvent(b, e)
		return
	}
	r := l.rank(b.Rank)
	others := r.used &^ (1 << e.Tier)
	for tier := range r.tables {
		if t := r.tables[tier]; (t == nil || t.blocks.table.Len() == 0) && r.reported[tier] == 0 && !r.otherGroups.HasTier(kvblock.Tier(tier)) {
			others &^= 1 << tier
		}
	}
	if e.Tier == 0 || e.Tier == kvblock.TierDevice && others == 0 {
		if lower := (r.doubted() | r.unseen) & kvblock.LowerTiers; e.Tier == 0 && lower != 0 { // they are empty, whether the engine has used them or not
			l.emitCleared(b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED, tiersOf(lower)...)
		}
		l.clear(b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED)
		return
	}
	if e.Tier == kvblock.TierDevice {
		l.announcements.ResetRank(b.Rank)
	}
	l.dropTable(r, e.Tier)
	l.emitCleared(b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED, kvcastv1.Tier(e.Tier))
	if e.Medium == "" {
		l.doubtNotCleared(b, others)
	}
}

// isUnseen reports whether a tier may have older blocks, if the batch's source uses it: see rankState.unseen.
func (l *Lane) isUnseen(b *feed.Batch, tier kvblock.Tier) bool {
	r := l.rank(b.Rank)
	if l.consolidation == oneSource {
		return r.unseen.Has(tier)
	}
	return r.sources != nil && r.sources.unseen[b.Source].Has(tier)
}

// doubtNotCleared reports that tiers may have been cleared with device memory.
func (l *Lane) doubtNotCleared(b *feed.Batch, tiers kvblock.Tiers) {
	if tiers != 0 {
		l.doubt(b, feed.Doubt{Reason: feed.GapTierNotCleared, Tiers: tiers})
	}
}
