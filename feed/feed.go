// Package feed has the types that pass from ingest to pipeline: workers, decoded batches,
// gaps and restarts. Package ingest calls a Sink, which package pipeline implements. The
// calls for one worker are in the order of its engines and never overlap.
package feed

import (
	"strconv"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Limits of a worker.
const (
	// MaxRanks is how many dp ranks a worker may have, and how many sources, those of
	// all its ranks counted.
	MaxRanks = 1024
	// MaxSources is how many sources a worker may have.
	MaxSources = 128
)

// Sink receives what ingest reads. Its calls for one worker never overlap, nor do those of
// the worker's Lane; calls for different workers may.
type Sink interface {
	// AddWorker is called before anything of the worker is read, and again when it returns after
	// RemoveWorker. There is no other worker of that name.
	AddWorker(Worker) Lane
	// RemoveWorker is called after the last call of the worker's Lane. Workers that exist when
	// Ingest.Run ends are not removed.
	RemoveWorker(name string, reason RemoveReason)
}

// Lane receives one worker's events in order. While a call blocks, the worker's sources are
// not read, nor others that the same goroutine reads; ZeroMQ then buffers up to its
// high-water mark.
type Lane interface {
	// Batch receives a batch of a source. The seqs of a source grow, and each is received once.
	// The memory is the caller's, and valid until Batch returns.
	Batch(*Batch)
	// Gap receives a run of batches of a source that cannot be had: they are lost, or precede
	// the first batch that was read.
	Gap(Gap)
	// Restarted receives that a source's engine restarted, with an empty cache.
	Restarted(Restart)
}

// Worker is one engine deployment as routers know it.
type Worker struct {
	// Name is unique among all workers.
	Name  string
	Model string
	// BlockSize is in tokens; 0 until a store has one.
	BlockSize uint32
	// Endpoint and Labels are passed through to routers.
	Endpoint string
	Labels   map[string]string
	// Ranks are the dp ranks known from the start.
	Ranks []uint32
	// Sources are the engines of the worker's sources, indexed by Batch.Source, and Consolidate
	// is how to consolidate them. Both are empty for a single source.
	Sources     []Engine
	Consolidate Consolidate
}

// Batch is one batch of an engine, decoded.
type Batch struct {
	// Source is the index of the source among its worker's.
	Source int
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine's number of the batch.
	Seq uint64
	// CopyRule is how stores and removes are counted. It is the same in all batches of a source.
	CopyRule CopyRule
	// EngineTime and IngestTime are in nanoseconds since the Unix epoch. EngineTime is 0 if the
	// batch has none.
	EngineTime int64
	IngestTime int64
	// Events are the events to apply, in order. They may be empty.
	Events []wire.Event
}

// Gap is a run of missing batches that were not repaired.
type Gap struct {
	Source int
	Rank   uint32
	Reason GapReason
	// FirstSeq and LastSeq are the engine's numbers of the first and the last missing batch; both
	// are 0 if unknown.
	FirstSeq uint64
	LastSeq  uint64
	// Missed is the number of missing batches. It is 0 if unknown, and for GapJoinedLate, whose
	// batches precede the subscription.
	Missed uint64
	// At is when it was detected, in nanoseconds since the Unix epoch.
	At int64
}

// Restart is a restart of a source's engine.
type Restart struct {
	Source int
	Rank   uint32
	// At is when it was detected, in nanoseconds since the Unix epoch.
	At int64
}

// GapReason is why batches are missing. The values are those of kvcast.v1.Gap.Reason.
type GapReason uint8

// The reasons of gaps. The contract has one between them that ingest never reports.
const (
	GapReplayUnavailable  GapReason = 1
	GapReplayIncomplete   GapReason = 2
	GapReplayForgotten    GapReason = 3
	GapPossibleRestart    GapReason = 4
	GapAmbiguousPublisher GapReason = 5
	// GapJoinedLate: the first batch read of the rank is not the engine's first. It precedes
	// everything else of the rank.
	GapJoinedLate GapReason = 7
)

var gapReasonNames = [...]string{
	GapReplayUnavailable:  "replay_unavailable",
	GapReplayIncomplete:   "replay_incomplete",
	GapReplayForgotten:    "replay_forgotten",
	GapPossibleRestart:    "possible_restart",
	GapAmbiguousPublisher: "ambiguous_publisher",
	GapJoinedLate:         "joined_late",
}

// String returns the reason's name, as metrics label it.
func (r GapReason) String() string {
	if int(r) >= len(gapReasonNames) || gapReasonNames[r] == "" {
		return "unknown"
	}
	return gapReasonNames[r]
}

// RemoveReason is why a worker was removed. The values are those of
// kvcast.v1.WorkerRemoved.Reason.
type RemoveReason uint8

// The reasons of removal.
const (
	RemovedDeregistered RemoveReason = iota + 1
	RemovedDisconnected
	RemovedDiscovery
)

// String returns the reason's name.
func (r RemoveReason) String() string {
	names := [...]string{RemovedDeregistered: "deregistered", RemovedDisconnected: "disconnected", RemovedDiscovery: "discovery"}
	if r < RemovedDeregistered || r > RemovedDiscovery {
		return strconv.Itoa(int(r))
	}
	return names[r]
}
