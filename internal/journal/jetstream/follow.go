package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// ErrPurged is an error of Load with Config.Servers: entries were removed since Open or Mark. The caller calls Mark, reads
// the checkpoints again, and calls Load again.
var ErrPurged = errors.New("entries were removed while checkpoints and entries were read")

// ErrOutdated means that the process has stood still for longer than the stream keeps entries. The journal must be opened
// again, and the checkpoints read.
var ErrOutdated = errors.New("journal is outdated")

const (
	// deliveryTimeout is how long a consumer may deliver neither entries nor heartbeats.
	deliveryTimeout = 6 * heartbeat
	// checkInterval is the least time between two looks at the stream while its entries are followed.
	checkInterval = time.Second
)

// Mark remembers the oldest entry of the stream, for a Load with Config.Servers. Checkpoints that are read between Mark
// and a Load without error are complete together with the entries of Load.
func (j *Journal) Mark(ctx context.Context) error {
	_, info, err := j.client.StreamInfo(ctx)
	if err != nil {
		return fmt.Errorf("read the state of %s: %w", j.client.Place(), err)
	}
	j.mode.mark(firstSeq(info))
	return nil
}

// Newest returns the newest seq of the stream, which a journal in Servers may not have read yet. It is an error if the NATS
// server that answers may no longer be the stream's leader, since another may have accepted later entries.
func (j *Journal) Newest(ctx context.Context) (uint64, error) {
	_, info, err := j.client.StreamInfo(ctx)
	if err == nil {
		err = client.HearsMajority(info.Cluster)
	}
	if err != nil {
		return 0, fmt.Errorf("read the state of %s: %w", j.client.Place(), err)
	}
	return info.State.LastSeq, nil
}

// First returns the seq of the oldest entry of the stream, or of the next one if it has none.
func (j *Journal) First(ctx context.Context) (uint64, error) {
	_, info, err := j.client.StreamInfo(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the state of %s: %w", j.client.Place(), err)
	}
	return firstSeq(info), nil
}

// tail reads the entries that any process appends to a stream of Servers.
type tail struct {
	j           *Journal
	suspect     chan<- struct{}                      // gets an element when deliveries were lost
	firstRecord func(limit uint64) uint64            // see shared
	lost        func(lost error, ended uint64) error // see beginEpoch

	marked    uint64                            // oldest seq of the stream when it was opened, or by Mark
	following atomic.Pointer[nats.Subscription] // of the consumer that is followed

	// All below is used by the loop alone, and read by Load before it.
	lacking  int                          // consecutive answers that the stream lacks entries that it must have
	seen     struct{ first, last uint64 } // seqs of the stream when the loop last looked
	read     lastRead                     // the newest entry that was read
	verified bool                         // read was found in the stream since the loop has a consumer
}

// lastRead is an entry as the stream has it: the time at which it was stored tells it from any other that has its seq later.
type lastRead struct {
	seq uint64
	at  time.Time
}

// loop reads the entries after those that Load has read, until the journal fails or ends. It reads from a new
// consumer when one is interrupted.
func (t *tail) loop() {
	sources := make(map[journal.Source]*journal.Source)
	for t.j.ctx.Err() == nil {
		err := t.follow(sources)
		if t.j.ctx.Err() != nil || t.j.Err() != nil {
			return
		}
		if errors.Is(err, ErrUnreadable) || errors.Is(err, ErrOutdated) || errors.Is(err, journal.ErrFenced) {
			t.j.fail(err)
			return
		}
		signal(t.suspect) // what is in flight may be lost
		t.j.log.Debug("Following the stream is interrupted.", "error", err)
		select {
		case <-time.After(heartbeat):
		case <-t.j.ctx.Done():
		}
	}
}

// follow reads entries through one consumer until it is interrupted.
func (t *tail) follow(sources map[journal.Source]*journal.Source) error {
	t.verified = false // the servers may have been restarted from older files
	s, err := t.check()
	if err != nil {
		return err
	}
	l := &loader{j: t.j, stream: s, sources: sources, next: t.j.mirror.Load().Bounds().Newest + 1}
	return t.j.consume(t.j.ctx, s, l.next, "", func(sub *nats.Subscription) error {
		t.following.Store(sub)
		checked := time.Now()
		for t.j.ctx.Err() == nil {
			m, err := sub.NextMsg(deliveryTimeout)
			if err != nil {
				return err
			}
			if err := l.handle(t.j.ctx, m); err != nil {
				return err
			}
			if time.Since(checked) < checkInterval {
				continue
			}
			if _, err := t.check(); err != nil {
				return err
			}
			checked = time.Now()
		}
		return t.j.ctx.Err()
	})
}

