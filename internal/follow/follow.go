// Package follow applies a journal's entries to an index.
//
// Entries flow in from a journal; the same entries flow out to readers, up to the last one that the index has applied. Guarantee: a reader
// that has an entry finds it in every later answer of the index.
package follow

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal is what a Follower reads.
type Journal interface {
	journal.Reader
	// Pin makes the journal retain all entries after a seq until the next call. Appends may wait for it.
	Pin(seq uint64)
	Bytes() int
	EvictedBytes() int
}

// turnBytes bounds the entries that a Follower applies while readers of the index wait, except for a single larger
// entry: some 1,000 blocks.
const turnBytes = 16 << 10

// Follower applies a journal's entries to an index, and shows readers the journal up to the last entry applied. A
// reader that has an entry hence finds it in every later answer of the index.
type Follower struct {
	journal Journal
	index   *index.Index
	slices  [][]byte // reused by turn
	joined  []byte   // reused by turn
	times   []index.EntryTimes
	next    uint64 // that turn applies
	delays  Delays
	observe func(index.Origin, *kvcastv1.RouterEvent)

	applied atomic.Uint64
	advance func()        // sets applied to next
	mu      sync.Mutex    // guards changed
	changed chan struct{} // closed when applied next grows; nil if no reader waits
}

// Delays receives how long it took until readers could see an engine's batch. A nil function receives nothing.
type Delays struct {
	// Receipt is called with the time since the receipt of the oldest batch of those that are applied together.
	Receipt func(time.Duration)
	// Engine is called with the time since the engine's own time of each batch that has one after 1970. It is negative if the
	// engine's clock is ahead of this machine's.
	Engine func(time.Duration)
}

// New returns a follower of a journal's entries after the last one that the index has applied when Run is called.
// The journal must retain the entries after the last one that it has applied now. Run calls delays.
func New(j Journal, x *index.Index, delays Delays) *Follower {
	f := &Follower{journal: j, index: x, delays: delays}
	f.advance = func() { f.applied.Store(f.next) }
	f.applied.Store(x.Seq())
	j.Pin(x.Seq())
	return f
}

// Observe makes Run call a function with each event that is neither Stored nor Removed, while it holds the index's lock. The
// function must not call the index, and must not keep the event. It must be set before Run.
func (f *Follower) Observe(observe func(index.Origin, *kvcastv1.RouterEvent)) { f.observe = observe }

// Index returns the index.
func (f *Follower) Index() *index.Index { return f.index }

// Wait waits until the entries up to a seq are applied, or until ctx ends.
func (f *Follower) Wait(ctx context.Context, seq uint64) error {
	for {
		changed := f.Changed()
		if f.applied.Load() >= seq {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Bytes returns the size of the retained entries.
func (f *Follower) Bytes() int { return f.journal.Bytes() }

// EvictedBytes returns the size of the evicted entries that streams still reference.
func (f *Follower) EvictedBytes() int { return f.journal.EvictedBytes() }

// Run applies entries until ctx ends, and then those that are left. While there are none, it releases the memory of
// blocks that were cleared or removed. It returns an error if the journal cannot be read,
// after which the state is outdated.
func (f *Follower) Run(ctx context.Context) error {
	f.index.Observe(f.observe)                            // not before: a recovery repeats events
	if seq := f.index.Seq(); f.applied.Swap(seq) != seq { // the index was restored after NewFollower
		f.wakeReaders()
	}
	reading := context.WithoutCancel(ctx)
	for {
		changed, ended := f.journal.Changed(), false
		select {
		case <-ctx.Done():
			ended = true
		default:
		}
		switch more, err := f.turn(reading); {
		case err != nil:
			f.journal.Pin(math.MaxUint64) // appends must not wait for a follower that has ended
			return err
		case more:
			continue
		}
		if ended { // and the turn has found no further entry
			return nil
		}
		if f.index.Sweep() { // no entry may follow for a long time
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// turn applies the next entries, and reports whether there were any.
func (f *Follower) turn(ctx context.Context) (more bool, err error) {
	before := f.applied.Load()
	chunk, err := f.journal.Read(ctx, journal.Query{After: before, MaxBytes: turnBytes, Slices: f.slices[:0]})
	if err != nil || chunk.Last == before {
		return false, err
	}
	f.slices = chunk.Slices
	entries := f.slices[0]
	if len(f.slices) > 1 { // an entry may be in two slices
		f.joined = f.joined[:0]
		for _, s := range f.slices {
			f.joined = append(f.joined, s...)
		}
		entries = f.joined
	}
	f.next = chunk.Last
	f.times, err = f.index.ApplyEncoded(entries, f.times[:0], f.advance)
	clear(f.slices) // an idle follower must not reference entries
	if cap(f.joined) > 4*turnBytes {
		f.joined = nil
	}
	if err != nil {
		return false, err
	}
	f.journal.Pin(chunk.Last)
	f.wakeReaders()
	f.reportDelays()
	return true, nil
}

// reportDelays reports the delays of the entries that were applied last.
func (f *Follower) reportDelays() {
	now := time.Now().UnixNano()
	isReported := f.delays.Receipt == nil
	for _, t := range f.times {
		if t.Ingest != 0 && !isReported {
			f.delays.Receipt(max(0, time.Duration(now-t.Ingest)))
			isReported = true
		}
		if t.Engine > 0 && f.delays.Engine != nil {
			f.delays.Engine(time.Duration(now - t.Engine))
		}
	}
}

func (f *Follower) wakeReaders() {
	f.mu.Lock()
	changed := f.changed
	f.changed = nil
	f.mu.Unlock()
	if changed != nil {
		close(changed)
	}
}

// Bounds returns the journal's bounds, with the last entry applied as the newest.
func (f *Follower) Bounds() journal.Bounds {
	b := f.journal.Bounds()
	b.Newest = f.applied.Load() // after the journal's bounds, since entries up to it may be evicted
	return b
}

// Read returns entries up to the last one applied; see journal.Journal.
func (f *Follower) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	applied := f.applied.Load()
	switch {
	case q.After > applied:
		return journal.Chunk{Last: q.After, Slices: q.Slices}, &journal.PositionError{After: q.After, Bounds: f.Bounds(), Err: journal.ErrAhead}
	case q.After == applied: // the journal would take an Until of 0 for its newest entry
		return journal.Chunk{Last: q.After, Slices: q.Slices}, nil
	case q.Until == 0 || q.Until > applied:
		q.Until = applied
	}
	return f.journal.Read(ctx, q)
}

// Changed returns a channel that is closed when Bounds().Newest next grows. A reader that waits for entries calls
// Changed before Bounds or Read.
func (f *Follower) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.changed
}
