package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// ErrPurged is an error of Load with Config.Servers: entries were removed since Open or Mark. The caller calls Mark, reads
// the checkpoints again, and calls Load again.
var ErrPurged = errors.New("entries were removed while checkpoints and entries were read")

var errFollowing = errors.New("the journal follows another process, and appends no entries")

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
	j.first = firstSeq(info)
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

// followLoop reads the entries after those that Load has read, until the journal fails or ends. It reads from a new
// consumer when one is interrupted.
func (j *Journal) followLoop() {
	sources := make(map[journal.Source]*journal.Source)
	for j.ctx.Err() == nil {
		err := j.follow(sources)
		if j.ctx.Err() != nil || j.Err() != nil {
			return
		}
		if errors.Is(err, ErrUnreadable) || errors.Is(err, ErrOutdated) || errors.Is(err, journal.ErrFenced) {
			j.fail(err)
			return
		}
		signal(j.suspect) // what is in flight may be lost
		j.log.Debug("Following the stream is interrupted.", "error", err)
		select {
		case <-time.After(heartbeat):
		case <-j.ctx.Done():
		}
	}
}

// follow reads entries through one consumer until it is interrupted.
func (j *Journal) follow(sources map[journal.Source]*journal.Source) error {
	j.verified = false // the servers may have been restarted from older files
	s, err := j.check()
	if err != nil {
		return err
	}
	l := &loader{j: j, stream: s, sources: sources, next: j.mirror.Load().Bounds().Newest + 1}
	return j.consume(j.ctx, s, l.next, "", func(sub *nats.Subscription) error {
		j.following.Store(sub)
		checked := time.Now()
		for j.ctx.Err() == nil {
			m, err := sub.NextMsg(deliveryTimeout)
			if err != nil {
				return err
			}
			if err := l.handle(j.ctx, m); err != nil {
				return err
			}
			if time.Since(checked) < checkInterval {
				continue
			}
			if _, err := j.check(); err != nil {
				return err
			}
			checked = time.Now()
		}
		return j.ctx.Err()
	})
}

// check returns an error if the stream does not answer, and an ErrUnreadable or ErrFenced if it is not the one whose
// entries were read any more.
func (j *Journal) check() (jetstream.Stream, error) {
	s, info, err := j.client.StreamInfo(j.ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("%w: %s is gone", ErrUnreadable, j.client.Place())
	}
	j.setAnswering(err == nil)
	if err != nil {
		return nil, err
	}
	b := j.mirror.Load().Bounds()
	first, last, seen := firstSeq(info), info.State.LastSeq, j.seen
	j.seen.first, j.seen.last = first, last
	var lost error
	ended := uint64(0) // the newest entry that is lost, if the stream ends before it
	switch epoch := info.Config.Metadata[metadataEpoch]; {
	case epoch != b.Epoch:
		return nil, fmt.Errorf("%w: %s has the new epoch %q", journal.ErrFenced, j.client.Place(), epoch)
	case last < b.Newest:
		ended = b.Newest
		lost = fmt.Errorf("%w: %s has lost the entries %d to %d", ErrUnreadable, j.client.Place(), last+1, b.Newest)
	case first > b.Newest+1:
		return nil, fmt.Errorf("%w: the entries %d to %d of %s were removed before they were read", ErrOutdated, b.Newest+1, first-1, j.client.Place())
	case seen.last <= b.Newest && seen.first > j.shared.firstRecord(seen.first), info.State.Msgs < last+1-first:
		// No instance removes the last record of a worker that has an owner, or an entry after one that it keeps.
		lost = fmt.Errorf("%w: entries of %s were removed that kvcast needs: somebody has purged it", ErrUnreadable, j.client.Place())
	default:
		if lost, err = j.verify(s, b.Newest); err != nil {
			return nil, err
		}
	}
	if lost == nil {
		if seen.last <= b.Newest { // else it is not known yet
			j.lacking = 0
		}
		return s, nil
	}
	if j.lacking++; j.lacking < lackingChecks { // a former leader may have answered
		return nil, errors.New(lost.Error()) // not an ErrUnreadable yet
	}
	if j.cfg.Follow {
		return nil, lost
	}
	// No seq may be used twice in an epoch, and the checkpoints may have seen the entries that are lost. Who knows of the
	// loss stays until the epoch is another one.
	if _, _, failed := j.emptyStream(j.ctx, ended); failed != nil {
		j.log.Warn("The stream has lost entries, and needs a new epoch.", "error", failed)
		return nil, fmt.Errorf("begin a new epoch: %v", failed) //nolint:errorlint // a later check finds whether another instance has
	}
	return nil, fmt.Errorf("%w; it continues in a new epoch, without entries", lost)
}

// verify returns in lost that the stream has another entry in place of the newest one that was read: it has lost entries, and others were
// appended since.
func (j *Journal) verify(s jetstream.Stream, newest uint64) (lost, err error) {
	if j.verified || newest == 0 || j.read.seq != newest {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(j.ctx, client.RequestTimeout)
	defer cancel()
	m, err := s.GetMsg(ctx, newest)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound): // it was removed
	case err != nil:
		return nil, err
	case !m.Time.Equal(j.read.at):
		return fmt.Errorf("%w: entry %d of %s is another one than was read: the stream has lost entries, and others were appended since",
			ErrUnreadable, newest, j.client.Place()), nil
	}
	j.verified = true
	return nil, nil
}

// lackingChecks is the number of consecutive answers, some 500 ms apart, after which the journal believes that the stream has lost
// entries.
const lackingChecks = 5

// setAnswering records whether the servers answer. Stalled returns the time since which they do not.
func (j *Journal) setAnswering(answering bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case answering:
		j.since = time.Time{}
	case j.since.IsZero():
		j.since = time.Now()
	}
}
