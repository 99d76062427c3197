package journaltest

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/journal"
)

// Delayed is a journal in memory that acknowledges late and fails on request, as a journal on a network or a disk does.
type Delayed struct {
	*journal.Memory // the acknowledged entries

	delay time.Duration
	slots chan struct{} // has one element per append in flight

	mu       sync.Mutex // guards all below
	closed   bool
	refusal  error // returned by all appends; nil: none
	inFlight []inFlightAppend
	failed   map[*journal.Source]error
	sources  map[string]*journal.Source // the source of a worker's last append, by worker
}

type inFlightAppend struct {
	record journal.Record
	ack    *journal.Ack
}

var _ journal.Journal = (*Delayed)(nil)

// NewDelayed returns a journal that acknowledges each append after a delay, or when Acknowledge is called if the
// delay is 0. At most maxInFlight appends are in flight.
func NewDelayed(cfg journal.Config, maxInFlight int, delay time.Duration) *Delayed {
	return &Delayed{
		Memory:  journal.NewMemory(cfg),
		delay:   delay,
		slots:   make(chan struct{}, maxInFlight),
		failed:  make(map[*journal.Source]error),
		sources: make(map[string]*journal.Source),
	}
}

// Append starts an append. It blocks while maxInFlight appends are in flight.
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
	a := inFlightAppend{r, new(journal.Ack)}
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

// Fail fails all appends of the source of a worker's last append: those in flight and all later ones.
func (d *Delayed) Fail(worker string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sources[worker]
	d.failed[s] = err
	d.failInFlight(err, func(a inFlightAppend) bool { return a.record.Source == s })
}

// Refuse makes Append return err; nil ends that.
func (d *Delayed) Refuse(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refusal = err
}

// InFlight returns the number of appends in flight.
func (d *Delayed) InFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.inFlight)
}

// failInFlight fails the appends in flight for which match returns true. The caller must hold d.mu.
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

// Close waits until no append is in flight. When ctx ends, the appends in flight fail.
func (d *Delayed) Close(ctx context.Context) error {
	d.mu.Lock()
	d.closed = true
	inFlight := slices.Clone(d.inFlight)
	d.mu.Unlock()
	for _, a := range inFlight {
		if _, err := a.ack.Pending().Wait(ctx); err != nil && ctx.Err() != nil {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.failInFlight(ctx.Err(), func(inFlightAppend) bool { return true })
			return ctx.Err()
		}
	}
	return d.Memory.Close(ctx)
}
