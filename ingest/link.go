package ingest

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/transport"
)

const (
	// lookUpTimeout is how long the resolution of a host name may take.
	lookUpTimeout = 5 * time.Second
	// settleTime is how long a subscription has to reach the engine by a new connection
	// before the old connection is closed.
	settleTime = time.Second
)

// link keeps one publisher connected to the endpoint where its engine publishes.
//
// Each connection has a socket of its own. libzmq can reconnect a socket by itself, but
// then batches of two connections, which may be of two incarnations, could not be told
// apart, and the resolution of the host name would block all other sockets.
//
// A connection can be dead while TCP does not notice. The replay socket shows that; where
// there is none, a second connection is made beside the silent one, and replaces it.
type link struct {
	worker   *worker
	p        *publisher
	endpoint config.Endpoint
	replay   string // endpoint of the replay socket; empty where there is none
	topic    string
	// failures counts the failed attempts in a row. Only the link's goroutine uses it.
	failures int

	// current is the attempt whose connection is read, and beside the one that is to replace
	// it. The link's goroutine sets them; the worker's mu guards them and their fields.
	current, beside *attempt
	// besideWanted reports whether a connection beside the silent one is wanted.
	besideWanted bool
	attempts     sequence.ConnectionID // how many there were
}

// attemptState is how far an attempt has come.
type attemptState uint8

const (
	// attemptPending: the connection is being made.
	attemptPending attemptState = iota
	attemptEstablished
	// attemptFailed: no connection was made.
	attemptFailed
	// attemptBroken: the connection was established and broke.
	attemptBroken
	// attemptClosed: the connection was established and closed on purpose.
	attemptClosed
)

// attempt is one socket of a link, and its connection.
type attempt struct {
	*transport.Conn
	id      sequence.ConnectionID
	inbox   *transport.Inbox
	drained chan struct{} // closed when the inbox is no longer drained
	address string
	watched chan struct{} // closed when the monitor is no longer read
	state   attemptState
}

// run reads until ctx is done.
func (l *link) run(ctx context.Context) {
	if l.replace(ctx) {
		for l.serve(ctx) {
			if !l.replace(ctx) {
				break
			}
		}
	}
	current, beside := l.current, l.beside
	l.set(nil, nil)
	l.close(current)
	l.close(beside)
}

// replace replaces the current attempt by the one beside it, or by a new one. It reports
// false where ctx is done before.
func (l *link) replace(ctx context.Context) bool {
	next, was := l.beside, l.current
	l.close(was) // first, so that no batch arrives by both
	if next == nil {
		l.worker.mu.Lock()
		if was != nil && was.state == attemptEstablished {
			l.disconnect(was)
			l.worker.updateConnections()
		}
		l.worker.mu.Unlock()
		if next = l.open(ctx, was); next == nil {
			l.set(nil, nil)
			return false
		}
	}
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.current, l.beside = next, nil
	in := l.worker.shared.intake()
	defer l.worker.shared.giveBack(in)
	wasUp, isUp := was != nil && was.state == attemptEstablished, next.state == attemptEstablished
	if wasUp {
		l.worker.metrics.disconnections.Inc()
	}
	switch {
	case wasUp && isUp:
		now := time.Now()
		l.p.apply(in, now, l.p.machine.Replaced(now, l.connection(next)))
	case isUp:
		l.p.connect(in, next.id, l.replay)
	case wasUp:
		l.p.disconnect(in, was.id)
	}
	l.worker.updateConnections()
	return true
}

func (l *link) connection(r *attempt) sequence.Connection {
	return sequence.Connection{ID: r.id, Replay: l.replay}
}

func (l *link) set(current, beside *attempt) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.current, l.beside = current, beside
}

