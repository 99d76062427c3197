package journal

import (
	"context"
	"sync"
)

// Pending is an append whose acknowledgement may be outstanding. The zero value is no
// append: it is acknowledged, with seq 0.
type Pending struct {
	seq uint64
	ack *Ack // nil where the append is acknowledged already
}

// Acknowledged returns the Pending of an append that has its seq already.
func Acknowledged(seq uint64) Pending { return Pending{seq: seq} }

// Wait returns the seq of the entry once it is acknowledged, or why the append failed.
// It blocks until then, or until ctx is done.
func (p Pending) Wait(ctx context.Context) (seq uint64, err error) {
	if p.ack == nil {
		return p.seq, nil
	}
	select {
	case <-p.ack.done:
		return p.ack.seq, p.ack.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// OnFailure calls f, in a goroutine of its own, if the append fails or has failed.
func (p Pending) OnFailure(f func(error)) {
	a := p.ack
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.resolved {
		a.onFailure = append(a.onFailure, f)
	} else if a.err != nil {
		go f(a.err)
	}
}

// Ack is the journal's side of a Pending whose acknowledgement comes later.
type Ack struct {
	done chan struct{} // closed once seq and err are final
	seq  uint64
	err  error

	mu        sync.Mutex // guards all below
	resolved  bool
	onFailure []func(error)
}

// NewAck returns the Ack of an append in flight.
func NewAck() *Ack { return &Ack{done: make(chan struct{})} }

// Pending returns what Append returns to the caller.
func (a *Ack) Pending() Pending { return Pending{ack: a} }

// Resolve acknowledges the append, with the seq of its entry, or fails it. It is called
// once, and after the entry is visible.
func (a *Ack) Resolve(seq uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seq, a.err, a.resolved = seq, err, true
	close(a.done)
	if err != nil {
		for _, f := range a.onFailure {
			go f(err)
		}
	}
	a.onFailure = nil
}
