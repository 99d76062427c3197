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

// Wait waits until the append is acknowledged or has failed, or until ctx ends. It returns the entry's seq or the error.
func (p Pending) Wait(ctx context.Context) (seq uint64, err error) {
	if p.ack == nil {
		return p.seq, nil
	}
	select {
	case <-p.ack.done():
		return p.ack.seq, p.ack.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// OnFailure calls f in another goroutine if the append fails or has failed.
func (p Pending) OnFailure(f func(error)) {
	if p.ack != nil {
		p.ack.onFailure(f)
	}
}

// Ack resolves a Pending. A journal creates one for each append in flight, so that it must cost little where nobody waits and nothing fails. The zero Ack is
// ready for use.
type Ack struct {
	mu sync.Mutex // guards what follows; seq and err are final when resolved is set
	// resolved is set by Resolve. waited is closed then; it is nil if nobody waits.
	resolved bool
	waited   chan struct{}
	failed   []func(error) // to call in case of a failure
	seq      uint64
	err      error
}

// Pending returns the Pending that the Ack resolves.
func (a *Ack) Pending() Pending { return Pending{ack: a} }

// done returns a channel that is closed when the Ack is resolved.
func (a *Ack) done() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waited == nil {
		a.waited = make(chan struct{})
		if a.resolved {
			close(a.waited)
		}
	}
	return a.waited
}

func (a *Ack) onFailure(f func(error)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !a.resolved:
		a.failed = append(a.failed, f)
	case a.err != nil:
		go f(a.err)
	}
}

// Resolve acknowledges the append with the seq of its entry, or fails it with err. It must be called once, after
// the entry is visible to readers.
func (a *Ack) Resolve(seq uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.resolved, a.seq, a.err = true, seq, err
	if a.waited != nil {
		close(a.waited)
	}
	if err != nil {
		for _, f := range a.failed {
			go f(err)
		}
	}
	a.failed = nil
}
