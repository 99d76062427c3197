package ingest

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/transport/objects"
	"github.com/kvcast/kvcast/internal/transport/workers"
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
	transport.Receiver
	id      sequence.ConnectionID
	address string
	state   attemptState
	resumed bool // of the established connection: see transport.Event
	// A replacement is read by await until it is used or closed. stopAwait closes stopping, and await closes awaited.
	stopping, awaited chan struct{}
	// first is the chunk that await has read; nil for none. Its events are handled.
	first *transport.Chunk
}

// established reports whether there is an attempt, and its connection is established.
func (a *attempt) established() bool { return a != nil && a.state == attemptEstablished }

// open returns a new attempt after the previous one, with backoff after failures. It retries until ctx is done, and then returns nil.
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
			wait := backoff(l.failures, minWait, maxWait)
			if previous.state != attemptBroken {
				wait -= time.Since(l.tried)
			}
			select {
			case <-time.After(wait):
			case <-l.due:
			case <-ctx.Done():
				return nil
			}
		}
		a, err := l.try(ctx)
		if err == nil {
			return a
		}
		if ctx.Err() != nil {
			return nil
		}
		l.fail(err)
		l.failAttempt(nil)
		previous = &attempt{}
	}
}

// backoff returns the time from the beginning of an attempt to that of the next, or from the end of a connection, after some failures
// in a row: at most longest, with jitter.
func backoff(failures int, shortest, longest time.Duration) time.Duration {
	wait := shortest << min(failures-1, 20)
	if most := longest - longest/6; wait > most || wait <= 0 { // below 0 after an overflow
		wait = most
	}
	return min(jitter(wait), longest)
}

// try returns a new attempt, whose connection is established in the background.
func (l *link) try(ctx context.Context) (*attempt, error) {
	l.tried = time.Now()
	l.worker.metrics.inc(connectAttemptsTotal)
	resolving, cancel := context.WithTimeout(ctx, lookUpTimeout)
	defer cancel()
	address, err := config.Resolve(resolving, l.endpoint)
	if err != nil {
		return nil, err
	}
	r, err := l.subscribe(address)
	if err != nil {
		return nil, err
	}
	l.attempts++
	return &attempt{Receiver: r, id: l.attempts, address: address}, nil
}

// subscribe reads the publisher at an address that config.Resolve has returned.
func (l *link) subscribe(address string) (transport.Receiver, error) {
	s, e := l.worker.shared, l.worker.desc
	at, _ := config.ParseSource(address)
	switch at.Transport {
	case config.TransportWorkers:
		tier, maxAge, _ := at.Announced()
		return workers.Subscribe(workers.Config{
			Pool: e.Name, Tier: tier, MaxAge: maxAge, Contents: s.config.Contents, Limit: s.budgets.pools, Logger: l.worker.log,
		}), nil
	case config.TransportLMCacheCoordinator, config.TransportMooncake:
		_, host := at.Net()
		server := objects.Mooncake
		if at.Transport == config.TransportLMCacheCoordinator {
			server = objects.LMCache
		}
		return objects.Subscribe(objects.Config{
			Server: server, Address: host, Topic: l.topic, Model: e.Model, Pool: e.Name, Contents: s.config.Contents, Limit: s.budgets.pools, Logger: l.worker.log,
		}), nil
	default:
		return s.transports.Subscribe(l.subscription(), address, l.topic, l.worker.metrics.onDrop)
	}
}

// subscription returns what is read if the endpoint is that of a gRPC server. The call begins with the last batch read, unless the
// last connection has shown that it cannot.
func (l *link) subscription() enginegrpc.Subscription {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	s := enginegrpc.Subscription{Endpoint: l.endpoint, Rank: l.p.rank, Ranks: l.ranks, Model: l.worker.desc.Model}
	if last, ok := l.p.machine.Last(); ok && !l.lost {
		s.Last, s.Epoch = &last, l.p.machine.Epoch()
	}
	return s
}

// fail counts and logs an error of an attempt.
func (l *link) fail(err error) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.worker.metrics.inc(connectFailuresTotal)
	l.worker.log.Warn("connect failed", "endpoint", l.endpoint, "error", err)
}

// close closes an attempt, if it is not nil.
func (l *link) close(a *attempt) {
	if a == nil {
		return
	}
	a.Interrupt()
	a.stopAwait()
	if a.first != nil {
		a.Recycle(a.first)
	}
	if err := a.Close(); err != nil {
		l.worker.log.Error("close socket", "endpoint", a.address, "error", err)
	}
}

// next waits for the next chunk of the attempt.
func (a *attempt) next(deadline func() time.Time) (*transport.Chunk, error) {
	if c := a.first; c != nil {
		a.first = nil
		return c, nil
	}
	return a.Next(deadline)
}

// await waits until a replacement is established or has failed. An established replacement is put into use after settleTime.
func (l *link) await(a *attempt) {
	defer close(a.awaited)
	c, err := a.Next(func() time.Time {
		select {
		case <-a.stopping:
			return time.Unix(0, 0)
		default:
			return time.Time{}
		}
	})
	if err != nil {
		return
	}
	l.worker.mu.Lock()
	for _, e := range c.Events {
		l.handleEvent(a, e)
	}
	c.Events = nil
	a.first = c
	l.worker.mu.Unlock()
	select {
	case <-time.After(settleTime):
	case <-a.stopping:
		return
	}
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if a.established() && l.replacement == a {
		l.current.Interrupt() // serve returns, and run calls replace
	}
}

// stopAwait ends await, and waits for its end. It does nothing for an attempt that await does not read.
func (a *attempt) stopAwait() {
	if a.stopping == nil {
		return
	}
	close(a.stopping)
	a.Wake()
	<-a.awaited
	a.stopping = nil
}

// handleEvent handles an event of an attempt's connection. The worker's mutex is held.
func (l *link) handleEvent(a *attempt, e transport.Event) {
	m := l.worker.metrics
	switch e.Kind {
	case transport.Connected:
		m.inc(connectionsTotal)
		a.state, a.resumed = attemptEstablished, e.Resumed
		l.lost = l.lost && e.Resumed // a call that was asked to resume before the loss does not begin anew
	case transport.Failed:
		a.state = attemptFailed
		m.inc(connectFailuresTotal)
		l.worker.log.Warn("connect failed", "endpoint", a.address, "error", e.Err)
		if l.current == a && !errors.Is(e.Err, transport.ErrInterrupted) {
			l.endAttempt(false)
		}
		return
	case transport.Disconnected:
		if !a.established() || errors.Is(e.Err, transport.ErrInterrupted) {
			return // closed on purpose; run replaces an interrupted attempt
		}
		a.state = attemptBroken
		m.inc(disconnectionsTotal)
		if errors.Is(e.Err, transport.ErrLost) {
			l.lost = true
			l.worker.log.Warn("connection ended: its batches cannot be continued", "endpoint", a.address, "error", e.Err)
		}
		if errors.Is(e.Err, transport.ErrTooLong) {
			l.p.tooLong = e.Err
			l.worker.log.Warn("connection ended: a message is too long", "endpoint", a.address, "error", e.Err)
		}
	}
	if l.current != a {
		return
	}
	if a.established() {
		l.endAttempt(true)
		c := l.connection(a.id)
		c.Resumes = a.resumed
		l.p.connect(c)
	} else {
		l.p.disconnect(a.id)
	}
	l.worker.updateConnections()
}
