// Package journal keeps every worker's entries in one replayable log.
//
// Encoded entries flow in, are acknowledged and get the next seq; they flow out in
// order to any number of readers, from any seq that is still retained. A journal is
// append-only and contiguous, and bounded in bytes and age. An entry is visible only
// once it is acknowledged, and what a reader was given is never written again.
// Package journaltest has the tests that every implementation passes.
package journal

import (
	"context"
	"errors"
	"fmt"
)

// Journal is the contract of every implementation. All methods are safe for
// concurrent use.
type Journal interface {
	// Append adds an entry. The appends of one Source take effect in the order of their
	// calls. The number of appends in flight, which are not acknowledged yet, is
	// bounded: Append blocks while it is reached, until ctx is done. It returns an error
	// where it knows at once that the entry is not appended; otherwise the Pending
	// tells. Once an append of a Source has failed, either way, all later ones of that
	// Source fail: an entry is never visible without those before it.
	Append(ctx context.Context, r Record) (Pending, error)
	// Read returns the entries that a query selects: as many as fit, but at least one
	// where there is one. With a filter it may return before any was found, with
	// Chunk.Last advanced. A position that cannot be read from is a *PositionError.
	Read(ctx context.Context, q Query) (Chunk, error)
	// Bounds returns what is retained now. It never blocks on a network or a disk.
	Bounds() Bounds
	// Changed returns a channel that is closed when Bounds().Newest next grows. To miss
	// nothing, call it before the Read that finds nothing. It never blocks.
	Changed() <-chan struct{}
	// Close waits until every append is acknowledged or has failed, or until ctx is
	// done, and then releases the journal's resources. Append and Read return ErrClosed
	// from then on.
	Close(ctx context.Context) error
}

// Causes of failed appends. Other errors are those of the storage.
var (
	// ErrClosed means that Close was called.
	ErrClosed = errors.New("journal is closed")
	// ErrFenced means that another instance has taken over the lease of the worker.
	ErrFenced = errors.New("lease lost: another instance appends for the worker")
	// ErrNoSpace means that the storage is full.
	ErrNoSpace = errors.New("storage of the journal is full")
)

// Record is an entry that has no seq yet.
type Record struct {
	// Source is the worker whose events they are. The journal keeps the pointer.
	Source *Source
	// Tiers are those of the events.
	Tiers Tiers
	// Body is a kvcast.v1.Entry in protobuf's wire format, without its field seq. It is
	// the caller's again when Append returns.
	Body []byte
}

// Source is a worker as entries name it. It is immutable. One that is appended for
// anew, after a failure, gets a new Source.
type Source struct {
	Worker string
	Model  string
}

// Tiers is a set of tiers: bit n stands for tier n of kvcast.v1.Tier, and bit 0 for
// events without a tier.
type Tiers uint8

// TierBit returns the set of one tier.
func TierBit(tier uint8) Tiers { return 1 << tier }

// Query selects what to read.
type Query struct {
	// After is the seq before the first entry wanted.
	After uint64
	// Until is the last seq wanted; 0 means the newest.
	Until uint64
	// MaxBytes bounds the bytes returned. One entry is returned whatever its size.
	MaxBytes int
	// Filter selects among the entries; nil selects all. It may be called under the
	// journal's lock: it must be quick, and not call the journal.
	Filter Filter
	// Slices is memory for Chunk.Slices, which are appended to it; it may be nil.
	Slices [][]byte
}

// Filter reports what of an entry is wanted.
type Filter func(seq uint64, source *Source, tiers Tiers) Match

// Match is what a Filter reports of an entry.
type Match uint8

// What is wanted of an entry: nothing, all of it, or some of its events.
const (
	MatchNone Match = iota
	MatchAll
	MatchSome
)

// Bounds are what a journal retains.
type Bounds struct {
	// Epoch is the random name of the journal's history.
	Epoch string
	// Oldest is the seq of the oldest entry retained, and Newest that of the newest
	// acknowledged. An empty journal has 1 and 0; one that has evicted every entry has
	// Newest + 1 and Newest.
	Oldest uint64
	Newest uint64
}

// Chunk is a run of entries, contiguous except for those that a filter excluded.
type Chunk struct {
	// Last is the seq up to which was read, and Query.After where nothing was.
	Last uint64
	// Entries is the number of entries.
	Entries int
	// Partial reports whether a filter returned MatchSome for any of them.
	Partial bool
	// Slices contain, one after another, the entries as elements of the field entries of
	// a response of kvcast.v1, tag and length included. The memory is the journal's: it
	// is never written again, and freed when nothing references it.
	Slices [][]byte
	// Bytes is the length of the slices together.
	Bytes int
}

var (
	// ErrCompacted means that the entry after the position is no longer retained.
	ErrCompacted = errors.New("position is no longer retained")
	// ErrAhead means that the position is beyond the newest entry.
	ErrAhead = errors.New("position is beyond the newest entry")
)

// PositionError is a position that cannot be read from. It unwraps to ErrCompacted or
// ErrAhead.
type PositionError struct {
	// After is the seq that was asked for.
	After uint64
	// Bounds are what was retained at that time.
	Bounds Bounds
	// Err is ErrCompacted or ErrAhead.
	Err error
}

// Error returns the seq and what is retained.
func (e *PositionError) Error() string {
	return fmt.Sprintf("read after seq %d: %v (oldest %d, newest %d)", e.After, e.Err, e.Bounds.Oldest, e.Bounds.Newest)
}

// Unwrap returns ErrCompacted or ErrAhead.
func (e *PositionError) Unwrap() error { return e.Err }

// CheckPosition returns a *PositionError unless a reader that has everything up to
// after can continue.
func (b Bounds) CheckPosition(after uint64) error {
	switch {
	case after > b.Newest:
		return &PositionError{After: after, Bounds: b, Err: ErrAhead}
	case after+1 < b.Oldest:
		return &PositionError{After: after, Bounds: b, Err: ErrCompacted}
	}
	return nil
}
