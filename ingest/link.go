package ingest

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
)

// settleTime is how long a subscription has to reach the engine on a replacement before the silent connection is closed.
const settleTime = time.Second

// link keeps one publisher connected to the endpoint of its engine.
//
// Each connection has its own socket, so that batches of two connections, which may be of two incarnations, can be distinguished.
//
// A connection can be dead without an error from TCP. A replay may show that. Without a replay socket, a
// replacement is opened, which takes the place of the silent connection once it is established.
type link struct {
	worker   *worker
	p        *publisher
	endpoint string
	replay   string // endpoint of the replay socket; empty if there is none
	snapshot string // endpoint of the engine's snapshots; empty if none are used
	topic    string
	ranks    []uint32 // all of the source
	// failures is the number of failed attempts in a row. Only the link's goroutine uses it.
	failures int

	// current is the attempt whose messages are read. The link's goroutine writes current and
	// replacement; the worker's mutex guards them and their fields.
	current, replacement *attempt
	// replacementWanted reports whether a replacement is to be opened.
	replacementWanted bool
	// lost reports whether the next connection must not resume: one ended with transport.ErrLost, or has shown that the engine
	// restarted, and none has begun anew since. Another end of a connection does not change it. The worker's mutex guards it.
	lost     bool
	attempts sequence.ConnectionID // number of attempts so far
	// tried is when the last attempt began. Only the link's goroutine uses it.
	tried time.Time
	// due has an element if the next attempt must not wait. onFailed are called when the next attempt has failed, or that in progress.
	// The worker's mutex guards onFailed.
	due      chan struct{}
	onFailed []func()
}

// run reads until ctx is done.
func (l *link) run(ctx context.Context) {
	for l.replace(ctx) && l.serve(ctx) {
	}
	current, replacement := l.current, l.replacement
	l.set(nil, nil)
	l.close(current)
	l.close(replacement)
}

// replace replaces the current attempt by the replacement, or by a new attempt. It returns false if ctx is done first.
func (l *link) replace(ctx context.Context) bool {
	next, previous := l.replacement, l.current
	l.close(previous) // first, so that no batch arrives on both connections
	if next != nil {
		next.stopAwait()
	}
	if next == nil {
		l.worker.mu.Lock()
		if previous.established() {
			l.disconnect(previous)
			l.worker.updateConnections()
		}
		l.worker.mu.Unlock()
		if next = l.open(ctx, previous); next == nil {
			l.set(nil, nil)
			return false
		}
	}
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.current, l.replacement = next, nil
	if previous.established() {
		l.worker.metrics.inc(disconnectionsTotal)
	}
	switch {
	case previous.established() && next.established():
		now := time.Now()
		l.p.apply(now, l.p.machine.Replaced(now, l.connection(next.id)))
	case next.established():
		l.p.connect(l.connection(next.id))
	case previous.established():
		l.p.disconnect(previous.id)
	}
	l.worker.updateConnections()
	return true
}

// connection returns a connection of the link.
func (l *link) connection(id sequence.ConnectionID) sequence.Connection {
	return sequence.Connection{
		ID: id, Replay: l.replay, Snapshot: l.snapshot,
		SnapshotsBegin: l.p.status.Engine == feed.EngineSGLang, // its blocks have no contents
	}
}

func (l *link) set(current, replacement *attempt) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	l.current, l.replacement = current, replacement
}

// serve processes the messages of the current attempt. It returns true when the attempt has to be replaced, and false when ctx is done.
func (l *link) serve(ctx context.Context) bool {
	a := l.current
	stop := context.AfterFunc(ctx, a.Interrupt)
	defer stop()
	for {
		c, err := a.next(l.deadline)
		switch {
		case ctx.Err() != nil:
			if c != nil {
				a.Recycle(c)
			}
			return false
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.openReplacement(ctx)
			continue
		case errors.Is(err, transport.ErrInterrupted), errors.Is(err, transport.ErrEnded):
			return true
		case err != nil:
			l.fail(err)
			l.failAttempt(a)
			return true
		}
		l.process(c)
		a.Recycle(c)
	}
}

// deadline returns a time in the past if a replacement is wanted; zero otherwise.
func (l *link) deadline() time.Time {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if l.replacementWanted {
		return time.Unix(0, 0)
	}
	return time.Time{}
}

