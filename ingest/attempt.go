package ingest

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/transport"
)

// lookUpTimeout bounds the resolution of a host name.
const lookUpTimeout = 5 * time.Second

// attemptState is the state of an attempt to connect.
type attemptState uint8

const (
	// attemptPending: the connection is not established yet.
	attemptPending attemptState = iota
	attemptEstablished
	// attemptFailed: no connection was established.
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

// established reports whether there is an attempt, and its connection is established.
func (a *attempt) established() bool { return a != nil && a.state == attemptEstablished }

// open returns a new attempt after the previous one, with backoff after failures. It retries until ctx
// is done, and then returns nil.
func (l *link) open(ctx context.Context, previous *attempt) *attempt {
	minWait, maxWait := l.worker.shared.config.ReconnectMin, l.worker.shared.config.ReconnectMax
	for {
		switch {
		case previous == nil, previous.state == attemptEstablished, previous.state == attemptClosed:
			l.failures = 0 // the first attempt, or reconnected on purpose
		case previous.state == attemptBroken:
			l.failures = 1
		default:
			l.failures++
		}
		if l.failures > 0 {
			wait := minWait << min(l.failures-1, 20)
			if wait > maxWait || wait <= 0 { // below 0 after an overflow
				wait = maxWait
			}
			select {
			case <-time.After(jitter(wait)):
			case <-ctx.Done():
				return nil
			}
		}
		a, err := l.try(ctx)
		if err == nil {
			go l.watch(ctx, a)
			return a
		}
		if ctx.Err() != nil {
			return nil
		}
		l.fail(err)
		previous = &attempt{}
	}
}

// try returns a new attempt, whose connection is established in the background. The caller calls watch
// with it.
func (l *link) try(ctx context.Context) (*attempt, error) {
	l.worker.metrics.inc(connectAttemptsTotal)
	resolving, cancel := context.WithTimeout(ctx, lookUpTimeout)
	defer cancel()
	address, err := config.Resolve(resolving, l.endpoint)
	if err != nil {
		return nil, err
	}
	c, err := l.worker.shared.sockets.Subscribe(address, l.topic)
	if err != nil {
		return nil, err
	}
	l.attempts++
	a := &attempt{
		id: l.attempts, Conn: c, inbox: transport.NewInbox(c, l.worker.shared.inbox(l.worker.desc.Name)), address: address,
		watched: make(chan struct{}), drained: make(chan struct{}),
	}
	go func() {
		defer close(a.drained)
		a.inbox.Drain()
	}()
	return a, nil
}

// fail counts and logs an error of an attempt.
func (l *link) fail(err error) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.worker.metrics.inc(connectFailuresTotal)
	l.worker.warn(logConnect, time.Now(), "connect failed", "endpoint", l.endpoint, "error", err)
}

// close closes an attempt, if it is not nil.
func (l *link) close(a *attempt) {
	if a == nil {
		return
	}
	a.Monitor.Interrupt()
	<-a.watched
	a.Socket.Interrupt()
	<-a.drained
	a.inbox.Discard()
	if err := a.Close(); err != nil {
		l.worker.log.Error("close socket", "endpoint", a.address, "error", err)
	}
}

// watch handles the monitor's events of an attempt until the monitor is interrupted. A replacement is
// put into use settleTime after it was established.
func (l *link) watch(ctx context.Context, a *attempt) {
	defer close(a.watched)
	settled := false
	for {
		if err := a.Monitor.Wait(); err != nil {
			return
		}
		l.worker.mu.Lock()
		err := l.handleEvents(a)
		ready := a.established() && l.replacement == a
		l.worker.mu.Unlock()
		if err != nil {
			l.fail(err)
			a.Socket.Interrupt()
			return
		}
		if !ready || settled {
			continue
		}
		settled = true
		select {
		case <-time.After(settleTime):
		case <-ctx.Done():
			continue
		}
		l.worker.mu.Lock()
		if l.replacement == a {
			l.current.Socket.Interrupt() // serve returns, and run calls replace
		}
		l.worker.mu.Unlock()
	}
}

// handleEvents handles the events of an attempt's monitor. The worker's mutex is held.
func (l *link) handleEvents(a *attempt) error {
	for {
		e, ok, err := a.Monitor.Next()
		if err != nil || !ok {
			return err
		}
		m := l.worker.metrics
		switch e.Kind {
		case transport.HandshakeSucceeded:
			m.inc(connectionsTotal)
			a.state = attemptEstablished
		case transport.Disconnected, transport.HandshakeFailed, transport.ConnectFailed:
			switch a.state {
			case attemptPending:
				a.state = attemptFailed
				a.Socket.Interrupt()
				m.inc(connectFailuresTotal)
				l.worker.warn(logConnect, time.Now(), "connect failed", "endpoint", a.address, "error", failureReason(e.Kind))
				continue
			case attemptEstablished:
				a.state = attemptBroken
				a.Socket.Interrupt() // messages that were received are still processed
				m.inc(disconnectionsTotal)
			default:
				continue
			}
		default:
			continue
		}
		if l.current != a {
			continue
		}
		if a.established() {
			l.p.connect(a.id, l.replay)
		} else {
			l.p.disconnect(a.id)
		}
		l.worker.updateConnections()
	}
}

// failureReason describes why an attempt failed, as far as libzmq reports it.
func failureReason(k transport.EventKind) string {
	switch k {
	case transport.HandshakeFailed:
		return "the ZMTP handshake failed: the peer may not be a ZeroMQ socket"
	case transport.Disconnected:
		return "the peer closed the connection before the ZMTP handshake"
	default:
		return "the connection was refused, or the host is unreachable"
	}
}
