package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/journal"
)

// Owner is who owns a worker: the instance that appends the worker's entries.
type Owner struct {
	// Instance is the owner; empty if nobody is.
	Instance string
	// Writer is the instance that has written the record: the owner, or the former owner, which has handed over.
	Writer string
	// Seq is the record's seq; 0 if no record was ever written.
	Seq uint64
}

// IsReleased reports whether the former owner has handed over.
func (o Owner) IsReleased() bool { return o.Instance != o.Writer }

// shared is the part of a journal in Servers, whose stream several processes append to: each for the workers that it
// owns. Who owns a worker stands in the stream, as ownership records among the worker's entries. One is an entry without
// events; its header headerOwner has the owner and the writer. Below, a record without another word is an ownership record.
type shared struct {
	j *Journal

	mu      sync.Mutex // guards all below; taken before the journal's mu
	chains  map[string]*chain
	ready   []*chain          // those with something to publish, in the order in which they became so
	units   map[uint64]*chain // chains with a unit, by its number
	number  uint64            // of the last unit
	batches int               // units that are atomic batches
	owners  map[string]Owner  // by worker
}

const (
	// headerOwner is the header of a record: the owner or headerNobody, a space, and the writer.
	headerOwner  = "Kvcast-Owner"
	headerNobody = "-"
	// maxBatches bounds the atomic batches of this process that are not delivered. nats-server allows 50 a stream.
	maxBatches = 8
	// unitTimeout is how long a delivery may stay away before the journal looks whether the stream has the unit.
	unitTimeout = 2 * time.Second
	// claimTimeout bounds one attempt to claim a worker.
	claimTimeout = 2 * time.Second
	// unitPoll is how often overdue units are looked for.
	unitPoll = 500 * time.Millisecond
)

func newShared(j *Journal) *shared {
	return &shared{j: j, chains: make(map[string]*chain), units: make(map[uint64]*chain), owners: make(map[string]Owner)}
}

