package server_test

import "sync/atomic"

// gate blocks the callers of pass while it is closed.
type gate struct {
	closed atomic.Pointer[chan struct{}] // nil: open
	inside atomic.Int64                  // number of blocked callers
}

// close closes the gate and returns the function that opens it.
func (g *gate) close() (open func()) {
	c := make(chan struct{})
	g.closed.Store(&c)
	return func() {
		g.closed.Store(nil)
		close(c)
	}
}

func (g *gate) pass() {
	if c := g.closed.Load(); c != nil {
		g.inside.Add(1)
		<-*c
		g.inside.Add(-1)
	}
}
