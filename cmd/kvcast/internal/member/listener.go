package member

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// errLost means that an engine's connection is older than the one by which another instance has got the worker.
var errLost = errors.New("another instance has taken it a moment ago, because its engine has connected there")

// lostWait is how many TTLs pass before a message of an engine makes this instance claim a worker again that another one has
// taken. What is left of a connection that has ended must not claim it, and two instances to which the same engine is
// connected must not claim it in turn all the time.
const lostWait = 2

// claimWait is how many TTLs a message of an engine waits until this instance has claimed its worker.
const claimWait = 2

// errWanted means that an engine has connected to a listener under the name of a worker to whose engine instances connect themselves.
var errWanted = errors.New("a worker of this name is configured, found or registered; give the engine another name")

// listened are the workers whose engines connect to listeners of this instance. Member.mu guards them.
type listened struct {
	waiting   map[string]chan *feed.Recovered // those that wait for a claim
	connected map[string]bool                 // whether they are connected, as the machine knows it; of all that it owns
	lost      map[string]time.Time            // when they were dropped
}

// lose notes that a worker is dropped, if it is one of a listener. Its connection may have ended before, with messages that are still to be
// read.
func (l *listened) lose(worker string) {
	if _, ok := l.connected[worker]; ok {
		l.lost[worker] = time.Now()
	}
}

// wasLost reports whether a worker was dropped not long ago.
func (l *listened) wasLost(worker string, ttl time.Duration) bool {
	at, ok := l.lost[worker]
	return ok && time.Since(at) < lostWait*ttl
}

// forgetLost forgets the workers that were dropped long ago.
func (l *listened) forgetLost(ttl time.Duration) {
	maps.DeleteFunc(l.lost, func(_ string, at time.Time) bool { return time.Since(at) >= lostWait*ttl })
}

// Claim is ingest's config.Config.Claim.
func (m *Member) Claim(ctx context.Context, worker string) (*feed.Recovered, error) {
	m.mu.Lock()
	if m.machine.Ingested(worker) { // the grace time has removed it from the stream, or it was to be removed
		defer m.mu.Unlock()
		m.listened.connected[worker] = true
		m.machine.Connected(worker)
		return m.claims.takeRecovered(worker), nil
	}
	if m.wanted[worker] { // the instance to which it is assigned connects to its engine
		defer m.mu.Unlock()
		return nil, errWanted
	}
	if m.listened.wasLost(worker, m.cfg.TTL) {
		defer m.mu.Unlock()
		return nil, errLost
	}
	delete(m.listened.lost, worker)
	claimed := make(chan *feed.Recovered, 1)
	m.listened.waiting[worker] = claimed
	m.listened.connected[worker] = true
	m.machine.Connected(worker)
	m.signal()
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, claimWait*m.cfg.TTL) // other engines of the listener wait, too
	defer cancel()
	select {
	case r := <-claimed:
		return r, nil
	case <-ctx.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.listened.waiting[worker] == claimed {
			delete(m.listened.waiting, worker)
			m.machine.Disconnected(worker)
			m.listened.connected[worker] = false
		}
		return nil, ctx.Err()
	}
}
