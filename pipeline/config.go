package pipeline

import (
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
)

// Config sets how events are merged and how many blocks are kept. The zero value has the defaults.
type Config struct {
	// Timeout is how long the last events of a batch may wait to be merged with those of the
	// next: 0, the default, to 15 s. With 0 each engine batch is an entry of its own.
	Timeout time.Duration
	// MaxBlocks is the maximum number of blocks in an event: 1 to 16,384, default 128. Larger events of engines are split.
	MaxBlocks int
	// EmitTokenIDs adds the tokens to stored events. These are users' prompts.
	EmitTokenIDs bool
	// EmitSessionIDs adds the session ids of stores to stored events, and EmitReasons the reasons of removes to removed events, up to 256 bytes each. Not for
	// consolidated sources.
	EmitSessionIDs, EmitReasons bool
	// OnGap is the effect of lost batches on a rank's blocks; default OnGapReport.
	OnGap OnGap
	// MaxBlocksPerRank is the maximum number of blocks of a dp rank, in all its tiers: 1 to 2,147,483,647, default 4,000,000. A block uses
	// some 90 bytes, 50 of them in the index, or 245 where two sources hold it. A full rank removes stale blocks, which were last stored
	// before its last gap, and then blocks of lower tiers. If it has none, it refuses new blocks: see the contract's Gap.
	MaxBlocksPerRank int
	// Blocks bounds the blocks of all workers together, AttributeBytes the memory of all LoRA adapter names and cache salts. Blocks beyond
	// either bound are refused: see the contract's Gap. Before, stale blocks of the rank are removed, and blocks of lower tiers of the
	// worker with most of them. nil means no bound. A block uses 1 unit of Blocks, some 90 bytes. A block of a worker with consolidated
	// sources uses 2 units, and 1 unit for each of its names.
	Blocks, AttributeBytes *budget.Budget
	// Logger logs blocks that are refused or evicted, and doubts; nil: nothing is logged. Lines of one kind are at most one in
	// 10 s for each worker.
	Logger *slog.Logger
	// Durable passes journal.Record.State to the journal, from which Recovery recovers the state.
	Durable bool
	// MaxRecordBytes is the size of the largest journal.Record that the journal takes, body and state: at least
	// MinRecordBytes; 0: no limit. Entries are cut, and token ids left out, so that none is larger.
	MaxRecordBytes int
	// CheckpointBytes is the size of entries, of all workers, after which a worker's next checkpoint is due, unless the
	// checkpoints of all workers are larger; default 32 MiB. So recovery applies entries of not much more bytes than it
	// reads checkpoints, and checkpoints at most double the bytes that are written.
	CheckpointBytes int64
	// Shared reports whether other pipelines append to the same journal, each for other workers, so that no pipeline knows
	// all removed workers. There is no checkpoint RemovedWorkers then. The caller must give the last event id of a worker
	// that another pipeline may have removed: with Pipeline.Adopt or Pipeline.SetEventIDFloor.
	Shared bool
	// Oldest, if not nil, returns the seq of the oldest entry that the journal would retain if recovery did not need
	// earlier ones. A checkpoint is due of a worker that needs an earlier one, so that a worker with few entries does not make
	// the journal retain all those of others.
	Oldest func() uint64
	// Fenced, if not nil, is called in a goroutine of its own when an append of a worker's lane has failed with journal.ErrFenced: another
	// pipeline appends for the worker now. It is called once for a lane. Calls of the lane, and AddWorker and RemoveWorker of the worker,
	// have no effect until Pipeline.Drop. The call may come after Drop. If it is nil, Pipeline.Failed reports the error.
	Fenced func(worker string)
}

// OnGap selects what happens to a dp rank's blocks when batches are lost.
type OnGap string

const (
	// OnGapReport keeps the blocks and emits Gap. The engine may have evicted some of them.
	OnGapReport OnGap = "report"
	// OnGapClear removes the blocks and emits Cleared. The engine may still have some of them.
	OnGapClear OnGap = "clear"
)

// Bounds and defaults of Config.
const (
	MaxBatchTimeout         = 15 * time.Second
	DefaultMaxBlocks        = 128
	MaxMaxBlocks            = 16_384
	DefaultMaxBlocksPerRank = 4_000_000
	// DefaultBlocks and DefaultAttributeBytes are the recommended sizes of Config.Blocks and Config.AttributeBytes: 1.5 GB of blocks.
	DefaultBlocks         = 16_000_000
	DefaultAttributeBytes = 64 << 20
	// DefaultCheckpointBytes is the default of Config.CheckpointBytes.
	DefaultCheckpointBytes = 32 << 20
	MaxMaxBlocksPerRank    = math.MaxInt32
	// MinRecordBytes is the smallest limit of Config.MaxRecordBytes. It is nats-server's default for max_payload.
	MinRecordBytes = 1 << 20
)

const (
	// maxEntryBytes is the size above which the events of one batch become several entries, since gRPC clients accept
	// messages of 4 MiB by default.
	maxEntryBytes = 3 << 20
	// maxRunTokens bounds the token ids of an event, of up to five bytes each, for the same reason.
	maxRunTokens = 1 << 19
	// maxWaitingBytes bounds the waiting changes. Beyond it they are dropped, and the worker cannot be recovered until its
	// next checkpoint. It is only reached if no checkpoint can be stored for long.
	maxWaitingBytes = 16 << 20
)

// limits are the sizes that keep an entry with its state below Config.MaxRecordBytes: an entry takes at most 1/2 of it or has
// a single event, of which blocks take 1/4 and token ids 5/16; waiting changes take 1/4.
type limits struct{ entryBytes, runTokens, waitingBytes int }

func (c *Config) limits() limits {
	if c.MaxRecordBytes == 0 {
		return limits{maxEntryBytes, maxRunTokens, maxWaitingBytes}
	}
	return limits{min(maxEntryBytes, c.MaxRecordBytes/2), min(maxRunTokens, c.MaxRecordBytes/16), min(maxWaitingBytes, c.MaxRecordBytes/4)}
}

// Validate returns an error for the first setting that is out of bounds.
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
	if c.MaxRecordBytes != 0 && c.MaxRecordBytes < MinRecordBytes {
		return fmt.Errorf("the journal takes records of at most %d bytes: want %d or more (max_payload of NATS servers)", c.MaxRecordBytes, MinRecordBytes)
	}
	if c.MaxBlocksPerRank < 0 || c.MaxBlocksPerRank > MaxMaxBlocksPerRank {
		return fmt.Errorf("ingest.max_blocks_per_rank: %d is not allowed: want 1 to %d", c.MaxBlocksPerRank, MaxMaxBlocksPerRank)
	}
	return nil
}

// withDefaults returns the config with its zero fields set to their defaults.
func (c Config) withDefaults() Config {
	if c.MaxBlocks == 0 {
		c.MaxBlocks = DefaultMaxBlocks
	}
	if c.OnGap == "" {
		c.OnGap = OnGapReport
	}
	if c.CheckpointBytes <= 0 {
		c.CheckpointBytes = DefaultCheckpointBytes
	}
	if c.MaxBlocksPerRank == 0 {
		c.MaxBlocksPerRank = DefaultMaxBlocksPerRank
	}
	return c
}
