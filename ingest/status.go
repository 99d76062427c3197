package ingest

import (
	dto "github.com/prometheus/client_model/go"

	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
)

// SourceStatus is the status of a source of a worker at one dp rank.
type SourceStatus struct {
	Worker string
	Engine feed.Engine
	// Endpoint is that of the publisher, or the listener, and Replay that of the replay
	// socket; empty where there is none.
	Endpoint string
	Replay   string
	// Rank is the configured dp rank, or that of the first batch.
	Rank  uint32
	State SourceState
	// Started reports whether a batch was read; LastSeq is that of the last.
	Started bool
	LastSeq uint64
}

// SourceState is the state of a source.
type SourceState uint8

// The states.
const (
	// SourceConnecting: there is no connection.
	SourceConnecting SourceState = iota + 1
	// SourceCatchingUp: a full replay is in progress.
	SourceCatchingUp
	// SourceLive: batches are delivered as they arrive.
	SourceLive
	// SourceRepairing: a replay of what is or may be missing is in progress.
	SourceRepairing
	// SourceSuspect: the connection is silent, and the engine does not answer.
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

// String returns the state's name, as metrics label it.
func (s SourceState) String() string {
	if s < SourceConnecting || s > SourceStopped {
		return "unknown"
	}
	return sourceStateNames[s]
}

// sourceList lists the publishers for Ingest.Sources.
type sourceList struct {
	mu      sync.Mutex // guards all below
	entries []*sourceEntry
}

// sourceEntry is the status of one publisher. about never changes, the rest is written by
// the publisher alone. replay replaces that of about.
type sourceEntry struct {
	about   SourceStatus
	replay  atomic.Pointer[string]
	state   atomic.Uint32
	started atomic.Bool
	lastSeq atomic.Uint64
}

func (e *sourceEntry) setReplay(endpoint string) {
	if *e.replay.Load() != endpoint {
		e.replay.Store(&endpoint)
	}
}

func (l *sourceList) add(about SourceStatus) *sourceEntry {
	e := &sourceEntry{about: about}
	e.replay.Store(&about.Replay)
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

// Sources returns every source that is read, in the order in which they were added.
func (in *Ingest) Sources() []SourceStatus {
	l := &in.shared.sources
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]SourceStatus, len(l.entries))
	for i, e := range l.entries {
		all[i] = e.about
		all[i].Replay = *e.replay.Load()
		all[i].State = SourceState(e.state.Load())
		all[i].LastSeq = e.lastSeq.Load()
		all[i].Started = e.started.Load()
	}
	return all
}

// WorkerStats is what was counted for a worker since it was added.
type WorkerStats struct {
	// ConnectAttempts counts the attempts to connect, Connections those that
	// succeeded, ConnectFailures those that failed and are repeated. Disconnections
	// counts the connections that broke, or were closed by Reconnect.
	ConnectAttempts uint64
	Connections     uint64
	ConnectFailures uint64
	Disconnections  uint64

	// Messages counts those received from the publishers. Replies to replay requests are
	// not among them.
	Messages uint64
	// Batches counts those delivered, live and by replay, each once. Of their events
	// Stored, Removed and Cleared count those of each kind, Skipped those left out.
	Batches uint64
	Stored  uint64
	Removed uint64
	Cleared uint64
	Skipped uint64
	// Duplicates counts batches that were read before, Rejected those that do not decode,
	// Refused messages that are no batch.
	Duplicates uint64
	Rejected   uint64
	Refused    uint64
	// Gaps counts the gaps reported, Missed the batches that they lack.
	Gaps   uint64
	Missed uint64
	// Restarts counts restarts of engines.
	Restarts uint64
	// Replays counts the repairs started, ReplaysDone and ReplaysFailed those that ended,
	// Replayed the batches that they brought.
	Replays       uint64
	ReplaysDone   uint64
	ReplaysFailed uint64
	Replayed      uint64
}

// Stats returns what was counted for a configured worker. ok is false where there is none
// of that name.
func (in *Ingest) Stats(worker string) (s WorkerStats, ok bool) {
	for _, w := range in.workers {
		if w.desc.Name == worker {
			return w.metrics.stats(), true
		}
	}
	return WorkerStats{}, false
}

func (m *workerMetrics) stats() WorkerStats {
	return WorkerStats{
		ConnectAttempts: value(m.connectAttempts),
		Connections:     value(m.connections),
		ConnectFailures: value(m.connectFailures),
		Disconnections:  value(m.disconnections),
		Messages:        value(m.messages),
		Batches:         value(m.batches),
		Stored:          value(m.stored),
		Removed:         value(m.removed),
		Cleared:         value(m.cleared),
		Skipped:         m.sum(m.all.skipped),
		Duplicates:      value(m.duplicates),
		Rejected:        m.sum(m.all.rejected),
		Refused:         m.sum(m.all.refused),
		Gaps:            value(m.gaps),
		Missed:          value(m.missed),
		Restarts:        value(m.restarts),
		Replays:         m.sum(m.all.replays),
		ReplaysDone:     value(m.replaysDone),
		ReplaysFailed:   value(m.replaysFailed),
		Replayed:        value(m.replayed),
	}
}

func value(m prometheus.Metric) uint64 {
	var d dto.Metric
	if m.Write(&d) != nil {
		return 0
	}
	return uint64(d.GetCounter().GetValue())
}

// sum returns what a vector has counted for the worker, over its other labels.
func (m *workerMetrics) sum(v *prometheus.CounterVec) (total uint64) {
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		v.Collect(all)
	}()
	for metric := range all {
		var d dto.Metric
		if metric.Write(&d) != nil {
			continue
		}
		for _, l := range d.GetLabel() {
			if l.GetName() == "worker" && l.GetValue() == m.worker {
				total += uint64(d.GetCounter().GetValue())
			}
		}
	}
	return total
}

// Reconnect closes the connections to a configured worker, which are then made anew as if
// they had broken. It may have to wait for a call of the worker's lane. It returns how
// many connections there were before; ok is false where there is no such worker.
func (in *Ingest) Reconnect(worker string) (connections uint64, ok bool) {
	for _, w := range in.workers {
		if w.desc.Name != worker {
			continue
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		connections = value(w.metrics.connections) // none is counted while the mutex is held
		for _, l := range w.links {
			l.breakOff()
		}
		return connections, true
	}
	return 0, false
}