// reconnect closes the connection and opens another, or opens a replacement first. The worker's mutex is held.
func (l *link) reconnect(replacement bool) {
	switch {
	case l.current == nil: // the first attempt is in progress
	case replacement:
		l.replacementWanted = true
		l.current.Wake()
	default:
		l.current.Interrupt()
	}
}

// attempt makes the next attempt begin at once, unless one is in progress, and calls a function if it fails. The worker's mutex is
// held, also when the function is called.
func (l *link) attempt(failed func()) {
	l.onFailed = append(l.onFailed, failed)
	select {
	case l.due <- struct{}{}:
	default:
	}
}

// endAttempt calls the functions that wait for the failure of an attempt, unless it has established a connection. The worker's mutex
// is held.
func (l *link) endAttempt(established bool) {
	select {
	case <-l.due: // it was in progress
	default:
	}
	waiting := l.onFailed
	l.onFailed = nil
	if established {
		return
	}
	for _, failed := range waiting {
		failed()
	}
}

// failAttempt ends an attempt that has failed, unless it is nil and has ended before.
func (l *link) failAttempt(a *attempt) {
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	if a == nil || a.state == attemptPending {
		l.endAttempt(false)
	}
}

// process handles the events and messages of a chunk.
func (l *link) process(c *transport.Chunk) {
	in := l.worker.shared.intake(l.worker)
	defer l.worker.shared.recycle(in)
	began := time.Now()
	l.worker.mu.Lock()
	defer l.worker.mu.Unlock()
	defer in.release()
	n := c.Each(func(e transport.Event) { l.handleEvent(l.current, e) }, func(m transport.Message) {
		l.worker.enter()
		if why, ok := in.open(m); ok {
			l.arrive(in, began)
		} else {
			l.refuse(why, m)
		}
	})
	if c.Drops != nil {
		l.worker.enter()
		l.p.apply(began, l.p.machine.Overrun(began))
	}
	l.worker.metrics.add(messagesTotal, uint64(n))
	l.worker.shared.metrics.observe(began, n)
}

// refuse refuses a message. The worker's mutex is held.
func (l *link) refuse(why refusal, m transport.Message) {
	if why != refusedLength {
		l.worker.refuse(why)
		return
	}
	l.worker.refuse(why, "bytes", len(m.Frames[2]))
	l.p.tooLong = transport.TooLong(len(m.Frames[2]))
}

// arrive passes the batch that the intake has opened to the publisher. If the first batch of a call that resumes shows a restart, the call
// is replaced by one that begins with the present state: the first batches of the engine were not asked for. The worker's mutex is held.
func (l *link) arrive(in *intake, now time.Time) {
	resuming, restarts := l.p.machine.Resuming(), l.p.status.Restarts
	l.p.arrive(in, now, l.current.id)
	if resuming && l.p.status.Restarts != restarts {
		l.lost = true
		l.reconnect(false)
	}
}

// breakOff closes the connection as if it had broken. The worker's mutex is held.
func (l *link) breakOff() {
	if l.current == nil { // the first attempt is in progress
		return
	}
	if l.current.established() {
		l.disconnect(l.current)
	}
	l.current.Interrupt()
}

// disconnect records that the connection of an attempt was closed on purpose. The worker's mutex is held.
func (l *link) disconnect(a *attempt) {
	a.state = attemptClosed
	l.worker.metrics.inc(disconnectionsTotal)
	l.p.disconnect(a.id)
}

// openReplacement opens a replacement of the silent connection, unless an established replacement is about to be used.
func (l *link) openReplacement(ctx context.Context) {
	l.worker.mu.Lock()
	l.replacementWanted = false
	pending := l.replacement
	wanted := l.current.established() && !pending.established()
	if wanted && pending != nil {
		// The engine does not reply, though the current connection seems to be open.
		l.p.apply(time.Now(), l.p.machine.ReplacementFailed())
		l.replacement = nil
	}
	l.worker.mu.Unlock()
	if !wanted {
		return
	}
	l.close(pending)
	if a, err := l.try(ctx); err != nil {
		l.fail(err)
	} else {
		a.stopping, a.awaited = make(chan struct{}), make(chan struct{})
		l.set(l.current, a)
		go l.await(a)
	}
}
