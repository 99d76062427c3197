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
	// lookUpTimeout is how long a host's name may take to come to addresses.
	lookUpTimeout = 5 * time.Second
	// settleTime is how long a new connection has for its subscription to reach the
	// engine before the one that it takes the place of is closed.
	settleTime = time.Second
)

// link keeps one publisher connected to the endpoint where its engine publishes.
//
// Each connection has a socket of its own: libzmq would make a broken one anew by
// itself, but then batches of before and after it could not be told apart, which
// may be of two lives of the engine. Nor would it look up the host's name anew
// without holding up all other sockets meanwhile.
//
// A connection can be dead without TCP's noticing. The replay socket tells whether
// it is so; without one a silent connection gets another beside it, which takes
// its place.
type link struct {
	worker   *worker
	p        *publisher
	endpoint config.Endpoint
	replay   string // endpoint of the replay socket; empty where there is none
	topic    string
	// failures are the attempts in a row that came to no connection. It is the link's
	// goroutine's.
	failures int

	// current is the reading whose connection counts, beside the one that is to take
	// its place. The link's goroutine sets them, with the worker's mu, which guards
	// them and what is in them.
	current, beside *reading
	// besideWanted reports whether a connection beside the silent one is wanted.
	besideWanted bool
	connections  sequence.ConnectionID // how many there were
}

// reading is one socket of a link.
type reading struct {
	*transport.Conn
	id      sequence.ConnectionID
	inbox   *transport.Inbox
	drained chan struct{} // closed when nothing is received any more
	address string
	watched chan struct{} // closed when nobody watches it any more
	// up tells that there is a connection, was that there ever was one, and over that
	// there will be none any more.
	up, was, over bool
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

// replace opens a reading, or takes the one beside, and puts it in the place of
// the current one. It reports false where ctx is done before.
func (l *link) replace(ctx context.Context) bool {
	next, was := l.beside, l.current
	l.close(was) // it first, so that nothing comes by both
	if next == nil {
		l.worker.mu.Lock()
		if was != nil && was.up { // not any more
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
	wasUp := was != nil && was.up
	if wasUp {
		l.worker.metrics.disconnections.Inc()
	}
	switch {
	case wasUp && next.up:
		now := time.Now()
		l.p.apply(in, now, l.p.machine.Renewed(now, l.connection(next)))
	case next.up:
		l.p.connect(in, next.id, l.replay)
	case wasUp:
		l.p.disconnect(in, was.id)
	}
	l.worker.updateConnections()
	return true
}

func (l *link) connection(r *reading) sequence.Connection {
	return sequence.Connection{ID: r.id, Replay: l.replay}
}

func (l *link) set(current, beside *reading) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.current, l.beside = current, beside
}

// open makes a reading after the one that was, at first at once and then with
// growing waits. Its connection is made in the background. It tries until ctx is
// done, and then returns nil.
func (l *link) open(ctx context.Context, was *reading) *reading {
	shared := l.worker.shared
	for {
		switch {
		case was == nil || was.was && !was.over: // the first one, or renewed on purpose
			l.failures = 0
		case was.was:
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
		was = &reading{}
	}
}

// try makes a reading, which is yet to be watched.
func (l *link) try(ctx context.Context) (*reading, error) {
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
	l.connections++
	r := &reading{
		id: l.connections, Conn: c, inbox: transport.NewInbox(c, l.worker.shared.inbox(l.worker.desc.Name)), address: address,
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
	l.worker.warn(noticeConnect, time.Now(), "connect failed", "endpoint", l.endpoint.String(), "error", err)
}

// close closes a reading, if there is one.
func (l *link) close(r *reading) {
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

// serve reads the current reading. It reports true when that has to be replaced,
// and false when ctx is done.
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
	case l.current == nil: // the first one is being made
	case beside:
		l.besideWanted = true
		l.current.inbox.Wake()
	default:
		l.current.Socket.Interrupt()
	}
}

// process takes some messages. What happened to the connection before them is taken
// first.
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
	l.worker.shared.metrics.turn(began, n)
	return nil
}

// watch takes what happens to a reading's connection until its monitor is
// interrupted.
func (l *link) watch(ctx context.Context, r *reading) {
	defer close(r.watched)
	settled := false
	for {
		if err := r.Monitor.Wait(); err != nil {
			return
		}
		l.worker.mu.Lock()
		err := l.events(r)
		next := r.up && l.beside == r
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
				l.succeed(r)
			case <-ctx.Done():
			}
		}
	}
}

// breakOff ends the connection as if it had broken, if there is one. The worker's
// mutex is held.
func (l *link) breakOff() {
	if l.current == nil { // the first one is being made
		return
	}
	if l.current.up {
		l.disconnect(l.current)
	}
	l.current.Socket.Interrupt()
}

// disconnect counts the end of a reading's connection, which is the current one, and
// has the publisher know it. The worker's mutex is held.
func (l *link) disconnect(r *reading) {
	r.up = false
	l.worker.metrics.disconnections.Inc()
	in := l.worker.shared.intake()
	defer l.worker.shared.giveBack(in)
	l.p.disconnect(in, r.id)
}

// succeed has a reading take the place of the current one, if it is still to.
func (l *link) succeed(r *reading) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if l.beside == r {
		l.current.Socket.Interrupt()
	}
}

// unconnected says what it means that there was no connection. libzmq knows no more.
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

// events takes what has happened to a reading's connection. The worker's mutex is
// held.
func (l *link) events(r *reading) error {
	for {
		e, ok, err := r.Monitor.Next()
		if err != nil || !ok {
			return err
		}
		m := l.worker.metrics
		switch e.Kind {
		case transport.HandshakeSucceeded:
			m.connections.Inc()
			r.up, r.was = true, true
		case transport.Disconnected, transport.HandshakeFailed, transport.ConnectRetried:
			if r.over {
				continue
			}
			r.over = true
			r.Socket.Interrupt() // what has come is read all the same
			if r.was && !r.up {
				continue // broken off on purpose, and counted then
			}
			if !r.up {
				m.connectFailures.Inc()
				l.worker.warn(noticeConnect, time.Now(), "connect failed", "endpoint", r.address, "error", unconnected(e.Kind))
				continue
			}
			m.disconnections.Inc()
			r.up = false
		default:
			continue
		}
		if l.current != r {
			continue
		}
		in := l.worker.shared.intake()
		if r.up {
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
	wanted := l.current.up && (beside == nil || !beside.up)
	if wanted && beside != nil {
		// Nobody answers there, though the present connection seems to be open.
		in := l.worker.shared.intake()
		l.p.apply(in, time.Now(), l.p.machine.RenewFailed())
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
