package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
)

// shared is the part of a journal in Servers, whose stream several processes append to: each for the workers that it
// owns. Who owns a worker stands in the stream, as ownership records among the worker's entries. One is an entry without
// events; its header entry.OwnerHeader has the owner and the writer. Below, a record without another word is an ownership record.
type shared struct {
	tail
	j       *Journal
	wake    chan struct{} // there is a message to publish
	suspect chan struct{} // the fate of messages in flight is unknown

	mu      sync.Mutex // guards all below
	chains  map[string]*chain
	ready   []*chain          // those with something to publish, in the order in which they became so
	units   map[uint64]*chain // chains with a unit, by its number
	number  uint64            // of the last unit
	batches int               // units that are atomic batches
	owners  map[string]Owner  // by worker
}

const (
	// maxBatches bounds the atomic batches of this process that are not delivered. nats-server allows 50 a stream.
	maxBatches = 8
	// unitTimeout is how long a delivery may stay away before the journal looks whether the stream has the unit.
	unitTimeout = 2 * time.Second
	// claimTimeout bounds one attempt to claim a worker.
	claimTimeout = 2 * time.Second
	// unitPoll is how often overdue units are looked for.
	unitPoll = 500 * time.Millisecond
	// suspectPause is the least time between two looks for units that were refused. If the stream has lost entries, or another
	// instance has taken the worker, the stream refuses all units until the journal has read that.
	suspectPause = 100 * time.Millisecond
)

func newShared(j *Journal) *shared {
	j.client.Where = strings.Join(j.cfg.Servers, ",")
	j.client.IsTransient = IsUnanswered
	s := &shared{
		j: j, wake: make(chan struct{}, 1), suspect: make(chan struct{}, 1),
		chains: make(map[string]*chain), units: make(map[uint64]*chain), owners: make(map[string]Owner),
	}
	j.shared = s
	return s
}

func (s *shared) start() {
	s.j.loops.Go(s.readLoop)
	s.j.loops.Go(s.loop)
	s.j.loops.Go(s.j.retention.loop)
}

func (s *shared) push(r journal.Record, m *nats.Msg) (journal.Pending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.j.refusal()
	c := s.chains[r.Source.Worker]
	switch {
	case err != nil:
	case c == nil:
		err = fmt.Errorf("%w: this instance does not own worker %q", journal.ErrFenced, r.Source.Worker)
	case c.err != nil:
		err = c.err
	}
	if err != nil {
		<-s.j.slots
		return journal.Pending{}, err
	}
	c.source = r.Source // another one than before if the caller has removed the worker and added it again
	a := newInFlight(r, m)
	s.enqueue(c, a)
	return a.ack.Pending(), nil
}

func (s *shared) cancel(source *journal.Source, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.chains[source.Worker]; c != nil && c.err == nil && (c.source == nil || c.source == source) {
		c.err = err
	}
}

func (s *shared) enqueue(c *chain, a *inFlight) {
	c.appends = append(c.appends, a)
	if c.unit == 0 && len(c.appends) == 1 {
		s.ready = append(s.ready, c)
		signal(s.wake)
	}
}

// pushOwnership is enqueue for an ownership record.
func (s *shared) pushOwnership(c *chain, source journal.Source, m *nats.Msg) journal.Pending {
	a := &inFlight{record: journal.Record{Source: &source, Body: m.Data}, message: m, ack: new(journal.Ack), isOwnership: true}
	s.enqueue(c, a)
	return a.ack.Pending()
}

// endUnit is called when a unit is delivered or will be published again.
func (s *shared) endUnit(c *chain) {
	delete(s.units, c.number)
	if c.batch {
		s.batches--
		c.batch = false
	}
	if c.isReady() && s.chains[c.worker] == c {
		s.ready = append(s.ready, c)
		signal(s.wake)
	}
}

// loop publishes appends, and finds out what has become of those that are not delivered.
func (s *shared) loop() {
	ticker := time.NewTicker(unitPoll)
	defer ticker.Stop()
	pause := time.NewTimer(0)
	defer pause.Stop()
	var suspect <-chan struct{} // nil during a pause
	for {
		select {
		case <-s.wake:
			s.publish()
		case <-pause.C:
			suspect = s.suspect
		case <-suspect:
			s.check(0)
			suspect = nil
			pause.Reset(suspectPause)
		case <-ticker.C:
			s.check(unitTimeout)
		case <-s.j.Failed():
			return
		case <-s.j.ctx.Done():
			return
		}
	}
}

