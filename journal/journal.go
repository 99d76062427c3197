// Package journal keeps the stream: every worker's entries in one order, each
// with a number to resume from.
//
// Encoded entries flow in and get the next seq; they flow out, in order, to any
// number of readers, from any seq that is still retained. The journal is
// append-only and contiguous, bounded in bytes and age, and what a reader was
// given is never written again.
package journal

import (
	"context"
	"errors"
	"fmt"
)

// Record is an entry that has no seq yet.
type Record struct {
	// Source is whose events they are. The journal keeps the pointer.
	Source *Source
	// Tiers are those of the events.
	Tiers Tiers
	// Body is a kvcast.v1.Entry in protobuf's wire format, without its field
	// seq. The journal copies it.
	Body []byte
}

// Source is a worker as entries name it. It is never changed.
type Source struct {
	Worker string
	Model  string
}

// Tiers is a set of tiers: bit n stands for tier n of kvcast.v1.Tier, and bit 0
// for events that have none.
type Tiers uint8

// TierBit is the set of one tier.
func TierBit(tier uint8) Tiers { return 1 << tier }

// Receipt is what an append gives: the entry's place, once it is known.
type Receipt struct {
	seq uint64
}

// Wait returns the entry's seq: 0 for the receipt of no append at all. It waits
// until the entry stands in the journal, or ctx is done.
func (r Receipt) Wait(context.Context) (uint64, error) { return r.seq, nil }

// Query says what to read.
type Query struct {
	// After is the seq before the first entry that is wanted.
	After uint64
	// Until is the last seq that is wanted; 0 means the newest.
	Until uint64
	// MaxBytes bounds what is returned; one entry is, whatever its size.
	MaxBytes int
	// Filter chooses among the entries; nil takes all. It is called under the
	// journal's lock, and must be quick.
	Filter Filter
}

// Filter tells what of an entry is wanted.
type Filter func(seq uint64, source *Source, tiers Tiers) Match

// Match is what a Filter says of an entry.
type Match uint8

// What is wanted of an entry: nothing, all of it, or some of its events.
const (
	MatchNone Match = iota
	MatchAll
	MatchSome
)

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

// Chunk is a run of entries, in order and without a hole but for those that a
// filter left out.
type Chunk struct {
	// Last is the seq up to which has been read; Query.After where nothing has. A
	// filter may have left all of it out.
	Last uint64
	// Entries is their number.
	Entries int
	// Cut tells that of some only a part is wanted (MatchSome).
	Cut bool
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
