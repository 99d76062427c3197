package pipeline

import (
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// limitEffect is what happens to blocks because of a limit.
type limitEffect uint8

const (
	limitRefuses limitEffect = iota
	limitEvicts
)

// logLimit logs that blocks of a rank's tiers were refused or evicted because of a limit.
func (l *Lane) logLimit(effect limitEffect, why consolidate.Refusal, rank uint32, tiers kvblock.Tiers, blocks int) {
	if l.cfg.Logger == nil {
		return
	}
	limit, value := "ingest.max_blocks_per_rank", int64(l.cfg.MaxBlocksPerRank)
	switch why {
	case consolidate.RefusedTotal:
		limit, value = "ingest.max_blocks", l.cfg.Blocks.Limit()
	case consolidate.RefusedAttributes:
		limit, value = "ingest.max_attribute_bytes", l.attributes.Limit()
	default:
	}
	msg, hint := "blocks refused", "raise the limit; or does the engine report stores without the removes?"
	if effect == limitEvicts {
		msg, hint = "blocks of a lower tier evicted", "raise the limit, unless the tier is one that the engine never removes blocks from"
	}
	l.cfg.Logger.Warn(msg, "rank", rank, "tiers", tierNames(tiers), "blocks", blocks, "limit", limit, "value", value, "hint", hint)
}

// doubtTexts are the log lines for doubts of the pipeline's own, and what to do.
var doubtTexts = map[feed.GapReason]struct{ msg, hint string }{
	feed.GapUnknownContent: {"content of blocks unknown: no prompt matches them", "rely on the device's blocks"},
	feed.GapTierNotCleared: {"the engine cleared its device memory, and perhaps other tiers", "set clear: all if the engine clears all tiers"},
	feed.GapConnectorTier:  {"a connector does not tell all of the blocks that it keeps", "rely on the device's blocks"},
	feed.GapCopiesUnsure:   {"the engine announces blocks that it reuses, so that its copies cannot be counted", "use kv_cache_report_mode incremental"},
}

// logDoubt logs a doubt that was reported.
func (l *Lane) logDoubt(b *feed.Batch, d feed.Doubt) {
	if l.cfg.Logger == nil {
		return
	}
	text := doubtTexts[d.Reason]
	l.cfg.Logger.Warn(text.msg, "source", b.Source, "rank", b.Rank, "reason", d.Reason.String(), "tiers", tierNames(d.Tiers),
		"detail", d.Detail, "hint", text.hint)
}

// tierNames returns the names of tiers, such as device+disk.
func tierNames(tiers kvblock.Tiers) string {
	var names []string
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		if tiers.Has(tier) {
			names = append(names, strings.ToLower(strings.TrimPrefix(kvcastv1.Tier(tier).String(), "TIER_")))
		}
	}
	return strings.Join(names, "+")
}
