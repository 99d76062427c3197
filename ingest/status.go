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

// board is where publishers post how they are doing, for anybody to read.
type board struct {
	mu      sync.Mutex // guards all below
	notices []*posted
}

// posted is what one publisher posts: about is never changed, the rest only by
// the publisher's reader. replay takes the place of about's.
type posted struct {
	about   SourceStatus
	replay  atomic.Pointer[string]
	state   atomic.Uint32
	started atomic.Bool
	lastSeq atomic.Uint64
}

func (b *board) post(about SourceStatus) *posted {
	p := &posted{about: about}
	p.replay.Store(&about.Replay)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.notices = append(b.notices, p)
	return p
}

// remove takes down what a publisher posted.
func (b *board) remove(p *posted) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.notices = slices.DeleteFunc(b.notices, func(q *posted) bool { return q == p })
}

// Sources returns every source that is read, in the order in which they became
// known.
func (in *Ingest) Sources() []SourceStatus {
	b := &in.shared.board
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]SourceStatus, len(b.notices))
	for i, p := range b.notices {
		all[i] = p.about
		all[i].Replay = *p.replay.Load()
		all[i].State = SourceState(p.state.Load())
		all[i].LastSeq = p.lastSeq.Load()
		all[i].Started = p.started.Load()
	}
	return all
}
