package pipeline

import (
	"fmt"
	"math"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
)

// Config says how events are merged, and what becomes of blocks whose removes
// may have been lost. The zero value means the defaults.
type Config struct {
	// Timeout is how long a run of events may wait for a further batch that
	// continues it: 0, the default, to 15 s. With 0 each engine batch is an entry
	// of its own; otherwise the end of one may go out with the next.
	Timeout time.Duration
	// MaxBlocks is the most blocks in an event: 1 to 16,384, default 128. A
	// larger event of an engine is split.
	MaxBlocks int
	// EmitTokenIDs adds the tokens to stored events. These are users' prompts.
	EmitTokenIDs bool
	// OnGap is what routers are told of batches that are lost, default
	// OnGapReport.
	OnGap OnGap
	// MaxBlocksPerRank is the most blocks of a dp rank, in all its tiers together:
	// 1 to 2,147,483,647, default 4,000,000, each of some 50 bytes, or 175 where two
	// sources hold it. A rank that has more lets go of those from before its last gap,
	// and takes no new ones where there are none: see the contract's Gap.
	MaxBlocksPerRank int
	// Blocks bounds the blocks of all workers together, AttributeBytes the memory for
	// the names that engines give LoRA adapters and the cache salts that they name. What
	// does not fit is left out: see the contract's Gap. nil means no bound. A block takes
	// 1 of Blocks; one of a worker whose sources are told of once takes 2, and 1 for each
	// name that they have for it, so that 1 is some 50 bytes.
	Blocks, AttributeBytes *budget.Budget
}

// OnGap is what becomes of a dp rank's blocks when batches of it are lost.
type OnGap string

const (
	// OnGapReport keeps them, and sends Gap: some may be gone from the engine.
	OnGapReport OnGap = "report"
	// OnGapClear forgets them, and sends Cleared in place of Gap: the engine may
	// still hold some.
	OnGapClear OnGap = "clear"
)

// Bounds and defaults of Config.
const (
	MaxBatchTimeout         = 15 * time.Second
	DefaultMaxBlocks        = 128
	MaxMaxBlocks            = 16_384
	DefaultMaxBlocksPerRank = 4_000_000
	// DefaultBlocks and DefaultAttributeBytes are what to give Config.Blocks and
	// Config.AttributeBytes: 800 MB of blocks.
	DefaultBlocks         = 16_000_000
	DefaultAttributeBytes = 64 << 20
	MaxMaxBlocksPerRank   = math.MaxInt32
)

// Validate tells what is wrong with a config, by the names it has in the
// configuration.
func (c Config) Validate() error {
	if c.Timeout < 0 || c.Timeout > MaxBatchTimeout {
		return fmt.Errorf("batch.timeout: %v is not allowed: want 0s to %v", c.Timeout, MaxBatchTimeout)
	}
	if c.MaxBlocks < 0 || c.MaxBlocks > MaxMaxBlocks {
		return fmt.Errorf("batch.max_blocks: %d is not allowed: want 1 to %d", c.MaxBlocks, MaxMaxBlocks)
	}
	switch c.OnGap {
	case "", OnGapReport, OnGapClear:
	default:
		return fmt.Errorf("ingest.on_gap: %q is not allowed: want %s or %s", c.OnGap, OnGapReport, OnGapClear)
	}
	if c.MaxBlocksPerRank < 0 || c.MaxBlocksPerRank > MaxMaxBlocksPerRank {
		return fmt.Errorf("ingest.max_blocks_per_rank: %d is not allowed: want 1 to %d", c.MaxBlocksPerRank, MaxMaxBlocksPerRank)
	}
	return nil
}

// withDefaults gives what is not set its default.
func (c Config) withDefaults() Config {
	if c.MaxBlocks == 0 {
		c.MaxBlocks = DefaultMaxBlocks
	}
	if c.OnGap == "" {
		c.OnGap = OnGapReport
	}
	if c.MaxBlocksPerRank == 0 {
		c.MaxBlocksPerRank = DefaultMaxBlocksPerRank
	}
	return c
}
