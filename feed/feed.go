// Package feed has the types that pass from ingest to pipeline: workers, decoded
// batches, gaps and restarts. Package ingest calls a Sink, package pipeline implements
// it. For each worker the calls are in the order of its engines, and do not overlap.
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

// Sink takes what ingest reads. Its calls for one worker never overlap, nor do
// the calls of the worker's Lane; those of different workers may.
type Sink interface {
	// AddWorker is called before anything of the worker is read, and again when it
	// comes back after RemoveWorker. No worker of that name exists.
	AddWorker(Worker) Lane
	// RemoveWorker is called after the last call of the worker's Lane. A worker that
	// is there when Run ends is not removed.
	RemoveWorker(name string, reason RemoveReason)
}

// Lane takes one worker's events in order. A call that blocks holds up the
// reading of the worker's sources, and of others read by the same goroutine;
// ZeroMQ then buffers up to its high-water mark.
type Lane interface {
	// Batch takes a batch of a source: seqs of a source grow, and each comes
	// once. The batch is the caller's memory, and good until Batch returns.
	Batch(*Batch)
	// Gap reports that batches of a source are missing for good: that they were lost,
	// or that the engine published them before it was first heard of.
	Gap(Gap)
	// Restarted tells that a source's engine began anew, with an empty cache.
	Restarted(Restart)
}

// Worker is one engine deployment as routers know it.
type Worker struct {
	// Name is unique among all workers.
	Name  string
	Model string
	// BlockSize is in tokens; 0 where no store has told it yet.
	BlockSize uint32
	// Endpoint and Labels are for routers, passed through.
	Endpoint string
	Labels   map[string]string
	// Ranks are the dp ranks known from the start.
	Ranks []uint32
	// Sources are what publishes the worker's events, by the index that Batch.Source
	// has, and Consolidate is what to make of them. Both are empty where there is one.
	Sources     []Engine
	Consolidate Consolidate
}

// Batch is what one batch of an engine came to.
type Batch struct {
	// Source is the index of the source among its worker's.
	Source int
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine's number of the batch.
	Seq uint64
	// CopyRule is how its stores and removes are counted, the same in all batches of a
	// source.
	CopyRule CopyRule
	// EngineTime and IngestTime are nanoseconds since the Unix epoch; EngineTime
	// is 0 where the batch had none.
	EngineTime int64
	IngestTime int64
	// Events are those to apply, in order, as Rules.Admit left them. May be
	// empty.
	Events []wire.Event
}

// Gap is a run of batches that are missing for good.
type Gap struct {
	Source int
	Rank   uint32
	Reason GapReason
	// FirstSeq and LastSeq are the engine's numbers of the first and the last
	// batch missing; both are 0 where they are unknown.
	FirstSeq uint64
	LastSeq  uint64
	// Missed is their number; 0 where it is unknown, and for GapJoinedLate, whose
	// batches were not lost: nobody was listening.
	Missed uint64
	// At is when the gap was noticed, in nanoseconds since the Unix epoch.
	At int64
}

// Restart is the new beginning of a source's engine.
type Restart struct {
	Source int
	Rank   uint32
	// At is when it was noticed, in nanoseconds since the Unix epoch.
	At int64
}

// GapReason is why batches are lost. The values are those of
// kvcast.v1.Gap.Reason.
type GapReason uint8

// The reasons of gaps. The contract has one between them that ingest never reports.
const (
	GapReplayUnavailable  GapReason = 1
	GapReplayIncomplete   GapReason = 2
	GapReplayForgotten    GapReason = 3
	GapPossibleRestart    GapReason = 4
	GapAmbiguousPublisher GapReason = 5
	// GapJoinedLate: the first batch that was read of the rank is not the engine's
	// first. It precedes everything else of the rank.
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
