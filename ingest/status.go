package ingest

import (
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// SourceStatus is the status of a source of a worker at one dp rank.
type SourceStatus struct {
	Worker string
	Engine feed.Engine
	// Endpoint is the endpoint of the publisher or the listener. Replay is the endpoint of the replay socket; empty if there is none.
	Endpoint string
	Replay   string
	// ReplayState is how the replay socket has answered so far.
	ReplayState ReplayState
	// Rank is the dp rank in the configuration or, for a listener, in the first batch. Named are the ranks that batches have named, which may be
	// others. It must not be modified.
	Rank  uint32
	Named []uint32
	State SourceState
	// DownSince is when the connection was lost, the engine ceased to answer or reading ended, or when the source was added if there
	// has been no connection; zero while there is a connection.
	DownSince time.Time
	// BehindSince is since when batches are being replayed that the engine has published; zero if none are.
	BehindSince time.Time
	// Started reports whether a batch was read; LastSeq is the seq of the last batch.
	Started bool
	LastSeq uint64
	// EngineDelay is the time from the engine's time of the last live batch that has one to its receipt, if HasEngineDelay. It
	// is negative if the engine's clock is ahead.
	EngineDelay    time.Duration
	HasEngineDelay bool
	// Restarts counts restarts of the engine, and Repairs the repairs that brought everything, each since the source was added.
	Restarts, Repairs uint64
	// Snapshot is the endpoint of the engine's snapshots; empty if none are used. Snapshots counts those used since the source was added.
	Snapshot  string
	Snapshots uint64
}

// Ranks returns the dp ranks whose blocks are known by the source: those that its batches have named, or the configured one before any batch.
func (s *SourceStatus) Ranks() []uint32 {
	if len(s.Named) > 0 {
		return s.Named
	}
	return []uint32{s.Rank}
}

// SourceState is the state of a source.
type SourceState uint8

// The states, with the numbers of the gRPC contract.
const (
	// SourceConnecting: there is no connection.
	SourceConnecting SourceState = iota + 1
	// SourceCatchingUp: a full replay is in progress.
	SourceCatchingUp
	// SourceLive: batches are delivered as they arrive.
	SourceLive
	// SourceRepairing: a replay of batches that are or may be missing is in progress.
	SourceRepairing
	// SourceSuspect: the connection is silent, and the engine does not reply.
	SourceSuspect
	// SourceStopped: reading has ended.
	SourceStopped
)

var sourceStateNames = [...]string{
	SourceConnecting: "connecting",
	SourceCatchingUp: "catching_up",
	SourceLive:       "live",
	SourceRepairing:  "repairing",
	SourceSuspect:    "suspect",
	SourceStopped:    "stopped",
}

// String returns the state's name in metrics.
func (s SourceState) String() string {
	if s < SourceConnecting || s > SourceStopped {
		return "unknown"
	}
	return sourceStateNames[s]
}

// ReplayState is how the replay socket of a source has answered so far.
type ReplayState = sequence.ReplayState

// The states of replay sockets.
const (
	// ReplayNone: the source has no replay socket.
	ReplayNone = sequence.ReplayNone
	// ReplayNeverAnswered: it has not answered yet.
	ReplayNeverAnswered = sequence.ReplayNeverAnswered
	// ReplayAnswers: it has answered the last request.
	ReplayAnswers = sequence.ReplayAnswers
	// ReplayUnanswered: it has answered before, but not the last request.
	ReplayUnanswered = sequence.ReplayUnanswered
	// ReplayForeign: it belongs to another engine.
	ReplayForeign = sequence.ReplayForeign
)

// down reports whether the engine's changes are not known: there is no connection, or the engine does not answer on it.
func (s SourceState) down() bool {
	return s == SourceConnecting || s == SourceSuspect || s == SourceStopped
}

// behind reports whether the engine has published batches that are being replayed.
func (s SourceState) behind() bool { return s == SourceCatchingUp || s == SourceRepairing }

// sourceList lists the publishers for Ingest.Sources.
type sourceList struct {
	mu      sync.Mutex // guards entries
	entries []*sourceEntry
}

// sourceEntry is the status of one publisher, which alone changes it, and reads it without the mutex.
type sourceEntry struct {
	source int // its number in the worker
	mu     sync.Mutex
	SourceStatus
}

func (e *sourceEntry) update(change func(*SourceStatus)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.SourceStatus)
}

func (e *sourceEntry) get() SourceStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.SourceStatus
}

func (l *sourceList) add(source int, initial SourceStatus) *sourceEntry {
	if initial.ReplayState = ReplayNone; initial.Replay != "" {
		initial.ReplayState = ReplayNeverAnswered
	}
	e := &sourceEntry{source: source, SourceStatus: initial}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, e)
	return e
}

