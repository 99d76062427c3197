package jetstream

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
)

// mode is what this process may do with the streams: all, if they are in a directory (directory); append the entries of the workers
// that it owns, if they are in Servers (shared); or read them (follower). Open decides it once.
type mode interface {
	streams
	writer
}

// newMode returns the mode of a journal that is configured.
func newMode(j *Journal) mode {
	switch {
	case j.cfg.Dir != "":
		return newDirectory(j)
	case j.cfg.Follow:
		return follower{newShared(j)}
	default:
		return newShared(j)
	}
}

// streams opens the streams, and knows which entries the stream must have.
type streams interface {
	// connect starts the embedded nats-server and connects to it, or connects to Servers.
	connect(ctx context.Context) error
	// createStream creates the stream of the entries, which does not exist.
	createStream(ctx context.Context) (streamState, error)
	// adoptStream configures an existing stream, and decides whether its epoch continues.
	adoptStream(ctx context.Context, info *jetstream.StreamInfo) (streamState, error)
	// openStores sets the checkpoints and the registrations of the journal.
	openStores(ctx context.Context) error

	// mark remembers the oldest entry of the stream, and checkRange returns an error if the entries that the stream has now are not
	// those that it must have.
	mark(first uint64)
	checkRange(first, last uint64) error
	// continueAfter is called when the mirror has the last entry of the stream, which was purged up to another one.
	continueAfter(epoch string, last, purged uint64) error
	// isPurged reports whether another process has removed an entry.
	isPurged(ctx context.Context, seq uint64) (bool, error)

	// endEpoch makes this process the only one that empties the stream of an epoch. renameEpoch then makes the others see that it
	// does so, and newest returns the newest entry that the stream must have had.
	endEpoch(ctx context.Context, epoch string) error
	renameEpoch(ctx context.Context, config *jetstream.StreamConfig) error
	newest() uint64

	// maintain is called once a second. An error fails the journal.
	maintain() error
	// purgeable returns the last entry that may be removed, given the last that the mirror has evicted and the last that the caller
	// permits. purging is called before entries are removed.
	purgeable(evicted, until uint64) uint64
	purging(until uint64) error
	// syncMetadata makes the configuration of the stream survive a crash of the machine.
	syncMetadata() error
	close() error
}

// writer appends entries, and ends what is in flight.
type writer interface {
	// start starts the loops of the journal.
	start()
	// push starts an append that has a slot. cancel makes the later ones of a source fail, since one before them was not started.
	push(r journal.Record, m *nats.Msg) (journal.Pending, error)
	cancel(source *journal.Source, err error)
	// onReply handles the answer to what was published.
	onReply(m *nats.Msg)
	// delivered handles an entry that was read from the stream as a message, which was stored at a time, and makes it visible by show.
	delivered(m *nats.Msg, source journal.Source, e *Entry, at time.Time, show func() error) error
	// reset forgets what the stream had, which now ends with an entry.
	reset(last uint64)
	// reconnected finds out what has become of the messages in flight after a loss of the connection.
	reconnected()
	// oldest returns the time since which the append that has waited longest waits; zero if only Journal.stall knows it.
	oldest() time.Time
	// fail ends all appends.
	fail(err error)
}

// admission decides which appends are taken: as many as there are slots, until Close or a failure.
type admission struct {
	slots   chan struct{}   // has one element per append in flight
	closing context.Context // ends with Close, which calls endAdmission
	failed  context.Context // ends with the first failure as its cause

	endAdmission context.CancelFunc // makes later appends fail
	failing      sync.Once
	end          context.CancelCauseFunc // ends failed
}

func newAdmission(inFlight int) *admission {
	a := &admission{slots: make(chan struct{}, inFlight)}
	a.closing, a.endAdmission = context.WithCancel(context.Background())
	a.failed, a.end = context.WithCancelCause(context.Background())
	return a
}

// acquire waits for a slot. The error says why there is none.
func (a *admission) acquire(ctx context.Context) error {
	select {
	case a.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-a.closing.Done():
		return journal.ErrClosed
	case <-a.Failed():
		return a.Err()
	}
}

// refusal returns why no append is taken any more; nil if appends are.
func (a *admission) refusal() error {
	if a.closing.Err() != nil {
		return journal.ErrClosed
	}
	return a.Err()
}

// fail records the first failure. It reports whether this is the first.
func (a *admission) fail(err error) (first bool) {
	a.failing.Do(func() {
		a.end(err)
		first = true
	})
	return first
}

// Err returns the error that has failed the journal, or nil.
func (a *admission) Err() error { return context.Cause(a.failed) }

// Failed returns a channel that is closed when the journal has failed; see Err.
func (a *admission) Failed() <-chan struct{} { return a.failed.Done() }

// InFlight returns the number of appends that are not acknowledged yet.
func (a *admission) InFlight() int { return len(a.slots) }

// base is what times of a stall are relative to.
var base = time.Now()

// stall is since when appends are in flight or the connection is lost, and nothing is acknowledged: the nanoseconds after base.
// 0: there is progress, or nothing to do.
type stall struct{ since atomic.Int64 }

// begin records that progress is missing from now on, unless it is already.
func (s *stall) begin() { s.since.CompareAndSwap(0, int64(time.Since(base))) }

// restart records progress while there is more to do.
func (s *stall) restart() { s.since.Store(int64(time.Since(base))) }

// end records that there is nothing to do.
func (s *stall) end() { s.since.Store(0) }

// began returns since when there is no progress.
func (s *stall) began() time.Time {
	if since := s.since.Load(); since != 0 {
		return base.Add(time.Duration(since))
	}
	return time.Time{}
}
