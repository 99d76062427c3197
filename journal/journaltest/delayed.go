package journaltest

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/kvcast/kvcast/journal"
)

// Delayed is a journal in memory that acknowledges late and fails on request, as one on
// a network or a disk does.
type Delayed struct {
	*journal.Memory // the entries acknowledged

	delay time.Duration
	slots chan struct{} // one for each append in flight

	mu       sync.Mutex // guards all below
	closed   bool
	refusal  error
	inFlight []inFlightAppend
	failed   map[*journal.Source]error
	sources  map[string]*journal.Source // by worker, of its last append
}

// inFlightAppend is an append in flight.
type inFlightAppend struct {
	record journal.Record
	ack    *journal.Ack
}

var _ journal.Journal = (*Delayed)(nil)

// NewDelayed returns a journal that acknowledges each append after a delay, or with a
// delay of 0 when Acknowledge is called. maxInFlight bounds the appends in flight.
func NewDelayed(cfg journal.Config, maxInFlight int, delay time.Duration) *Delayed {
	return &Delayed{
		Memory:  journal.NewMemory(cfg),
		delay:   delay,
		slots:   make(chan struct{}, maxInFlight),
		failed:  make(map[*journal.Source]error),
		sources: make(map[string]*journal.Source),
	}
}

// Append puts a record in flight. It blocks while there are maxInFlight.
func (d *Delayed) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	select {
	case d.slots <- struct{}{}:
	case <-ctx.Done():
		d.mu.Lock()
		defer d.mu.Unlock()
		d.failed[r.Source] = ctx.Err()
		return journal.Pending{}, ctx.Err()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.failed[r.Source]
	switch {
	case d.closed:
		err = journal.ErrClosed
	case err == nil && d.refusal != nil:
		err = d.refusal
		d.failed[r.Source] = err
	}
	if err != nil {
		<-d.slots
		return journal.Pending{}, err
	}
	d.sources[r.Source.Worker] = r.Source
	r.Body = bytes.Clone(r.Body)
	a := inFlightAppend{r, journal.NewAck()}
	d.inFlight = append(d.inFlight, a)
	if d.delay > 0 {
		time.AfterFunc(d.delay, func() { d.Acknowledge(1) })
	}
	return a.ack.Pending(), nil
}

// Acknowledge makes the n oldest appends in flight visible and acknowledges them.
func (d *Delayed) Acknowledge(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for range min(n, len(d.inFlight)) {
		a := d.inFlight[0]
		d.inFlight = d.inFlight[1:]
		pending, err := d.Memory.Append(context.Background(), a.record)
		if err == nil {
			seq, _ := pending.Wait(context.Background())
			a.ack.Resolve(seq, nil)
		} else {
			a.ack.Resolve(0, err)
		}
		<-d.slots
	}
}

// Fail fails the appends in flight of a source, and all later ones.
func (d *Delayed) Fail(s *journal.Source, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failed[s] = err
	d.failInFlight(err, func(a inFlightAppend) bool { return a.record.Source == s })
}

// Refuse makes Append return err, until it is called with nil.
func (d *Delayed) Refuse(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refusal = err
}

// Source returns the source of a worker's last append in flight or acknowledged.
func (d *Delayed) Source(worker string) *journal.Source {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sources[worker]
}

// InFlight returns the number of appends in flight.
func (d *Delayed) InFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.inFlight)
}

// failInFlight fails the appends in flight for which match is true. d.mu is locked.
func (d *Delayed) failInFlight(err error, match func(inFlightAppend) bool) {
	var rest []inFlightAppend
	for _, a := range d.inFlight {
		if !match(a) {
			rest = append(rest, a)
			continue
		}
		a.ack.Resolve(0, err)
		<-d.slots
	}
	d.inFlight = rest
}

// Close waits until nothing is in flight. Appends still in flight when ctx is done fail.
func (d *Delayed) Close(ctx context.Context) error {
	d.mu.Lock()
	wasClosed := d.closed
	d.closed = true
	d.mu.Unlock()
	if wasClosed {
		return nil
	}
	acquired := 0
	defer func() {
		for range acquired {
			<-d.slots // appends return ErrClosed rather than block
		}
	}()
	for ; acquired < cap(d.slots); acquired++ {
		select {
		case d.slots <- struct{}{}:
			continue
		case <-ctx.Done():
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.failInFlight(ctx.Err(), func(inFlightAppend) bool { return true })
		return ctx.Err()
	}
	return d.Memory.Close(ctx)
}