// publish begins units until nothing is ready.
func (s *shared) publish() {
	for {
		s.mu.Lock()
		if len(s.ready) == 0 {
			s.mu.Unlock()
			return
		}
		c := s.ready[0]
		s.ready[0] = nil
		s.ready = s.ready[1:]
		if !c.isReady() || s.chains[c.worker] != c {
			s.mu.Unlock()
			continue
		}
		limit := 1
		if s.batches < maxBatches {
			limit = maxBatch
		}
		s.number++
		number, last := s.number, c.last
		unit := c.next(limit, number, time.Now())
		s.units[number] = c
		if len(unit) > 1 {
			s.batches++
		}
		messages := make([]*nats.Msg, len(unit)) // the unit may be delivered meanwhile
		for i, a := range unit {
			messages[i] = a.message
		}
		s.mu.Unlock()
		s.publishUnit(messages, number, last)
	}
}

// publishUnit publishes a message, or an atomic batch of several. If the connection does not take it, check repeats it.
func (s *shared) publishUnit(unit []*nats.Msg, number, last uint64) {
	for i, message := range unit {
		m := *message
		m.Header = nats.Header{entry.Header: m.Header[entry.Header]}
		if owner := message.Header[entry.OwnerHeader]; owner != nil {
			m.Header[entry.OwnerHeader] = owner
		}
		if i == 0 {
			m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{strconv.FormatUint(last, 10)}
		}
		if len(unit) > 1 {
			m.Header[headerBatch] = []string{s.j.cfg.Instance + "-" + strconv.FormatUint(number, 36)}
			m.Header[headerBatchSeq] = []string{strconv.Itoa(i + 1)}
		}
		if i == len(unit)-1 {
			if len(unit) > 1 {
				m.Header[headerBatchCommit] = []string{"1"}
			}
			m.Reply = s.j.replies + strconv.FormatUint(number, 10)
		}
		if err := s.j.client.Conn.PublishMsg(&m); err != nil {
			s.j.log.Debug("Publishing failed; it is repeated when the connection is back.", "error", err)
			return
		}
	}
}

// onReply handles the answer to a unit. Only a delivery acknowledges it.
func (s *shared) onReply(m *nats.Msg) {
	if _, ok := acknowledgedSeq(m.Data); ok {
		return
	}
	number, err := strconv.ParseUint(m.Subject[len(s.j.replies):], 10, 64)
	var r reply
	if err != nil || m.Header.Get("Status") != "" || json.Unmarshal(m.Data, &r) != nil || r.Error == nil {
		return // no server has the stream now: check repeats it
	}
	switch r.Error.Code {
	case client.CodeWrongLastSeq, client.CodeWrongLastSeqConst:
		signal(s.suspect) // it was stored before, or another instance has written a record, or a server has lost entries
	case client.CodeTooManyRequests:
	case client.CodeIncompleteBatch, client.CodeTooManyBatches:
		// nats-server has dropped the batch, and does not say why. A message of its own is refused with the cause.
		s.repeat(number)
	default:
		s.refused(r.Error.Code, r.Error.Description)
	}
}

// refused fails the journal, since the stream has refused an entry.
func (s *shared) refused(code jetstream.ErrorCode, description string) {
	s.j.fail(fmt.Errorf("append an entry: %w", s.j.refusedFor(code, description)))
}

// repeat publishes a unit that is not stored again.
func (s *shared) repeat(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.units[number]; c != nil {
		c.refused()
		s.endUnit(c)
	}
}