// Owner returns who owns a worker, by the records that were delivered so far.
func (j *Journal) Owner(worker string) Owner {
	j.shared.mu.Lock()
	defer j.shared.mu.Unlock()
	return j.shared.owners[worker]
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
	m, err := s.record(source, s.j.cfg.Instance)
	if err != nil {
		return 0, err
	}
	for {
		seq, err := s.tryClaim(ctx, source.Worker, m, seen)
		if seq != 0 {
			return seq, nil
		}
		if isUnanswered(err) || errors.Is(err, context.DeadlineExceeded) { // it may be stored: the next attempt finds out
			select {
			case <-time.After(retryInterval):
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
	stream, err := s.j.js.Stream(asking, s.j.cfg.Stream)
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
	ack, err := s.j.js.PublishMsg(asking, m, jetstream.WithExpectLastSequencePerSubject(last))
	switch {
	case err == nil:
		return 0, s.j.awaitDelivery(ctx, ack.Sequence) // the next attempt finds the chain, unless it was fenced
	case isWrongLastSeq(err):
		return 0, nil
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
		case <-j.failed:
			return j.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Release ends the ownership of a worker: it writes a record that names the next owner, or nobody if next is empty, and
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
	m, err := s.record(source, next)
	if err != nil {
		return 0, err
	}
	select {
	case j.slots <- struct{}{}:
	case <-j.failed:
		return 0, j.Err()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	s.mu.Lock()
	if c.err == nil {
		c.err = fmt.Errorf("%w: worker %q was released", journal.ErrFenced, worker)
	}
	if s.chains[worker] != c { // it was fenced meanwhile
		s.mu.Unlock()
		<-j.slots
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

// record returns the message of a record.
func (s *shared) record(source journal.Source, owner string) (*nats.Msg, error) {
	m, err := s.j.encode(journal.Record{Source: &source, Body: entryHead(source)})
	if err != nil {
		return nil, err
	}
	if owner == "" {
		owner = headerNobody
	}
	m.Header[headerOwner] = []string{owner + " " + s.j.cfg.Instance}
	return m, nil
}

// decodeOwner decodes the header of a record, without the seq. It returns nil for other entries.
func decodeOwner(m *nats.Msg) (*Owner, error) {
	values := m.Header[headerOwner]
	if len(values) == 0 {
		return nil, nil
	}
	owner, writer, found := strings.Cut(values[0], " ")
	if !found || owner == "" || writer == "" {
		return nil, fmt.Errorf("header %s is %q; want an owner and a writer", headerOwner, values[0])
	}
	if owner == headerNobody {
		owner = ""
	}
	return &Owner{Instance: owner, Writer: writer}, nil
}

// append appends an entry that has a slot.
func (s *shared) append(r journal.Record, m *nats.Msg) (journal.Pending, error) {
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
	c.source = r.Source                         // another one than before if the caller has removed the worker and added it again
	r.Body, r.State = m.Data[:len(r.Body)], nil // the caller may reuse its memory
	a := &inFlight{record: r, message: m, ack: journal.NewAck()}
	s.push(c, a)
	return a.ack.Pending(), nil
}

// cancel makes the later appends of a worker fail, since one before them was not started.
func (s *shared) cancel(source *journal.Source, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.chains[source.Worker]; c != nil && c.err == nil && (c.source == nil || c.source == source) {
		c.err = err
	}
}

func (s *shared) push(c *chain, a *inFlight) {
	c.appends = append(c.appends, a)
	if c.unit == 0 && len(c.appends) == 1 {
		s.ready = append(s.ready, c)
		signal(s.j.wake)
	}
}

// pushOwnership is push for an ownership record.
func (s *shared) pushOwnership(c *chain, source journal.Source, m *nats.Msg) journal.Pending {
	a := &inFlight{record: journal.Record{Source: &source, Body: m.Data}, message: m, ack: journal.NewAck(), isOwnership: true}
	s.push(c, a)
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
		signal(s.j.wake)
	}
}

// loop publishes appends, and finds out what has become of those that are not delivered.
func (s *shared) loop() {
	ticker := time.NewTicker(unitPoll)
	defer ticker.Stop()
	for {
		select {
		case <-s.j.wake:
			s.publish()
		case <-s.j.suspect:
			s.check(0)
		case <-ticker.C:
			s.check(unitTimeout)
		case <-s.j.failed:
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
		m.Header = nats.Header{header: m.Header[header]}
		if owner := message.Header[headerOwner]; owner != nil {
			m.Header[headerOwner] = owner
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
		if err := s.j.conn.PublishMsg(&m); err != nil {
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
	case codeWrongLastSeq, codeWrongLastSeqConst:
		signal(s.j.suspect) // it was stored before, or another instance has written a record, or a server has lost entries
	case codeTooManyRequests:
	case codeIncompleteBatch, codeTooManyBatches:
		// nats-server has dropped the batch, and does not say why. A message of its own is refused with the cause.
		s.repeat(number)
	default:
		err := fmt.Errorf("JetStream error %d: %s", r.Error.Code, r.Error.Description)
		if isNoSpace(r.Error.Code) {
			err = s.j.noSpace(s.j.cfg.Stream, r.Error.Description)
		}
		s.j.fail(fmt.Errorf("append an entry: %w", err))
	}
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
		if time.Since(c.since) >= age {
			units = append(units, unit{number, c.last, c.subject})
		}
	}
	s.mu.Unlock()
	if len(units) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(s.j.ctx, requestTimeout)
	defer cancel()
	stream, err := s.j.js.Stream(ctx, s.j.cfg.Stream)
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

// delivered handles the next entry of the stream, and makes it visible by show. It acknowledges an entry of this instance. A
// record of another one ends this instance's appends of the worker.
func (s *shared) delivered(source journal.Source, e *Entry, show func() error) error {
	a, fenced, err := s.match(source, e)
	if err == nil && e.Owner != nil && s.j.cfg.Owned != nil {
		s.j.cfg.Owned(source, *e.Owner)
	}
	if err == nil {
		err = show()
	}
	if a != nil {
		a.ack.Resolve(e.Seq, err)
		<-s.j.slots
	}
	if fenced != nil {
		s.fence(fenced, s.fencedBy(*e.Owner))
	}
	return err
}

// match returns the append that an entry is, if it is of this instance, or the chain that a record ends.
func (s *shared) match(source journal.Source, e *Entry) (a *inFlight, fenced *chain, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seq, worker, owner := e.Seq, source.Worker, e.Owner
	c := s.chains[worker]
	if owner != nil {
		owner.Seq = seq
		s.owners[worker] = *owner
		if owner.Writer != s.j.cfg.Instance && c != nil {
			return nil, c, nil
		}
		if c == nil && owner.Instance == s.j.cfg.Instance && owner.Writer == s.j.cfg.Instance {
			s.chains[worker] = &chain{
				worker: worker, model: source.Model, subject: s.j.subjects + escape(worker), claim: seq, last: seq,
			}
		}
	}
	if c == nil {
		return nil, nil, nil
	}
	inUnit := c.unit > 0
	a, err = c.delivered(seq, time.Now())
	if inUnit && c.unit == 0 {
		s.endUnit(c)
	}
	if owner != nil && owner.IsReleased() {
		delete(s.chains, worker)
	}
	return a, nil, err
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

// fail ends all appends.
func (s *shared) fail(err error) {
	s.mu.Lock()
	chains := make([]*chain, 0, len(s.chains))
	for _, c := range s.chains {
		chains = append(chains, c)
	}
	s.mu.Unlock()
	for _, c := range chains {
		s.fence(c, err)
	}
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

// forgetOwners forgets all records, before they are read again or since they are discarded.
func (s *shared) forgetOwners() {
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
		m, err := s.record(source, s.j.cfg.Instance)
		if err != nil {
			<-s.j.slots
			s.j.log.Warn("The record of a worker's owner cannot be renewed.", "worker", worker, "error", err)
			continue
		}
		c.renewing = true
		s.pushOwnership(c, source, m)
	}
}