func (l *sourceList) remove(e *sourceEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = slices.DeleteFunc(l.entries, func(other *sourceEntry) bool { return other == e })
}

// all returns the sources in the order in which they were added.
func (l *sourceList) all() []*sourceEntry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.entries)
}

// Sources returns the status of every source at every dp rank, in the order in which they were added.
func (in *Ingest) Sources() []SourceStatus {
	entries := in.shared.sources.all()
	all := make([]SourceStatus, len(entries))
	for i, e := range entries {
		all[i] = e.get()
	}
	return all
}

// Connected reports whether any source of a worker has a connection.
func (in *Ingest) Connected(worker string) bool {
	return slices.ContainsFunc(in.Sources(), func(s SourceStatus) bool {
		return s.Worker == worker && (s.State == SourceSuspect || !s.State.down())
	})
}

// WorkerStats counts what happened to a worker since it was added.
type WorkerStats struct {
	// ConnectAttempts counts the attempts to connect, Connections the successful attempts, and ConnectFailures the failed attempts, each of
	// which is retried. Disconnections counts the connections that broke or were closed by Reconnect.
	ConnectAttempts uint64
	Connections     uint64
	ConnectFailures uint64
	Disconnections  uint64

	// Messages counts the messages received from publishers, without replies of replay sockets.
	Messages uint64
	// Batches counts the batches delivered, live or by replay. Stored, Removed and Cleared count
	// their events, and Skipped the events left out of them.
	Batches uint64
	Stored  uint64
	Removed uint64
	Cleared uint64
	Skipped uint64
	// Duplicates counts batches that were read before, Rejected batches that do not decode, and Refused malformed messages.
	Duplicates uint64
	Rejected   uint64
	Refused    uint64
	// Gaps counts the gaps reported, and Missed the batches in them.
	Gaps   uint64
	Missed uint64
	// Restarts counts restarts of engines.
	Restarts uint64
	// Replays counts the repairs started, ReplaysDone the successful repairs, ReplaysFailed the
	// abandoned repairs, and Replayed the batches delivered from replays.
	Replays       uint64
	ReplaysDone   uint64
	ReplaysFailed uint64
	Replayed      uint64
	// Snapshots counts the snapshots used, and SnapshotsFailed the requests for snapshots that failed, or whose snapshot was of no use.
	Snapshots       uint64
	SnapshotsFailed uint64
}

// Stats returns the counts of a configured worker. ok is false if no worker has that name.
func (in *Ingest) Stats(worker string) (s WorkerStats, ok bool) {
	w := in.configured(worker)
	if w == nil {
		return WorkerStats{}, false
	}
	return w.metrics.stats(), true
}

// configured returns the worker of the configuration with this name; nil if there is none.
func (in *Ingest) configured(name string) *connectedWorker {
	for _, w := range in.workers {
		if w.desc.Name == name {
			return w
		}
	}
	return nil
}

func (m *workerMetrics) stats() WorkerStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	sum := func(id counterID) (total uint64) {
		for l, n := range m.labeled {
			if l.id == id {
				total += n
			}
		}
		return total
	}
	return WorkerStats{
		ConnectAttempts: m.counters[connectAttemptsTotal],
		Connections:     m.counters[connectionsTotal],
		ConnectFailures: m.counters[connectFailuresTotal],
		Disconnections:  m.counters[disconnectionsTotal],
		Messages:        m.counters[messagesTotal],
		Batches:         m.counters[batchesTotal],
		Stored:          m.events[wire.KindStored],
		Removed:         m.events[wire.KindRemoved],
		Cleared:         m.events[wire.KindCleared],
		Skipped:         sum(skippedTotal),
		Duplicates:      m.counters[duplicatesTotal],
		Rejected:        sum(rejectedTotal),
		Refused:         sum(refusedTotal),
		Gaps:            m.counters[gapsTotal],
		Missed:          m.counters[missedTotal],
		Restarts:        m.counters[restartsTotal],
		Replays:         sum(replaysTotal),
		ReplaysDone:     m.counters[replaysDoneTotal],
		ReplaysFailed:   m.counters[replaysFailedTotal],
		Replayed:        m.counters[replayedTotal],
		Snapshots:       m.counters[snapshotsTotal],
		SnapshotsFailed: m.counters[snapshotsFailedTotal],
	}
}

// Reconnect closes the connections to a configured worker, which are then opened again as if they had broken. It may wait for a call of the
// worker's lane. It returns the number of connections that had been established before; ok is false if no worker has that name.
func (in *Ingest) Reconnect(worker string) (connections uint64, ok bool) {
	w := in.configured(worker)
	if w == nil {
		return 0, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	connections = w.metrics.stats().Connections // does not change while the mutex is held
	for _, l := range w.links {
		l.breakOff()
	}
	return connections, true
}