// check reads from the stream whether it has the units that were published a while ago, and publishes those again that it
// does not have. It may do so while one is on its way: each is stored once at most.
func (s *shared) check(age time.Duration) {
	type unit struct {
		number, last uint64
		subject      string
	}
	var units []unit
	s.mu.Lock()
	for number, c := range s.units {
		if time.Since(c.published) >= age {
			units = append(units, unit{number, c.last, c.subject})
		}
	}
	s.mu.Unlock()
	if len(units) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(s.j.ctx, client.RequestTimeout)
	defer cancel()
	stream, err := s.j.client.JS.Stream(ctx, s.j.cfg.Stream)
	for _, u := range units {
		if err != nil {
			s.j.log.Debug("The stream does not answer.", "error", err)
			return
		}
		_, err = stream.GetMsg(ctx, u.last+1, jetstream.WithGetMsgSubject(u.subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			s.repeat(u.number)
			err = nil
		}
	}
	s.publish()
}

// delivered handles the next entry of the stream. It acknowledges an entry of this instance. A record of another one ends this
// instance's appends of the worker, and so does an entry that this instance has not written: the worker is then recovered.
func (s *shared) delivered(m *nats.Msg, source journal.Source, e *Entry, at time.Time, show func() error) error {
	if e.Invalid != nil && !errors.Is(e.Invalid, entry.ErrForeign) { // it may be an entry of a later version, whose events are unknown
		return fmt.Errorf("%w: entry %d: %w", ErrUnreadable, e.Seq, e.Invalid)
	}
	a, fenced, cause := s.match(m, source, e)
	switch {
	case e.Invalid != nil:
		s.j.reportForeign(m.Subject, e.Seq, e.Invalid)
	case e.Owner != nil:
		s.j.cfg.Owned(source, *e.Owner)
	case fenced != nil:
		s.j.reportForeign(m.Subject, e.Seq, cause)
	}
	err := show()
	if a != nil {
		a.ack.Resolve(e.Seq, err)
		<-s.j.slots
	}
	if fenced != nil {
		s.fence(fenced, cause)
	}
	if err == nil {
		s.read = lastRead{e.Seq, at}
	}
	return err
}

// match returns the append that an entry is, if it is of this instance, or the chain that the entry ends, and why.
func (s *shared) match(m *nats.Msg, source journal.Source, e *Entry) (a *inFlight, fenced *chain, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seq, worker, owner := e.Seq, e.Worker, e.Owner
	c := s.chains[worker]
	switch inUnit := c != nil && c.unit > 0; {
	case e.Invalid == nil:
	case c == nil:
		return nil, nil, nil
	default:
		if c.overtaken(seq); inUnit {
			s.endUnit(c)
		}
		return nil, nil, nil
	}
	if owner != nil {
		owner.Seq = seq
		s.owners[worker] = *owner
		if owner.Writer != s.j.cfg.Instance && c != nil {
			return nil, c, s.fencedBy(*owner)
		}
		if c == nil && owner.Instance == s.j.cfg.Instance && owner.Writer == s.j.cfg.Instance {
			s.chains[worker] = &chain{
				worker: worker, model: source.Model, subject: s.j.codec.Prefix + client.Escape(worker), claim: seq, last: seq,
			}
		}
	}
	if c == nil {
		return nil, nil, nil
	}
	inUnit := c.unit > 0
	if a, cause = c.delivered(m, seq, time.Now()); cause != nil {
		return nil, c, cause
	}
	if inUnit && c.unit == 0 {
		s.endUnit(c)
	}
	if owner != nil && owner.IsReleased() {
		delete(s.chains, worker)
	}
	return a, nil, nil
}

// fence ends the appends of a chain.
func (s *shared) fence(c *chain, err error) {
	s.mu.Lock()
	if s.chains[c.worker] != c {
		s.mu.Unlock()
		return
	}
	delete(s.chains, c.worker)
	if c.unit > 0 {
		s.endUnit(c)
	}
	appends := c.appends
	c.appends, c.unit, c.err = nil, 0, err
	s.mu.Unlock()
	for _, a := range appends {
		a.ack.Resolve(0, err)
		<-s.j.slots
	}
}

func (s *shared) fail(err error) {
	s.mu.Lock()
	chains := slices.Collect(maps.Values(s.chains))
	s.mu.Unlock()
	for _, c := range chains {
		s.fence(c, err)
	}
	s.j.stall.end()
}

func (s *shared) reconnected() {
	s.j.stall.end()
	if sub := s.following.Load(); sub != nil { // it may have missed deliveries
		_ = sub.Unsubscribe()
	}
	signal(s.suspect)
}

// oldest returns since when the unit that waits the longest is not delivered; the zero time if there is none.
func (s *shared) oldest() (since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.units {
		if since.IsZero() || c.since.Before(since) {
			since = c.since
		}
	}
	return since
}
