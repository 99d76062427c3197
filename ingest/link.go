package ingest

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/zmqio"
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
	topic    string
	// failures are the attempts in a row that came to no connection. It is the link's
	// goroutine's.
	failures int

	// current is the reading whose connection counts, beside the one that is to take
	// its place. The link's goroutine sets them, with the worker's mu, which guards
	// them and what is in them.
	current, beside *reading
}

// reading is one socket of a link.
type reading struct {
	*conn
	inbox   *inbox
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
	for _, r := range []*reading{l.current, l.beside} {
		l.close(r)
	}
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
			l.worker.connections()
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
	l.p.renew = next.socket.Interrupt
	wasUp := was != nil && was.up
	if wasUp {
		l.worker.metrics.disconnections.Inc()
	}
	switch {
	case wasUp && next.up:
		l.p.heard = time.Now() // there has been a connection all the time
	case next.up:
		l.p.connect(time.Now())
	case wasUp:
		l.p.disconnect()
	}
	l.worker.connections()
	return true
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
	k := l.worker.shared.sockets
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
			wait := k.reconnectMin << min(l.failures-1, 20)
			if wait > k.reconnectMax || wait <= 0 {
				wait = k.reconnectMax
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
	c, err := l.worker.shared.sockets.connect(address, l.topic)
	if err != nil {
		return nil, err
	}
	r := &reading{
		conn: c, inbox: l.worker.shared.inbox(c.socket, l.worker.desc.Name), address: address,
		watched: make(chan struct{}), drained: make(chan struct{}),
	}
	go func() {
		defer close(r.drained)
		r.inbox.drain()
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
	r.monitor.Interrupt()
	<-r.watched
	r.socket.Interrupt()
	<-r.drained
	r.inbox.discard()
	if err := r.close(); err != nil {
		l.worker.log.Error("close socket", "endpoint", r.address, "error", err)
	}
}

// serve reads the current reading. It reports true when that has to be replaced,
// and false when ctx is done.
func (l *link) serve(ctx context.Context) bool {
	r := l.current
	stop := context.AfterFunc(ctx, r.socket.Interrupt)
	defer stop()
	for {
		p, err := r.inbox.next(l.deadline)
		switch {
		case ctx.Err() != nil:
			if p != nil {
				r.inbox.giveBack(p)
			}
			return false
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.silent(ctx)
			continue
		case err != nil:
			if !errors.Is(err, zmqio.ErrInterrupted) {
				l.failed(err)
			}
			return true
		}
		err = l.process(p)
		r.inbox.giveBack(p)
		if err != nil {
			l.failed(err)
			return true
		}
	}
}

// deadline is when the silence has lasted too long; zero if it never does.
func (l *link) deadline() time.Time {
	if l.worker.shared.silence == 0 {
		return time.Time{}
	}
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	return l.p.heard.Add(l.worker.shared.silence)
}

// process takes some messages. What happened to the connection before them is taken
// first.
func (l *link) process(p *parcel) error {
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
	for i := range p.size() {
		m := p.batch.Message(i)
		if m.Count == 0 { // dropped
			continue
		}
		n++
		a, why, ok := open(&in.decoder, m)
		if !ok {
			l.worker.refuse(why, began)
			continue
		}
		l.p.take(in, began, &a)
	}
	if p.losses() {
		l.p.overrun(began)
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
		if err := r.monitor.Wait(); err != nil {
			return
		}
		l.worker.mu.Lock()
		err := l.events(r)
		next := r.up && l.beside == r
		l.worker.mu.Unlock()
		if err != nil {
			l.failed(err)
			r.socket.Interrupt()
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
	} else {
		l.p.disconnect()
	}
	l.current.socket.Interrupt()
}

// disconnect counts the end of a reading's connection, which is the current one, and
// has the publisher know it. The worker's mutex is held.
func (l *link) disconnect(r *reading) {
	r.up = false
	l.worker.metrics.disconnections.Inc()
	l.p.disconnect()
}

// succeed has a reading take the place of the current one, if it is still to.
func (l *link) succeed(r *reading) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if l.beside == r {
		l.current.socket.Interrupt()
	}
}

// unconnected says what it means that there was no connection. libzmq knows no more.
func unconnected(k zmqio.EventKind) string {
	switch k {
	case zmqio.HandshakeFailed:
		return "what listens there does not speak as ZeroMQ does"
	case zmqio.Disconnected:
		return "what listens there ended the connection before it spoke as ZeroMQ does"
	default:
		return "nothing listens there, or it can not be reached"
	}
}

// events takes what has happened to a reading's connection. The worker's mutex is
// held.
func (l *link) events(r *reading) error {
	for {
		e, ok, err := r.monitor.Next()
		if err != nil || !ok {
			return err
		}
		m := l.worker.metrics
		switch e.Kind {
		case zmqio.HandshakeSucceeded:
			m.connections.Inc()
			r.up, r.was = true, true
		case zmqio.Disconnected, zmqio.HandshakeFailed, zmqio.ConnectRetried:
			if r.over {
				continue
			}
			r.over = true
			r.socket.Interrupt() // what has come is read all the same
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
		if r.up {
			l.p.connect(time.Now())
		} else {
			l.p.disconnect()
		}
		l.worker.connections()
	}
}

// silent takes note that nothing has come for too long.
func (l *link) silent(ctx context.Context) {
	now := time.Now()
	l.worker.mu.Lock()
	late := now.Sub(l.p.heard) >= l.worker.shared.silence
	if late {
		l.p.heard = now
	}
	up, beside := l.current.up, l.beside
	alone := late && up && l.p.replay == "" && (beside == nil || !beside.up)
	switch {
	case !late || !up: // libzmq is at it
	case l.p.replay != "":
		l.p.fetch(now, causeProbe)
	case !alone: // the one beside settles
	case beside != nil:
		// Nobody answers there, though this connection seems to stand.
		l.p.suspect(now)
		l.beside = nil
	}
	l.worker.mu.Unlock()
	if !alone {
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
