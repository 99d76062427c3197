package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
)

// Load reads all entries of the stream once, in order, and calls f for each. It fills the mirror with the newest. An
// error of f ends it. The error is an ErrUnreadable if an entry is missing, or cannot be decoded in a
// directory; Discard then makes the journal usable. So it is if the stream ends before the entry needed, which a checkpoint has seen. Entries in the mirror
// expire Retention.MaxAge after Load, however old they are. With Servers, Load reads on after an interruption when
// they answer again, until ctx ends. The journal then follows the stream: it reads the entries that any process appends.
func (j *Journal) Load(ctx context.Context, needed uint64, f func(Entry) error) error {
	var s jetstream.Stream
	var info *jetstream.StreamInfo
	err := j.client.UntilAnswered(ctx, func() (err error) {
		s, info, err = j.client.StreamInfo(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("load %s: %w", j.client.Place(), err)
	}
	first, last := firstSeq(info), info.State.LastSeq
	if err := j.mode.checkRange(first, last); err != nil {
		return fmt.Errorf("load %s: %w", j.client.Place(), err)
	}
	if last < needed {
		return fmt.Errorf("load %s: %w: a checkpoint has seen entry %d, and the newest is %d", j.client.Place(), ErrUnreadable, needed, last)
	}
	j.reset(j.mirror.Load().Bounds().Epoch, first-1)
	j.retention.purged = first - 1
	if first <= last {
		if err := j.load(ctx, s, first, last, f); err != nil {
			return fmt.Errorf("load %s: %w", j.client.Place(), err)
		}
	}
	if err := j.mode.continueAfter(j.Bounds().Epoch, last, first-1); err != nil {
		return err
	}
	j.startLoops()
	return nil
}

// LoadWorker reads the entries of a worker after a seq and up to another one, which must be one of them, in order, and calls
// f for each. It does not change the journal.
func (j *Journal) LoadWorker(ctx context.Context, worker string, after, until uint64, f func(Entry) error) error {
	s, _, err := j.client.StreamInfo(ctx)
	if err == nil {
		err = j.loadWorker(ctx, s, worker, after, until, f)
	}
	if err != nil {
		return fmt.Errorf("load worker %q of %s: %w", worker, j.client.Place(), err)
	}
	return nil
}

func (j *Journal) loadWorker(ctx context.Context, s jetstream.Stream, worker string, after, until uint64, f func(Entry) error) error {
	var delivered uint64
	return j.consume(ctx, s, after+1, j.codec.Prefix+client.Escape(worker), func(sub *nats.Subscription) error {
		last := after
		interrupted := func(err error) error { return fmt.Errorf("%w after entry %d: %w", errInterrupted, last, err) }
		for last < until {
			m, err := nextMsg(ctx, sub)
			if errors.Is(err, nats.ErrNoResponders) { // see loader.handleNext
				delivered++
				continue
			}
			if err != nil {
				return interrupted(err)
			}
			if status := statusOf(m); status != "" {
				if err := j.answerStatus(m, status); err != nil {
					return interrupted(err)
				}
				if deliveredBefore(m) > delivered {
					return interrupted(errDeliveriesLost)
				}
				continue
			}
			meta, err := m.Metadata()
			if err != nil {
				return fmt.Errorf("message that a consumer delivered: %w", err)
			}
			if delivered++; meta.Sequence.Consumer != delivered {
				return interrupted(errDeliveriesLost)
			}
			last = meta.Sequence.Stream
			if last > until {
				return fmt.Errorf("%w: entry %d is missing", ErrUnreadable, until)
			}
			e, _ := j.codec.Decode(m)
			switch {
			case errors.Is(e.Invalid, entry.ErrForeign):
				continue
			case e.Invalid != nil:
				return fmt.Errorf("%w: entry %d: %w", ErrUnreadable, last, e.Invalid)
			}
			e.Seq = last
			if err := f(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// Headers of a heartbeat.
const (
	// headerLastConsumer says how many messages the consumer has delivered so far.
	headerLastConsumer = "Nats-Last-Consumer"
	// headerStalled says that the consumer still waits for an answer to flow control, and has the subject to publish it to.
	headerStalled = "Nats-Consumer-Stalled"
)

// errInterrupted means that a consumer has ended, or that what it delivered was lost. Another one can deliver the same entries.
var errInterrupted = errors.New("interrupted")

var errDeliveriesLost = errors.New("deliveries were lost")

// nextMsg returns the next message or heartbeat of a consumer. It returns an error if there is none for deliveryTimeout, as when the
// server that had the consumer has ended.
func nextMsg(ctx context.Context, sub *nats.Subscription) (*nats.Msg, error) {
	limited, cancel := context.WithTimeout(ctx, deliveryTimeout)
	defer cancel()
	m, err := sub.NextMsgWithContext(limited)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("nothing was delivered for %v", deliveryTimeout)
	}
	return m, err
}

// statusOf returns the status in a message of a consumer itself. It is empty if the message is one of the stream, which may have any headers.
func statusOf(m *nats.Msg) string {
	if strings.HasPrefix(m.Reply, "$JS.ACK.") {
		return ""
	}
	return m.Header.Get("Status")
}

// deliveredBefore returns how many messages the consumer had delivered before a message of its own; 0 if that does not say.
func deliveredBefore(m *nats.Msg) uint64 {
	n, err := strconv.ParseUint(m.Header.Get(headerLastConsumer), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// answerStatus answers a message that asks whether to continue (flow control). Until it has the answer, the consumer delivers no entries, only
// heartbeats, which ask again. The error says that the consumer has ended.
func (j *Journal) answerStatus(m *nats.Msg, status string) error {
	switch stalled := m.Header.Get(headerStalled); {
	case m.Reply != "":
		return j.client.Conn.Publish(m.Reply, nil)
	case stalled != "":
		return j.client.Conn.Publish(stalled, nil)
	case status != "100":
		return fmt.Errorf("status %s %s", status, m.Header.Get("Description"))
	}
	return nil
}

// heartbeat is how often the server says that it has nothing to deliver.
const heartbeat = 500 * time.Millisecond

// maxUnanswered is how many requests for a consumer in a row may get no answer.
const maxUnanswered = 10

// load reads the entries from first to last. It reads on from a new consumer when one is interrupted.
func (j *Journal) load(ctx context.Context, s jetstream.Stream, first, last uint64, f func(Entry) error) error {
	l := &loader{j: j, stream: s, sources: make(map[journal.Source]*journal.Source), next: first, f: f}
	for unanswered := 0; ; unanswered++ {
		err := j.client.UntilAnswered(ctx, func() error {
			return j.consume(ctx, s, l.next, "", func(sub *nats.Subscription) error {
				unanswered = 0
				return l.readUntil(ctx, sub, last)
			})
		})
		if !errors.Is(err, errInterrupted) || ctx.Err() != nil || unanswered == maxUnanswered {
			return err
		}
		j.log.Warn("Reading the journal is interrupted. It continues from a new consumer.", "next_seq", l.next, "error", err)
		select {
		case <-time.After(heartbeat):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// consume creates a push consumer of the entries of a subject, or of all, from a seq on, and calls read with its subscription.
// A push consumer takes a third of the time of direct gets in batches. The error is an errInterrupted if the request for the consumer gets no answer, as
// when the connection is lost.
func (j *Journal) consume(ctx context.Context, s jetstream.Stream, first uint64, subject string, read func(*nats.Subscription) error) error {
	inbox := nats.NewInbox()
	sub, err := j.client.Conn.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	defer context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() })() // ends a read that waits for a message
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return err
	}
	creating, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	consumer, err := s.CreatePushConsumer(creating, jetstream.ConsumerConfig{
		DeliverSubject:    inbox,
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       first,
		FilterSubject:     subject,
		AckPolicy:         jetstream.AckNonePolicy,
		FlowControl:       true,
		IdleHeartbeat:     heartbeat,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 10 * time.Second,
	})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", errInterrupted, err)
	case err != nil:
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), client.RequestTimeout)
		defer cancel()
		_ = s.DeleteConsumer(ctx, consumer.CachedInfo().Name)
	}()
	return read(sub)
}

// loader is the state of a consumer's reader.
type loader struct {
	j         *Journal
	stream    jetstream.Stream
	sources   map[journal.Source]*journal.Source
	delivered uint64            // messages
	next      uint64            // seq of the next entry
	f         func(Entry) error // nil while following
}

// readUntil reads entries from a new consumer until it has read the last one.
func (l *loader) readUntil(ctx context.Context, sub *nats.Subscription, last uint64) error {
	l.delivered = 0
	for l.next <= last {
		m, err := nextMsg(ctx, sub)
		if err := l.handleNext(ctx, m, err); err != nil {
			return err
		}
	}
	return nil
}

// handleNext handles what the subscription of the consumer has returned. nats.go returns an error in place of an empty message with the
// status 503. Nothing else has that status, since nothing is requested: it is the next message of the stream, which is then read by itself.
func (l *loader) handleNext(ctx context.Context, m *nats.Msg, err error) error {
	if err == nil {
		return l.handle(ctx, m)
	}
	if !errors.Is(err, nats.ErrNoResponders) {
		return l.interrupted(err)
	}
	reading, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	stored, err := l.stream.GetMsg(reading, l.next)
	if err != nil {
		return l.interrupted(err)
	}
	l.delivered++
	return l.apply(ctx, &nats.Msg{Subject: stored.Subject, Header: stored.Header, Data: stored.Data}, stored.Time)
}

func (l *loader) interrupted(err error) error {
	return fmt.Errorf("%w at entry %d: %w", errInterrupted, l.next, err)
}

// handle handles a message that the consumer has delivered.
func (l *loader) handle(ctx context.Context, m *nats.Msg) error {
	if status := statusOf(m); status != "" {
		return l.handleStatus(ctx, m, status)
	}
	meta, err := m.Metadata()
	if err != nil {
		return fmt.Errorf("message that a consumer delivered: %w", err)
	}
	l.delivered++
	switch seq := meta.Sequence.Stream; {
	case meta.Sequence.Consumer != l.delivered:
		return l.interrupted(errDeliveriesLost)
	case seq < l.next: // from a consumer that was created while servers started
		return l.interrupted(fmt.Errorf("the consumer begins with entry %d", seq))
	case seq != l.next:
		if removed, err := l.j.mode.isPurged(ctx, l.next); removed || err != nil {
			return errors.Join(fmt.Errorf("entry %d is missing: another process has removed it: %w", l.next, ErrPurged), err)
		}
		return fmt.Errorf("%w: entry %d is missing, and %d follows", ErrUnreadable, l.next, seq)
	}
	return l.apply(ctx, m, meta.Timestamp)
}

// apply handles the next message of the stream, which was stored at a time.
func (l *loader) apply(ctx context.Context, m *nats.Msg, at time.Time) error {
	e, model := l.j.codec.Decode(m)
	e.Seq = l.next
	source := journal.Source{Worker: e.Worker, Model: model}
	if e.Invalid != nil {
		source = journal.Source{} // anybody may choose the subject
	}
	if l.sources[source] == nil {
		l.sources[source] = &source
	}
	show := func() error {
		_, err := l.j.mirror.Load().Append(ctx, journal.Record{Source: l.sources[source], Tiers: e.Tiers, Body: e.Body})
		return err
	}
	if err := l.j.mode.delivered(m, source, &e, at, show); err != nil {
		return err
	}
	l.next++
	if l.f == nil {
		return nil
	}
	return l.f(e)
}

// handleStatus answers flow control. When the server says that it delivers nothing, though the stream has more entries,
// it checks whether the next one can be read.
func (l *loader) handleStatus(ctx context.Context, m *nats.Msg, status string) error {
	if err := l.j.answerStatus(m, status); err != nil {
		return l.interrupted(err)
	}
	if deliveredBefore(m) > l.delivered { // by a connection that has ended: no later delivery may tell
		return l.interrupted(errDeliveriesLost)
	}
	if m.Reply != "" || l.f == nil { // nothing may be left
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	_, err := l.stream.GetMsg(ctx, l.next)
	if client.IsUnanswered(err) {
		return nil
	}
	if removed, infoErr := l.j.mode.isPurged(ctx, l.next); err != nil && (removed || infoErr != nil) {
		return errors.Join(fmt.Errorf("%w: entry %d", ErrPurged, l.next), infoErr)
	}
	if apiErr := (*jetstream.APIError)(nil); errors.As(err, &apiErr) || errors.Is(err, jetstream.ErrMsgNotFound) {
		return fmt.Errorf("%w: entry %d: %w", ErrUnreadable, l.next, err)
	}
	return nil // a timeout is not evidence
}

// Discard empties the journal and its checkpoints and gives it a new epoch. Seqs continue. It must not be called
// concurrently with other methods, nor after the first Append.
func (j *Journal) Discard(ctx context.Context) error {
	if err := j.discard(ctx); err != nil {
		return fmt.Errorf("discard %s: %w", j.client.Place(), err)
	}
	j.log.Warn("The journal is discarded. It continues in a new epoch, without entries.", "place", j.client.Place(), "epoch", j.Bounds().Epoch)
	return nil
}

func (j *Journal) discard(ctx context.Context) error {
	epoch, last, err := j.emptyStream(ctx, 0)
	if err != nil {
		return err
	}
	j.reset(epoch, last)
	j.retention.purged = last
	return errors.Join(j.mode.syncMetadata(), j.mode.continueAfter(epoch, last, last))
}

// emptyStream replaces the stream by one without entries and with a new epoch, since nats-server may append to a purged
// stream at a wrong seq after files were damaged. Entries will follow the last one that the stream had. If lost is not 0, it
// is an entry that the stream must have lost, which they follow, too. The steps are such that no seq is used twice in an
// epoch if the process crashes between them. In a directory, checkpoints go first: Load then finds the entries as unreadable
// as before. The error is a journal.ErrFenced if another instance empties the stream, or has done so.
func (j *Journal) emptyStream(ctx context.Context, lost uint64) (epoch string, last uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, emptyTimeout)
	defer cancel()
	// Servers may be electing leaders. Each step may be taken again, also if the answer was lost.
	step := func(do func(context.Context) error) {
		if err == nil {
			err = j.client.UntilAnswered(ctx, func() error {
				ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
				defer cancel()
				return do(ctx)
			})
		}
	}
	current := j.mirror.Load().Bounds().Epoch
	var config jetstream.StreamConfig
	step(func(ctx context.Context) error { return j.mode.endEpoch(ctx, current) })
	step(func(ctx context.Context) error {
		_, info, err := j.client.StreamInfo(ctx)
		switch {
		case err != nil:
			return err
		case info.Config.Metadata[metadataEpoch] != current:
			return fmt.Errorf("%w: another instance has begun the new epoch %q", journal.ErrFenced, info.Config.Metadata[metadataEpoch])
		case lost > 0 && info.State.LastSeq >= lost:
			return fmt.Errorf("the stream has entry %d", lost)
		}
		config, last = info.Config, max(lost, info.State.LastSeq)
		config.Metadata = maps.Clone(config.Metadata)
		return nil
	})
	last = max(last, j.mode.newest())
	step(func(ctx context.Context) error { return j.mode.renameEpoch(ctx, &config) })
	current = config.Metadata[metadataEpoch]
	step(j.checkpoints.Discard)
	epoch = journal.NewEpoch()
	step(func(ctx context.Context) error { return j.deleteStream(ctx, current) })
	step(func(ctx context.Context) error {
		c := config
		c.FirstSeq, c.Metadata = last+1, maps.Clone(config.Metadata)
		c.Metadata[metadataEpoch] = epoch
		_, err := j.client.JS.CreateStream(ctx, c)
		return err
	})
	return epoch, last, err
}

// deleteStream deletes the stream of an epoch, unless it is gone.
func (j *Journal) deleteStream(ctx context.Context, epoch string) error {
	_, info, err := j.client.StreamInfo(ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return nil
	case err != nil:
		return err
	case info.Config.Metadata[metadataEpoch] != epoch:
		return fmt.Errorf("%w: another instance has begun the new epoch %q", journal.ErrFenced, info.Config.Metadata[metadataEpoch])
	}
	return j.client.JS.DeleteStream(ctx, j.cfg.Stream)
}

// emptyTimeout bounds emptyStream. It is less than InstanceTTL, after which another instance may begin to empty the stream.
const emptyTimeout = 40 * time.Second
