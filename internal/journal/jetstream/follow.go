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

// tail is how far a journal has read the entries that any process appends to a stream of Servers.
type tail struct {
	marked    uint64                            // oldest seq of the stream when it was opened, or by Mark
	following atomic.Pointer[nats.Subscription] // of the consumer that is followed

	// All below is used by readLoop alone, and read by Load before it.
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

// readLoop reads the entries after those that Load has read, until the journal fails or ends. It reads from a new
// consumer when one is interrupted.
func (s *shared) readLoop() {
	sources := make(map[journal.Source]*journal.Source)
	for s.j.ctx.Err() == nil {
		err := s.follow(sources)
		if s.j.ctx.Err() != nil || s.j.Err() != nil {
			return
		}
		if errors.Is(err, ErrUnreadable) || errors.Is(err, ErrOutdated) || errors.Is(err, journal.ErrFenced) {
			s.j.fail(err)
			return
		}
		signal(s.suspect) // what is in flight may be lost
		s.j.log.Debug("Following the stream is interrupted.", "error", err)
		select {
		case <-time.After(heartbeat):
		case <-s.j.ctx.Done():
		}
	}
}

// follow reads entries through one consumer until it is interrupted.
func (s *shared) follow(sources map[journal.Source]*journal.Source) error {
	s.verified = false // the servers may have been restarted from older files
	stream, err := s.checkStream()
	if err != nil {
		return err
	}
	l := &loader{j: s.j, stream: stream, sources: sources, next: s.j.mirror.Load().Bounds().Newest + 1}
	return s.j.consume(s.j.ctx, stream, l.next, "", func(sub *nats.Subscription) error {
		s.following.Store(sub)
		checked := time.Now()
		for s.j.ctx.Err() == nil {
			m, err := sub.NextMsg(deliveryTimeout)
			if err := l.handleNext(s.j.ctx, m, err); err != nil {
				return err
			}
			if time.Since(checked) < checkInterval {
				continue
			}
			if _, err := s.checkStream(); err != nil {
				return err
			}
			checked = time.Now()
		}
		return s.j.ctx.Err()
	})
}

// checkStream returns an error if the stream does not answer, and an ErrUnreadable or ErrFenced if it is not the one whose
// entries were read any more.
func (s *shared) checkStream() (jetstream.Stream, error) {
	stream, info, err := s.j.client.StreamInfo(s.j.ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("%w: %s is gone", ErrUnreadable, s.j.client.Place())
	}
	if err != nil {
		s.j.stall.begin()
		return nil, err
	}
	s.j.stall.end()
	b := s.j.mirror.Load().Bounds()
	first, last, seen := firstSeq(info), info.State.LastSeq, s.seen
	s.seen.first, s.seen.last = first, last
	var lost error
	ended := uint64(0) // the newest entry that is lost, if the stream ends before it
	switch epoch := info.Config.Metadata[metadataEpoch]; {
	case epoch != b.Epoch:
		return nil, fmt.Errorf("%w: %s has the new epoch %q", journal.ErrFenced, s.j.client.Place(), epoch)
	case last < b.Newest:
		ended = b.Newest
		lost = fmt.Errorf("%w: %s has lost the entries %d to %d", ErrUnreadable, s.j.client.Place(), last+1, b.Newest)
	case first > b.Newest+1:
		return nil, fmt.Errorf("%w: the entries %d to %d of %s were removed before they were read", ErrOutdated, b.Newest+1, first-1, s.j.client.Place())
	case seen.last <= b.Newest && seen.first > s.firstRecord(seen.first), info.State.Msgs < last+1-first:
		// No instance removes the last record of a worker that has an owner, or an entry after one that it keeps.
		lost = fmt.Errorf("%w: entries of %s were removed that kvcast needs: somebody has purged it", ErrUnreadable, s.j.client.Place())
	default:
		if lost, err = s.verify(stream, b.Newest); err != nil {
			return nil, err
		}
	}
	if lost == nil {
		if seen.last <= b.Newest { // else it is not known yet
			s.lacking = 0
		}
		return stream, nil
	}
	if s.lacking++; s.lacking < lackingChecks { // a former leader may have answered
		return nil, errors.New(lost.Error()) // not an ErrUnreadable yet
	}
	if s.j.cfg.Follow { // a process that appends begins the epoch
		return nil, lost
	}
	return nil, s.beginEpoch(lost, ended)
}

// beginEpoch begins a new epoch, since the stream has lost entries, and ended before the last of these if that is not 0. It returns
// the error for the journal.
//
// No seq may be used twice in an epoch, and the checkpoints may have seen the entries that are lost. Who knows of the loss stays
// until the epoch is another one.
func (s *shared) beginEpoch(lost error, ended uint64) error {
	if _, _, failed := s.j.emptyStream(s.j.ctx, ended); failed != nil {
		s.j.log.Warn("The stream has lost entries, and needs a new epoch.", "error", failed)
		return fmt.Errorf("begin a new epoch: %v", failed) //nolint:errorlint // a later check finds whether another instance has
	}
	return fmt.Errorf("%w; it continues in a new epoch, without entries", lost)
}

// verify returns in lost that the stream has another entry in place of the newest one that was read: it has lost entries, and others were
// appended since.
func (s *shared) verify(stream jetstream.Stream, newest uint64) (lost, err error) {
	if s.verified || newest == 0 || s.read.seq != newest {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(s.j.ctx, client.RequestTimeout)
	defer cancel()
	m, err := stream.GetMsg(ctx, newest)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound): // it was removed
	case err != nil:
		return nil, err
	case !m.Time.Equal(s.read.at):
		return fmt.Errorf("%w: entry %d of %s is another one than was read: the stream has lost entries, and others were appended since",
			ErrUnreadable, newest, s.j.client.Place()), nil
	}
	s.verified = true
	return nil, nil
}

// lackingChecks is the number of consecutive answers, some 500 ms apart, after which the journal believes that the stream has lost entries.
const lackingChecks = 5
