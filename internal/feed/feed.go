// Package feed has the types that package ingest passes to package pipeline: workers, decoded batches, gaps and
// restarts. Ingest calls a Sink, which pipeline implements. The calls for one worker are in the order of the
// engine's batches and never overlap.
package feed

import (
	"log/slog"
	"net/netip"
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Limits of a worker.
const (
	// MaxRanks bounds the dp ranks of a worker, and its sources if each is counted once per dp rank.
	MaxRanks = 1024
	// MaxSources bounds the sources of a worker.
	MaxSources = 128
)

// Sink receives the workers that ingest reads. The calls of a Sink and of a Lane for one worker never overlap.
// Calls for different workers may be concurrent.
type Sink interface {
	// AddWorker adds a worker before its first batch is read. No other worker has the name. After RemoveWorker,
	// a worker with the name may be added again.
	AddWorker(Worker) Lane
	// RemoveWorker removes a worker after the last call of its Lane. Workers that exist when Ingest.Run ends are
	// not removed.
	RemoveWorker(name string, reason RemoveReason)
}

// Lane receives the events of one worker in order. While a call blocks, ingest does not read the worker's sources
// or the other sources of the same goroutine. ZeroMQ then buffers messages up to its high-water mark.
type Lane interface {
	// Batch receives a batch of a source. The seqs of a source grow between restarts, except that the batches of a
	// snapshot, of which the first clears all blocks, have the same seq: that of the last batch that it includes. The Batch and its memory
	// are only valid until Batch returns.
	Batch(*Batch)
	// Gap receives a run of batches of a source that could not be read: they are lost, or the engine published
	// them before the first batch that ingest has read.
	Gap(Gap)
	// Restarted reports that the engine of a source has restarted with an empty cache.
	Restarted(Restart)
}

// Worker is one engine deployment as routers know it.
type Worker struct {
	// Name is unique among all workers.
	Name  string
	Model string
	// BlockSize is in tokens; 0 if it is not known before the first store.
	BlockSize uint32
	// Endpoint and Labels are passed to routers unchanged.
	Endpoint string
	Labels   map[string]string
	// Pool reports whether the worker is a pool, from which others load blocks. Pools are the pools that it can load from.
	Pool  bool
	Pools []string
	// Ranks are the dp ranks known from the start.
	Ranks []uint32
	// Sources are the engines of the worker's sources, indexed by Batch.Source. Sources and Consolidate are
	// empty if the worker has one source.
	Sources     []Engine
	Consolidate Consolidate
	// Peer is the address that named the worker to a listener; invalid if kvcast connects, or if the worker is restored.
	Peer netip.Addr
}

// Logger adds what names the worker to a logger.
func (w *Worker) Logger(log *slog.Logger) *slog.Logger {
	log = log.With("worker", w.Name)
	if w.Peer.IsValid() {
		log = log.With(loglimit.PeerAddress, w.Peer.String())
	}
	return log
}

// Batch is one batch of an engine, decoded.
type Batch struct {
	// Source is the index of the source in Worker.Sources; 0 if the worker has one source.
	Source int
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine seq of the batch.
	Seq uint64
	// CopyRule is the same in all batches of a source, except those of a snapshot: their stores are counted.
	CopyRule CopyRule
	// EngineTime is the time in the batch, or 0 if it has none, and IngestTime the time of its receipt, in
	// nanoseconds since the Unix epoch.
	EngineTime int64
	IngestTime int64
	// Events are the events to apply, in order. There may be none.
	Events []wire.Event
	// GroupsOmitted reports whether the engine's batch has events of other attention groups than the main group.
	// They are in Events if the groups are followed.
	GroupsOmitted bool
	// Groups describes the attention groups of the rank; nil if the main group decides alone which prefixes are reused, and if other groups
	// are not followed. It does not change.
	Groups *kvcastv1.Groups
	// LastRawID is the raw event id that the source has reached with the batch, also if that event is not in Events; 0: unknown.
	LastRawID uint64
	// Doubts are why blocks of the rank may differ from the engine's after the batch, because of events that are not
	// applied or not understood.
	Doubts []Doubt
	// Proved reports whether the replay socket has been shown to be the publisher's, which ends Doubts of
	// GapReplayUnproved.
	Proved   bool
	Progress Progress
}

// Doubt is why blocks in some tiers of a rank may differ from the engine's, though no batch was lost.
type Doubt struct {
	Reason GapReason
	Tiers  kvblock.Tiers
	// Detail says for people what was left out.
	Detail string
	// ChunkTokens is the number of tokens in a connector's chunk, with GapConnectorTier; 0 if it is unknown.
	ChunkTokens uint32
}

// Gap is a run of missing batches that were not repaired.
type Gap struct {
	Source int
	Rank   uint32
	Reason GapReason
	// FirstSeq and LastSeq are the engine seqs of the first and the last missing batch; both are 0 if unknown.
	FirstSeq uint64
	LastSeq  uint64
	// Missed is the number of missing batches; 0 if it is unknown, and for GapJoinedLate.
	Missed uint64
	// Detail says more for people; empty for most gaps.
	Detail string
	// LastRawID is the raw event id that the source has reached with the gap; 0: unknown.
	LastRawID uint64
	// At is the time when the gap was detected, in nanoseconds since the Unix epoch.
	At       int64
	Progress Progress
}

// Restart is a restart of a source's engine.
type Restart struct {
	Source int
	Rank   uint32
	// At is the time when the restart was detected, in nanoseconds since the Unix epoch.
	At       int64
	Progress Progress
}

// GapReason is why batches are missing. The values are those of kvcast.v1.Gap.Reason.
type GapReason uint8

// The reasons for which ingest reports gaps. The contract has further reasons.
const (
	GapReplayUnavailable  GapReason = 1
	GapReplayIncomplete   GapReason = 2
	GapReplayForgotten    GapReason = 3
	GapPossibleRestart    GapReason = 4
	GapAmbiguousPublisher GapReason = 5
	// GapJoinedLate: the first batch that ingest has read of the rank is not the engine's first batch. The gap
	// precedes all batches of the rank.
	GapJoinedLate GapReason = 7
	// GapEventsSkipped, GapBlockSizeMismatch and GapUnknownContent are the reasons of a Doubt; see wire.Reason.Gap.
	GapEventsSkipped     GapReason = 10
	GapBlockSizeMismatch GapReason = 11
	GapUnknownContent    GapReason = 12
	// GapTierNotCleared: the engine cleared device memory, and perhaps other tiers, which may have older blocks if not.
	GapTierNotCleared GapReason = 13
	// GapReplayUnproved is the reason of a Doubt: the batch came from a replay socket that may be another publisher's.
	// Batch.Proved ends it.
	GapReplayUnproved GapReason = 14
	// GapReplayForeign: the replay socket is another publisher's. All blocks were discarded before.
	GapReplayForeign GapReason = 15
	// GapCopiesUnsure: the engine announces blocks that it reuses, so that its copies cannot be counted.
	GapCopiesUnsure GapReason = 16
	// GapConnectorTier: a connector keeps blocks in a tier, and may not tell all of their content, or which it removes.
	GapConnectorTier GapReason = 17
	// GapRelayed: the events come from a relay, which leaves some out without telling.
	GapRelayed GapReason = 18
)

// String returns the reason's name, which is also its metric label.
func (r GapReason) String() string { return reasonName(kvcastv1.Gap_Reason_name, int32(r)) }

// RemoveReason is why a worker was removed. The values are those of kvcast.v1.WorkerRemoved.Reason.
type RemoveReason uint8

// The reasons of removal.
const (
	RemovedDeregistered RemoveReason = iota + 1
	RemovedDisconnected
	RemovedDiscovery
)

// String returns the reason's name.
func (r RemoveReason) String() string {
	return reasonName(kvcastv1.WorkerRemoved_Reason_name, int32(r))
}

// reasonName returns the name of a reason in the contract without its prefix, in lower case; unknown for one without a name.
func reasonName(names map[int32]string, reason int32) string {
	if reason == 0 || names[reason] == "" {
		return "unknown"
	}
	return strings.ToLower(strings.TrimPrefix(names[reason], "REASON_"))
}
