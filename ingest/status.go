package ingest

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvcast/kvcast/feed"
)

// SourceStatus is a source of a worker, at one dp rank, as it is now.
type SourceStatus struct {
	Worker string
	Engine feed.Engine
	// Endpoint is what it is read at, and Replay its replay socket; Replay is empty
	// where there is none.
	Endpoint string
	Replay   string
	// Rank is the dp rank it was configured or first heard as.
	Rank  uint32
	State SourceState
	// Started tells that a batch has been read; LastSeq is that of the last.
	Started bool
	LastSeq uint64
}

// SourceState is how far the reading of a source has come.
type SourceState uint8

// The states.
const (
	// SourceConnecting: there is no connection yet, or no longer.
	SourceConnecting SourceState = iota + 1
	// SourceCatchingUp: what the engine remembers is read, before live batches.
	SourceCatchingUp
	// SourceLive: batches are handed on as they come.
	SourceLive
	// SourceRepairing: what was lost, or may have been, is fetched, and live batches
	// are held back meanwhile.
	SourceRepairing
	// SourceSuspect: nothing came for too long, and it did not answer when asked.
	SourceSuspect
	// SourceStopped: it is read no longer.
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