// open returns a new attempt after the last one, with backoff after failures. It retries
// until ctx is done, and then returns nil.
func (l *link) open(ctx context.Context, was *attempt) *attempt {
	shared := l.worker.shared
	for {
		switch {
		case was == nil, was.state == attemptEstablished, was.state == attemptClosed:
			l.failures = 0 // the first one, or renewed on purpose
		case was.state == attemptBroken:
			l.failures = 1
		default:
			l.failures++
		}
		if l.failures > 0 {
			wait := shared.reconnectMin << min(l.failures-1, 20)
			if wait > shared.reconnectMax || wait <= 0 {
				wait = shared.reconnectMax
			}
			select {
			case <-time.After(jitter(wait)):
			case <-ctx.Done():
				return nil
			}
		}
		r, err := l.try(ctx)
		if err == nil {
			go l.watch(ctx, r)
			return r
		}
		if ctx.Err() != nil {
			return nil
		}
		l.failed(err)
		was = &attempt{}
	}
}

// try returns a new attempt, whose connection is made in the background. The caller must
// watch it.
func (l *link) try(ctx context.Context) (*attempt, error) {
	l.worker.metrics.connectAttempts.Inc()
	resolving, cancel := context.WithTimeout(ctx, lookUpTimeout)
	defer cancel()
	address, err := config.Resolve(resolving, l.endpoint.String())
	if err != nil {
		return nil, err
	}
	c, err := l.worker.shared.sockets.Subscribe(address, l.topic)
	if err != nil {
		return nil, err
	}
	l.attempts++
	r := &attempt{
		id: l.attempts, Conn: c, inbox: transport.NewInbox(c, l.worker.shared.inbox(l.worker.desc.Name)), address: address,
		watched: make(chan struct{}), drained: make(chan struct{}),
	}
	go func() {
		defer close(r.drained)
		r.inbox.Drain()
	}()
	return r, nil
}

func (l *link) failed(err error) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.worker.metrics.connectFailures.Inc()
	l.worker.warn(logConnect, time.Now(), "connect failed", "endpoint", l.endpoint.String(), "error", err)
}

// close closes an attempt, if there is one.
func (l *link) close(r *attempt) {
	if r == nil {
		return
	}
	r.Monitor.Interrupt()
	<-r.watched
	r.Socket.Interrupt()
	<-r.drained
	r.inbox.Discard()
	if err := r.Close(); err != nil {
		l.worker.log.Error("close socket", "endpoint", r.address, "error", err)
	}
}

// serve processes the messages of the current attempt. It reports true when that has to be
// replaced, and false when ctx is done.
func (l *link) serve(ctx context.Context) bool {
	r := l.current
	stop := context.AfterFunc(ctx, r.Socket.Interrupt)
	defer stop()
	for {
		p, err := r.inbox.Next(l.deadline)
		switch {
		case ctx.Err() != nil:
			if p != nil {
				r.inbox.Recycle(p)
			}
			return false
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.connectBeside(ctx)
			continue
		case err != nil:
			if !errors.Is(err, transport.ErrInterrupted) {
				l.failed(err)
			}
			return true
		}
		err = l.process(p)
		r.inbox.Recycle(p)
		if err != nil {
			l.failed(err)
			return true
		}
	}
}

// deadline returns a time that has passed where a connection beside the silent one is
// wanted; zero otherwise.
func (l *link) deadline() time.Time {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if l.besideWanted {
		return time.Unix(0, 0)
	}
	return time.Time{}
}

// renew has the connection made anew. The worker's mutex is held.
func (l *link) renew(beside bool) {
	switch {
	case l.current == nil: // the first attempt is being made
	case beside:
		l.besideWanted = true
		l.current.inbox.Wake()
	default:
		l.current.Socket.Interrupt()
	}
}

// process handles the events of the connection, and then messages.
func (l *link) process(c *transport.Chunk) error {
	in := l.worker.shared.intake()
	defer l.worker.shared.giveBack(in)
	began := time.Now()
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if err := l.events(l.current); err != nil {
		return err
	}
	l.worker.enter()
	n := 0
	for i := range c.Len() {
		m := c.Batch.Message(i)
		if m.Count == 0 { // dropped
			continue
		}
		n++
		if why, ok := in.open(m); !ok {
			l.worker.refuse(why, began)
			continue
		}
		l.p.arrive(in, began, l.current.id)
	}
	if c.Drops != nil {
		l.p.apply(in, began, l.p.machine.Overrun(began))
	}
	l.worker.metrics.messages.Add(float64(n))
	l.worker.shared.metrics.observe(began, n)
	return nil
}

