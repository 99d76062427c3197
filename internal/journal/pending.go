package journal

import "context"

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
	case <-p.ack.resolved.Done():
		return p.ack.seq, p.ack.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// OnFailure calls f in another goroutine if the append fails or has failed.
func (p Pending) OnFailure(f func(error)) {
	if a := p.ack; a != nil {
		context.AfterFunc(a.resolved, func() {
			if a.err != nil {
				f(a.err)
			}
		})
	}
}

// Ack resolves a Pending. A journal creates one for each append in flight.
type Ack struct {
	resolved context.Context // done when seq and err are final
	resolve  context.CancelFunc
	seq      uint64
	err      error
}

// NewAck returns the Ack of an append in flight.
func NewAck() *Ack {
	a := new(Ack)
	a.resolved, a.resolve = context.WithCancel(context.Background())
	return a
}

// Pending returns the Pending that the Ack resolves.
func (a *Ack) Pending() Pending { return Pending{ack: a} }

// Resolve acknowledges the append with the seq of its entry, or fails it with err. It must be called once, after
// the entry is visible to readers.
func (a *Ack) Resolve(seq uint64, err error) {
	a.seq, a.err = seq, err
	a.resolve()
}
