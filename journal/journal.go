// Package journal keeps the stream: every worker's entries in one order, each
// with a number to resume from.
//
// Encoded entries flow in and get the next seq; they flow out, in order, to any
// number of readers, from any seq that is still retained. The journal is
// append-only and contiguous, bounded in bytes and age, and what a reader was
// given is never written again.
package journal

import (
	"errors"
	"fmt"
)

// Record is an entry that has no seq yet.
type Record struct {
	// Body is a kvcast.v1.Entry in protobuf's wire format, without its field
	// seq. The journal copies it.
	Body []byte
}

// Bounds tell what a journal retains.
type Bounds struct {
	// Epoch is the random name of the journal's life.
	Epoch string
	// Oldest is the seq of the oldest entry retained, and Newest that of the
	// newest appended. An empty journal has 1 and 0; one that retains nothing
	// any more has Newest + 1 and Newest.
	Oldest uint64
	Newest uint64
}

// Chunk is a run of entries, in order and without a hole.
type Chunk struct {
	// First and Last are the seqs of its first and last entry; both are 0 where
	// there is none.
	First uint64
	Last  uint64
	// Slices hold, one after another, the entries as elements of a repeated
	// field number 1, tag and length included, which is what the responses of
	// kvcast.v1 have. They are the journal's memory: never written again, and
	// kept alive by whoever holds them.
	Slices [][]byte
	// Bytes is their length together.
	Bytes int
}

var (
	// ErrCompacted means that the entry after the position is no longer
	// retained.
	ErrCompacted = errors.New("position is no longer retained")
	// ErrAhead means that the position is beyond the newest entry.
	ErrAhead = errors.New("position is beyond the newest entry")
)

// PositionError is a position that can not be read from. It unwraps to
// ErrCompacted or ErrAhead.
type PositionError struct {
	// After is the seq that was asked for.
	After uint64
	// Bounds are what was retained at that time.
	Bounds Bounds
	// Err is ErrCompacted or ErrAhead.
	Err error
}

// Error tells the seq and what is retained.
func (e *PositionError) Error() string {
	return fmt.Sprintf("read after seq %d: %v (oldest %d, newest %d)", e.After, e.Err, e.Bounds.Oldest, e.Bounds.Newest)
}

// Unwrap returns ErrCompacted or ErrAhead.
func (e *PositionError) Unwrap() error { return e.Err }

// check tells whether a reader that has everything up to after can go on.
func (b Bounds) check(after uint64) error {
	switch {
	case after > b.Newest:
		return &PositionError{After: after, Bounds: b, Err: ErrAhead}
	case after+1 < b.Oldest:
		return &PositionError{After: after, Bounds: b, Err: ErrCompacted}
	}
	return nil
}
