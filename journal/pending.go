package journal

import (
	"context"
	"sync"
)

// Pending is the result of an append, which may be in flight. The zero Pending is acknowledged with seq 0.
type Pending struct {
	seq uint64
	ack *Ack // nil if seq is final
}

// Acknowledged returns the Pending of an append that is acknowledged with a seq.
func Acknowledged(seq uint64) Pending { return Pending{seq: seq} }

// Wait waits until the append is acknowledged or has failed, or until ctx ends. It returns the entry's seq or the
// error.
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

// OnFailure calls f in another goroutine if the append fails or has failed.
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

// Ack resolves a Pending. A journal creates one for each append in flight.
type Ack struct {
	done chan struct{} // closed when seq and err are final
	seq  uint64
	err  error

	mu        sync.Mutex // guards all below
	resolved  bool
	onFailure []func(error)
}

// NewAck returns the Ack of an append in flight.
func NewAck() *Ack { return &Ack{done: make(chan struct{})} }

// Pending returns the Pending that the Ack resolves.
func (a *Ack) Pending() Pending { return Pending{ack: a} }

// Resolve acknowledges the append with the seq of its entry, or fails it with err. It must be called once, after
// the entry is visible to readers.
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
