// Package journal keeps the entries of all workers in one replayable log.
//
// Encoded entries flow in. Each gets the next seq and is acknowledged. Entries flow out to any number of readers, in order, from any
// retained seq. Guarantee: seqs are contiguous; a reader sees only acknowledged entries; memory returned to a reader is never overwritten;
// the log is bounded in bytes and age. Package journaltest has the tests that every implementation must pass.
package journal

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Reader reads a log of entries. All methods are safe for concurrent use.
type Reader interface {
	// Read returns the first entries that a query selects: as many as fit into Query.MaxBytes, but at least one if there is one. It does not
	// wait for entries. With a filter, it may return no entry and a larger Chunk.Last, after it has examined many entries. The error is a
	// *PositionError if the entry after Query.After is not retained.
	Read(ctx context.Context, q Query) (Chunk, error)
	// Bounds returns the epoch and the range of retained entries. It never blocks on a network or a disk.
	Bounds() Bounds
	// Changed returns a channel that is closed when Bounds().Newest next grows. A reader that waits for entries
	// calls Changed before Read, so that it misses no entry. Changed never blocks.
	Changed() <-chan struct{}
}

// Journal is a log of entries. All methods are safe for concurrent use.
type Journal interface {
	Reader
	// Append starts to append an entry. The entries of one Source are appended in the order of the calls. The number of appends that are not
	// acknowledged yet is bounded: at the bound, Append blocks until ctx ends. Append returns an error if the append has failed at once;
	// otherwise Pending.Wait returns the result. After a failed append, all later appends of the Source fail, so that no entry is visible
	// without the earlier entries of its Source.
	Append(ctx context.Context, r Record) (Pending, error)
	// Close waits until every append is acknowledged or has failed, or until ctx ends, and then releases the
	// journal's resources. Append and Read then return ErrClosed.
	Close(ctx context.Context) error
}

// Causes of failed appends. All other errors come from the storage.
var (
	// ErrClosed means that Close was called.
	ErrClosed = errors.New("journal is closed")
	// ErrFenced means that this instance does not own the worker, or not any more: another one appends its entries.
	ErrFenced = errors.New("another instance owns the worker")
	// ErrNoSpace means that the storage is full.
	ErrNoSpace = errors.New("storage of the journal is full")
)

// Record is an entry to append, without its seq.
type Record struct {
	// Source is the worker that the events belong to. The journal keeps the pointer.
	Source *Source
	// Tiers is the set of the events' tiers.
	Tiers kvblock.Tiers
	// Body is an encoded kvcast.v1.Entry without the field seq. The caller may reuse the memory when Append returns.
	Body []byte
	// State is what the pipeline needs beside Body to recover the worker's state; nil if it needs nothing more. Routers
	// do not get it. A journal that is not durable ignores it. The caller may reuse the memory when Append returns.
	State []byte
}

// Source is a worker in entries. It is immutable. After a failed append, the appends of the worker need a new Source.
type Source struct {
	Worker string
	Model  string
}

// Query selects what to read.
type Query struct {
	// After is the seq before the first entry to read.
	After uint64
	// Until is the last seq to read; 0 means the newest.
	Until uint64
	// MaxBytes bounds Chunk.Bytes, except for a single entry that is larger.
	MaxBytes int
	// Filter selects entries; nil selects all. Read may call it while it holds the journal's lock, so it must be
	// fast and must not call the journal.
	Filter Filter
	// Slices is memory for Chunk.Slices: Read appends to it. It may be nil.
	Slices [][]byte
}

// Filter reports whether an entry is selected, given the tiers of its events.
type Filter func(seq uint64, source *Source, tiers kvblock.Tiers) Match

// Match is the part of an entry that a Filter selects: no event, all events, or some events.
type Match uint8

// The values of Match.
const (
	MatchNone Match = iota
	MatchAll
	MatchSome
)

// Bounds is the range of entries that a journal retains.
type Bounds struct {
	// Epoch is the random name of the journal's history.
	Epoch string
	// Oldest is the seq of the oldest retained entry, and Newest the seq of the newest acknowledged entry. If no
	// entry is retained, Oldest is Newest + 1. A new journal has Oldest 1 and Newest 0.
	Oldest uint64
	Newest uint64
}

// Chunk has the entries that one Read returned. They are contiguous except for entries that a filter excluded.
type Chunk struct {
	// Last is the seq of the last entry that was examined; Query.After if none was.
	Last uint64
	// Entries is the number of entries.
	Entries int
	// Partial reports whether the filter returned MatchSome for one of the entries.
	Partial bool
	// Slices are, joined, the encoded field entries of a kvcast.v1.SubscribeResponse: each entry with its tag and length. Readers must not
	// modify the memory. The journal never overwrites it, and it is freed when nothing references it.
	Slices [][]byte
	// Bytes is the total length of the slices.
	Bytes int
}

var (
	// ErrCompacted means that the entry after the position is no longer retained.
	ErrCompacted = errors.New("position is no longer retained")
	// ErrAhead means that the position is beyond the newest entry.
	ErrAhead = errors.New("position is beyond the newest entry")
)

// PositionError reports a seq after which the journal cannot be read. It unwraps to ErrCompacted or ErrAhead.
type PositionError struct {
	// After is the requested seq.
	After uint64
	// Bounds is the retained range at the time of the error.
	Bounds Bounds
	// Err is ErrCompacted or ErrAhead.
	Err error
}

// Error implements error.
func (e *PositionError) Error() string {
	return fmt.Sprintf("read after seq %d: %v (oldest %d, newest %d)", e.After, e.Err, e.Bounds.Oldest, e.Bounds.Newest)
}

// Unwrap returns ErrCompacted or ErrAhead.
func (e *PositionError) Unwrap() error { return e.Err }

// CheckPosition returns a *PositionError unless a reader of all entries up to after can read the next one.
func (b Bounds) CheckPosition(after uint64) error {
	switch {
	case after > b.Newest:
		return &PositionError{After: after, Bounds: b, Err: ErrAhead}
	case after+1 < b.Oldest:
		return &PositionError{After: after, Bounds: b, Err: ErrCompacted}
	}
	return nil
}
