package ingest

import (
	"fmt"
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// doubtTexts are the log lines for the doubts that follow from wire.Rules.
var doubtTexts = map[feed.GapReason]string{
	feed.GapEventsSkipped:     "events skipped: blocks may be missing, or known although they are gone",
	feed.GapBlockSizeMismatch: "blocks skipped: not the worker's block size",
	feed.GapUnknownContent:    "content of blocks unknown: no prompt matches them",
	feed.GapConnectorTier:     "a connector keeps blocks below device memory, and may not tell which it removes",
}

// unsure is why blocks of a pool may not be held.
var unsure = map[feed.Engine]string{
	feed.EngineLMCache:            "the pool names no adapter and no cache salt",
	feed.EngineLMCacheCoordinator: "the list of the pool's objects may be outdated",
	feed.EngineMooncake:           "the list of the pool's objects may be outdated",
	feed.EngineWorkers:            "the pool does not tell what it has, so that blocks count as held until they are old",
}

// doubts returns what the rules have left out or not understood of the batch that the intake has decoded, and logs it.
func (p *publisher) doubts(in *intake, rank uint32, seq uint64) (all []feed.Doubt) {
	if p.relayed {
		all = append(all, feed.Doubt{Reason: feed.GapRelayed, Tiers: kvblock.AllTiers})
	}
	if p.unsure != "" {
		defer func() { // after the size of chunks
			all = append(all, feed.Doubt{Reason: feed.GapConnectorTier, Tiers: kvblock.AllTiers, Detail: p.unsure})
		}()
	}
	if in.batch.Doubts == (wire.Doubts{}) {
		return all
	}
	for reason, tiers := range in.batch.Doubts {
		if tiers == 0 {
			continue
		}
		reason := wire.Reason(reason)
		gap := feed.GapReason(reason.Gap())
		detail, args := p.detail(in, reason)
		doubt := feed.Doubt{Reason: gap, Tiers: tiers, Detail: detail}
		if reason == wire.ReasonChunks {
			doubt.ChunkTokens = p.rules.ChunkSize
		}
		all = append(all, doubt)
		if gap == feed.GapConnectorTier { // it holds for all batches
			isLogged := p.connectorLogged[reason]&tiers == tiers
			if p.connectorLogged[reason] |= tiers; isLogged {
				continue
			}
		}
		p.worker.log.Warn(doubtTexts[gap], append([]any{"source", p.source, "rank", rank, "seq", seq, "reason", reason.String()}, args...)...)
	}
	return all
}

// detail describes for people what was left out for a reason. args are for the log.
func (p *publisher) detail(in *intake, reason wire.Reason) (detail string, args []any) {
	switch reason {
	case wire.ReasonUnknownTag:
		tag := strings.ToValidUTF8(in.batch.UnknownTag, "")
		return fmt.Sprintf("unknown_tag %q", tag), []any{"tag", tag}
	case wire.ReasonBlockSizeMismatch:
		got, want := p.rules.ForeignBlockSize, p.worker.blockSize.Tokens
		args = []any{"block_size", got, "want", want, "hint", "set the worker's block_size to the engine's"}
		switch {
		case p.rules.ForeignTier != kvblock.TierDevice:
			args[5] = "a connector's chunks must be a multiple of the worker's block size, as LMCache's chunk_size"
		case !p.worker.blockSize.Configured:
			args[5] = "the engine stores blocks of several sizes"
		}
		return fmt.Sprintf("the engine's blocks have %d tokens; want %d", got, want), args
	case wire.ReasonChunks:
		if p.rules.ChunkSize == 0 { // they came before the size of the worker's blocks was known, and were removed
			return "blocks of another size were removed", nil
		}
		return fmt.Sprintf("chunks of %d tokens", p.rules.ChunkSize), []any{"chunk_tokens", p.rules.ChunkSize, "block_size", p.worker.blockSize.Tokens}
	case wire.ReasonObjectKey:
		return reason.String(), []any{"hint", "the source names objects in place of blocks: remove it, and read the engines' own events"}
	case wire.ReasonNoRemoves:
		return reason.String(), []any{"hint", "read the store itself as a pool"}
	case wire.ReasonNoExtraKeys:
		return reason.String(), []any{"hint", "the engine's events lack the cache salts of requests: vLLM has them since 0.17"}
	default:
		return reason.String(), nil
	}
}
