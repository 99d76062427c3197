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

// Owner returns who owns a worker, by the records that were delivered so far. Only a journal in Servers has owners: Owner, Claim,
// Release and Forget must not be called for one in a directory, which has one writer.
func (j *Journal) Owner(worker string) Owner {
	s := j.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owners[worker]
}

// Claim makes this instance the owner of a worker, if its owner is still the one that the caller has seen. It returns the
// seq of the record that says so, which Read returns by then. All entries of the worker before it are there, and all after
// it are those of this instance, until another instance writes a record: then its appends fail with journal.ErrFenced. It
// returns an ErrFenced too if there is another owner now.
func (j *Journal) Claim(ctx context.Context, source journal.Source, seen Owner) (uint64, error) {
	seq, err := j.shared.claim(ctx, source, seen)
	if err != nil {
		return 0, fmt.Errorf("claim worker %q: %w", source.Worker, err)
	}
	return seq, nil
}

func (s *shared) claim(ctx context.Context, source journal.Source, seen Owner) (uint64, error) {
	m, err := s.j.codec.EncodeOwner(source, s.j.cfg.Instance)
	if err != nil {
		return 0, err
	}
	for {
		seq, err := s.tryClaim(ctx, source.Worker, m, seen)
		if seq != 0 {
			return seq, nil
		}
		if client.IsUnanswered(err) || errors.Is(err, context.DeadlineExceeded) { // it may be stored: the next attempt finds out
			select {
			case <-time.After(client.RetryInterval):
				err = nil
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		if err != nil {
			return 0, err
		}
	}
}

// tryClaim is an attempt of claim. It returns the seq 0 without an error if another attempt is necessary.
func (s *shared) tryClaim(ctx context.Context, worker string, m *nats.Msg, seen Owner) (uint64, error) {
	asking, cancel := context.WithTimeout(ctx, claimTimeout)
	defer cancel()
	stream, err := s.j.client.JS.Stream(asking, s.j.cfg.Stream)
	if err != nil {
		return 0, err
	}
	last := uint64(0)
	newest, err := stream.GetLastMsgForSubject(asking, m.Subject)
	switch {
	case err == nil:
		last = newest.Sequence
	case !errors.Is(err, jetstream.ErrMsgNotFound):
		return 0, err
	}
	if err := s.j.awaitDelivery(ctx, last); err != nil {
		return 0, err
	}
	s.mu.Lock()
	c, owner := s.chains[worker], s.owners[worker]
	s.mu.Unlock()
	switch {
	case c != nil && c.source == nil: // an earlier attempt has succeeded
		return c.claim, nil
	case c != nil:
		return 0, errors.New("this instance owns it already")
	case owner != seen:
		return 0, s.fencedBy(owner)
	}
	ack, err := s.j.client.JS.PublishMsg(asking, m, jetstream.WithExpectLastSequencePerSubject(last))
	switch description, full := client.RefusedForSpace(err); {
	case err == nil:
		return 0, s.j.awaitDelivery(ctx, ack.Sequence) // the next attempt finds the chain, unless it was fenced
	case client.IsWrongLastSeq(err):
		return 0, nil
	case full:
		s.j.fail(fmt.Errorf("append an entry: %w", s.j.client.NoSpace(s.j.ctx, s.j.cfg.Stream, description)))
	}
	return 0, err
}

func (s *shared) fencedBy(o Owner) error {
	return fmt.Errorf("%w: since entry %d, its owner is instance %q", journal.ErrFenced, o.Seq, o.Instance)
}

// awaitDelivery waits until an entry is visible.
func (j *Journal) awaitDelivery(ctx context.Context, seq uint64) error {
	for {
		changed := j.Changed()
		if j.Bounds().Newest >= seq {
			return nil
		}
		select {
		case <-changed:
		case <-j.Failed():
			return j.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Release ends the ownership of a worker: it writes a record that names the next owner, or none if next is empty, and
// waits until it is visible. It returns the record's seq; 0 without an error if this instance does not own the worker.
// Appends of the worker after the call fail with journal.ErrFenced.
func (j *Journal) Release(ctx context.Context, worker, next string) (uint64, error) {
	s := j.shared
	s.mu.Lock()
	c := s.chains[worker]
	s.mu.Unlock()
	if c == nil {
		return 0, nil
	}
	source := journal.Source{Worker: worker, Model: c.model}
	m, err := s.j.codec.EncodeOwner(source, next)
	if err != nil {
		return 0, err
	}
	select { // also after Close, which waits for it
	case s.j.slots <- struct{}{}:
	case <-s.j.Failed():
		return 0, s.j.Err()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	s.mu.Lock()
	if c.err == nil {
		c.err = fmt.Errorf("%w: worker %q was released", journal.ErrFenced, worker)
	}
	if s.chains[worker] != c { // it was fenced meanwhile
		s.mu.Unlock()
		<-s.j.slots
		return 0, c.err
	}
	pending := s.pushOwnership(c, source, m)
	s.mu.Unlock()
	return pending.Wait(ctx)
}

// Forget ends the appends of a worker without a record: those that are in flight and all later ones fail with
// journal.ErrFenced, though some of those in flight may be stored.
func (j *Journal) Forget(worker string) {
	s := j.shared
	s.mu.Lock()
	c := s.chains[worker]
	s.mu.Unlock()
	if c != nil {
		s.fence(c, fmt.Errorf("%w: worker %q was dropped", journal.ErrFenced, worker))
	}
}

// reset forgets all records, before they are read again or since they are discarded.
func (s *shared) reset(uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.owners)
}

// firstRecord returns the seq of the oldest record that names an owner; limit if there is none before.
func (s *shared) firstRecord(limit uint64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.owners {
		if o.Instance != "" {
			limit = min(limit, o.Seq)
		}
	}
	return limit
}

// renew writes the records of this instance again that are older than a seq, so that the stream can remove entries up to it.
func (s *shared) renew(before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for worker, c := range s.chains {
		if c.claim >= before || c.err != nil || c.renewing {
			continue
		}
		select {
		case s.j.slots <- struct{}{}:
		default:
			return // the next turn continues
		}
		source := journal.Source{Worker: worker, Model: c.model}
		m, err := s.j.codec.EncodeOwner(source, s.j.cfg.Instance)
		if err != nil {
			<-s.j.slots
			s.j.log.Warn("The record of a worker's owner cannot be renewed.", "worker", worker, "error", err)
			continue
		}
		c.renewing = true
		s.pushOwnership(c, source, m)
	}
}