// check returns an error if the stream does not answer, and an ErrUnreadable or ErrFenced if it is not the one whose
// entries were read any more.
func (t *tail) check() (jetstream.Stream, error) {
	s, info, err := t.j.client.StreamInfo(t.j.ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("%w: %s is gone", ErrUnreadable, t.j.client.Place())
	}
	if err != nil {
		t.j.stall.begin()
		return nil, err
	}
	t.j.stall.end()
	b := t.j.mirror.Load().Bounds()
	first, last, seen := firstSeq(info), info.State.LastSeq, t.seen
	t.seen.first, t.seen.last = first, last
	var lost error
	ended := uint64(0) // the newest entry that is lost, if the stream ends before it
	switch epoch := info.Config.Metadata[metadataEpoch]; {
	case epoch != b.Epoch:
		return nil, fmt.Errorf("%w: %s has the new epoch %q", journal.ErrFenced, t.j.client.Place(), epoch)
	case last < b.Newest:
		ended = b.Newest
		lost = fmt.Errorf("%w: %s has lost the entries %d to %d", ErrUnreadable, t.j.client.Place(), last+1, b.Newest)
	case first > b.Newest+1:
		return nil, fmt.Errorf("%w: the entries %d to %d of %s were removed before they were read", ErrOutdated, b.Newest+1, first-1, t.j.client.Place())
	case seen.last <= b.Newest && seen.first > t.firstRecord(seen.first), info.State.Msgs < last+1-first:
		// No instance removes the last record of a worker that has an owner, or an entry after one that it keeps.
		lost = fmt.Errorf("%w: entries of %s were removed that kvcast needs: somebody has purged it", ErrUnreadable, t.j.client.Place())
	default:
		if lost, err = t.verify(s, b.Newest); err != nil {
			return nil, err
		}
	}
	if lost == nil {
		if seen.last <= b.Newest { // else it is not known yet
			t.lacking = 0
		}
		return s, nil
	}
	if t.lacking++; t.lacking < lackingChecks { // a former leader may have answered
		return nil, errors.New(lost.Error()) // not an ErrUnreadable yet
	}
	return nil, t.lost(lost, ended)
}

// beginEpoch begins a new epoch, since the stream has lost entries, and ended before the last of these if that is not 0. It returns
// the error for the journal.
//
// No seq may be used twice in an epoch, and the checkpoints may have seen the entries that are lost. Who knows of the loss stays
// until the epoch is another one.
func (t *tail) beginEpoch(lost error, ended uint64) error {
	if _, _, failed := t.j.emptyStream(t.j.ctx, ended); failed != nil {
		t.j.log.Warn("The stream has lost entries, and needs a new epoch.", "error", failed)
		return fmt.Errorf("begin a new epoch: %v", failed) //nolint:errorlint // a later check finds whether another instance has
	}
	return fmt.Errorf("%w; it continues in a new epoch, without entries", lost)
}

// verify returns in lost that the stream has another entry in place of the newest one that was read: it has lost entries, and others were
// appended since.
func (t *tail) verify(s jetstream.Stream, newest uint64) (lost, err error) {
	if t.verified || newest == 0 || t.read.seq != newest {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(t.j.ctx, client.RequestTimeout)
	defer cancel()
	m, err := s.GetMsg(ctx, newest)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound): // it was removed
	case err != nil:
		return nil, err
	case !m.Time.Equal(t.read.at):
		return fmt.Errorf("%w: entry %d of %s is another one than was read: the stream has lost entries, and others were appended since",
			ErrUnreadable, newest, t.j.client.Place()), nil
	}
	t.verified = true
	return nil, nil
}

// lackingChecks is the number of consecutive answers, some 500 ms apart, after which the journal believes that the stream has lost
// entries.
const lackingChecks = 5