// watch handles the events of an attempt until its monitor is interrupted.
func (l *link) watch(ctx context.Context, r *attempt) {
	defer close(r.watched)
	settled := false
	for {
		if err := r.Monitor.Wait(); err != nil {
			return
		}
		l.worker.mu.Lock()
		err := l.events(r)
		next := r.state == attemptEstablished && l.beside == r
		l.worker.mu.Unlock()
		if err != nil {
			l.failed(err)
			r.Socket.Interrupt()
			return
		}
		if next && !settled {
			settled = true
			select {
			case <-time.After(settleTime):
				l.replaceCurrent(r)
			case <-ctx.Done():
			}
		}
	}
}

// breakOff closes the connection, which is then made anew. The worker's mutex is held.
func (l *link) breakOff() {
	if l.current == nil { // the first attempt is being made
		return
	}
	if l.current.state == attemptEstablished {
		l.disconnect(l.current)
	}
	l.current.Socket.Interrupt()
}

// disconnect records that the connection of an attempt was closed on purpose. The worker's
// mutex is held.
func (l *link) disconnect(r *attempt) {
	r.state = attemptClosed
	l.worker.metrics.disconnections.Inc()
	in := l.worker.shared.intake()
	defer l.worker.shared.giveBack(in)
	l.p.disconnect(in, r.id)
}

// replaceCurrent has the attempt beside the current one take its place.
func (l *link) replaceCurrent(r *attempt) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if l.beside == r {
		l.current.Socket.Interrupt()
	}
}

// unconnected describes why an attempt has failed, as far as libzmq knows.
func unconnected(k transport.EventKind) string {
	switch k {
	case transport.HandshakeFailed:
		return "what listens there does not speak as ZeroMQ does"
	case transport.Disconnected:
		return "what listens there ended the connection before it spoke as ZeroMQ does"
	default:
		return "nothing listens there, or it can not be reached"
	}
}

// events handles the events of an attempt. The worker's mutex is held.
func (l *link) events(r *attempt) error {
	for {
		e, ok, err := r.Monitor.Next()
		if err != nil || !ok {
			return err
		}
		m := l.worker.metrics
		switch e.Kind {
		case transport.HandshakeSucceeded:
			m.connections.Inc()
			r.state = attemptEstablished
		case transport.Disconnected, transport.HandshakeFailed, transport.ConnectFailed:
			switch r.state {
			case attemptPending:
				r.state = attemptFailed
				r.Socket.Interrupt()
				m.connectFailures.Inc()
				l.worker.warn(logConnect, time.Now(), "connect failed", "endpoint", r.address, "error", unconnected(e.Kind))
				continue
			case attemptEstablished:
				r.state = attemptBroken
				r.Socket.Interrupt() // what was received is processed
				m.disconnections.Inc()
			default:
				continue
			}
		default:
			continue
		}
		if l.current != r {
			continue
		}
		in := l.worker.shared.intake()
		if r.state == attemptEstablished {
			l.p.connect(in, r.id, l.replay)
		} else {
			l.p.disconnect(in, r.id)
		}
		l.worker.shared.giveBack(in)
		l.worker.updateConnections()
	}
}

// connectBeside makes a connection beside the silent one, unless one is established that
// is about to replace it.
func (l *link) connectBeside(ctx context.Context) {
	l.worker.mu.Lock()
	l.besideWanted = false
	beside := l.beside
	wanted := l.current.state == attemptEstablished && (beside == nil || beside.state != attemptEstablished)
	if wanted && beside != nil {
		// The engine does not answer, though the present connection seems to be open.
		in := l.worker.shared.intake()
		l.p.apply(in, time.Now(), l.p.machine.ReplacementFailed())
		l.worker.shared.giveBack(in)
		l.beside = nil
	}
	l.worker.mu.Unlock()
	if !wanted {
		return
	}
	l.close(beside)
	if r, err := l.try(ctx); err != nil {
		l.failed(err)
	} else {
		l.set(l.current, r)
		go l.watch(ctx, r)
	}
}
