package cluster

import (
	"encoding/binary"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// explorer takes the steps of a world in every order.
type explorer struct {
	t    *testing.T
	seen map[uint64]struct{} // keys of worlds
	path []step
	key  []byte
	// settled is the number of worlds in which nothing was in flight.
	settled int
	settles map[uint64]struct{} // keys of worlds that settle
}

// explore takes every order of steps, and returns the number of states.
func explore(t *testing.T, start *world) (states, settled int) {
	defer debug.SetGCPercent(debug.SetGCPercent(1000))
	e := &explorer{t: t, seen: make(map[uint64]struct{}), settles: make(map[uint64]struct{})}
	e.visit(start, start)
	return len(e.seen), e.settled
}

func (e *explorer) visit(start, w *world) {
	e.key = w.appendKey(e.key[:0])
	key := xxh3.Hash(e.key)
	if _, ok := e.seen[key]; ok || e.t.Failed() {
		return
	}
	e.seen[key] = struct{}{}
	wrong := w.wrong
	if wrong == "" && w.quiet() {
		e.settled++
		wrong = w.clone().settle(e.settles)
	}
	if wrong != "" {
		e.t.Errorf("%s, after:\n%s", wrong, strings.Join(e.explain(start), "\n"))
		return
	}
	for _, s := range w.steps(nil) {
		next := w.clone()
		next.do(s)
		e.path = append(e.path, s)
		e.visit(start, next)
		e.path = e.path[:len(e.path)-1]
	}
}

// quiet reports whether nothing is in flight and all has been read. Every order of steps leads to such a world.
func (w *world) quiet() bool {
	if len(w.flights) > 0 {
		return false
	}
	for _, n := range w.nodes {
		if !n.alive {
			continue
		}
		if int(n.read) < len(w.log) {
			return false
		}
		for j := range n.lanes {
			if n.lanes[j].flight != nil || n.lanes[j].stage == stageRecover || n.lanes[j].stage == stageClaim {
				return false
			}
		}
	}
	return true
}

// explain repeats the path, and returns its steps and actions.
func (e *explorer) explain(start *world) (trace []string) {
	w := start.clone()
	w.trace = func(s string) { trace = append(trace, s) }
	for _, s := range e.path {
		trace = append(trace, s.String())
		w.do(s)
	}
	trace = append(trace, "settle")
	w.settle(nil)
	return trace
}

// appendKey appends the state. Worlds with the same key behave alike from there on.
func (w *world) appendKey(b []byte) []byte {
	l := w.left
	b = append(b, l.appends, l.crashes, l.starts, l.drains, l.suspicions, l.timeouts, l.failures, l.wants, l.connects, l.cuts, w.runs)
	for _, r := range w.log {
		b = append(b, byte(r.kind), r.worker, r.batch)
		b = append(b, r.by...)
	}
	b = appendFlags(append(b, '|'), w.wanted...)
	for _, p := range w.flights {
		b = appendPublish(b, p)
	}
	for _, n := range w.nodes {
		if n.key == nil {
			n.key = n.appendKey(nil)
		}
		b = append(append(b, '|'), n.key...)
	}
	return b
}

func appendFlags(b []byte, all ...bool) []byte {
	for _, f := range all {
		if f {
			b = append(b, 1)
		} else {
			b = append(b, 0)
		}
	}
	return b
}

func appendPublish(b []byte, p *publish) []byte {
	b = append(append(b, 'p'), p.writer...)
	b = binary.AppendUvarint(b, uint64(p.expected))
	for _, r := range p.records {
		b = append(append(b, byte(r.kind), r.worker, r.batch), r.by...)
	}
	return append(b, '.')
}

func (n *node) appendKey(b []byte) []byte {
	b = append(b, n.id...)
	if !n.alive {
		return appendFlags(b, n.exited)
	}
	b = appendFlags(binary.AppendUvarint(b, uint64(n.read)), n.connected...)
	b = appendFlags(b, n.wanted...)
	for j := range n.lanes {
		l := &n.lanes[j]
		b = append(b, byte(l.stage), l.batches)
		b = append(b, l.to...)
		b = append(b, '.', byte(l.claim), byte(l.chain), byte(l.last))
		if l.flight != nil {
			b = appendPublish(b, l.flight)
		} else if l.stage == stageClaim {
			b = appendFlags(b, l.owned > l.decided)
		}
	}
	m := n.m
	age := func(at time.Time, most time.Duration) byte {
		if at.IsZero() {
			return 255
		}
		return byte(max(0, min(n.now.Sub(at), most)) / (100 * time.Millisecond))
	}
	until := func(at time.Time) byte {
		if at.IsZero() {
			return 255
		}
		return byte(max(0, at.Sub(n.now)) / (100 * time.Millisecond))
	}
	c := &m.cfg
	b = appendFlags(b, m.draining, m.isolated)
	b = append(b, byte(m.engines), age(m.loadedAt, c.TTL), age(m.returnedAt, c.TTL))
	var memory [8]string
	names := memory[:0]
	for id := range m.instances {
		names = append(names, id)
	}
	slices.Sort(names)
	for i := range m.limits {
		l := &m.limits[i]
		b = append(b, byte(l.inProgress))
		for _, name := range l.waiting {
			b = append(b, name...)
		}
		b = append(b, '.')
	}
	for _, id := range names {
		i := m.instances[id]
		b = appendFlags(append(b, i.id...), i.live, i.info.Draining, i.candidate, i.settled)
		b = append(b, byte(i.info.Engines), age(i.heardAt, c.TTL))
		if i.candidate {
			b = append(b, age(i.candidateSince, c.Settle))
		}
	}
	names = names[:0]
	for name := range m.workers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		w := m.workers[name]
		b = append(append(append(b, w.name...), w.owner...), '.', byte(w.seq), byte(w.progress), byte(w.waitsFor))
		b = appendFlags(b, w.released, w.inStream, w.claimDue, w.refused, w.followsConnection, w.handingOver)
		b = append(b, age(w.recordAt, c.TTL), age(w.orphanedAt, c.Grace), age(w.ownerlessAt, c.Grace), until(w.retryAt))
	}
	return b
}

var exhaustiveConfig = Config{TTL: worldTTL, Settle: worldTTL, Grace: worldTTL, Retry: worldTTL / 3, MaxHandOvers: 1}

// TestExhaustiveSmallWorlds takes every order of steps in small worlds. In each, an append lands only if its writer owns
// the worker and has all earlier batches. Once there are no more faults, each worker is ingested where it is assigned or
// connected, and nothing more happens.
func TestExhaustiveSmallWorlds(t *testing.T) {
	testclass.WithoutRace(t)
	for _, tt := range []struct {
		name           string
		nodes, workers int
		wanted         bool
		limits         limits
		sendsLater     bool
		large          bool // it has more than 16,000 states
	}{
		{"suspicion and appends", 2, 1, true, limits{appends: 2, suspicions: 1}, false, true},
		{"suspicion and crash", 2, 1, true, limits{appends: 1, suspicions: 1, crashes: 1}, false, true},
		{"crash and restart", 2, 1, true, limits{appends: 1, crashes: 1, starts: 1}, false, true},
		{"timeout", 2, 1, true, limits{appends: 2, timeouts: 1}, false, true},
		{"claims sent later", 2, 1, true, limits{appends: 1, suspicions: 1}, true, true},
		{"timeout and failed recovery", 2, 1, true, limits{appends: 1, timeouts: 1, failures: 1}, false, true},
		{"drain and restart", 2, 1, true, limits{drains: 1, starts: 1}, false, true},
		{"drain and timeout", 2, 1, true, limits{drains: 1, timeouts: 1}, false, true},
		{"drain and suspicion", 2, 1, true, limits{drains: 1, suspicions: 1}, false, true},
		{"unwanted", 2, 1, true, limits{wants: 2}, false, true},
		{"unwanted and crash", 2, 1, true, limits{appends: 1, wants: 1, crashes: 1}, false, true},
		{"connections", 2, 1, false, limits{appends: 1, connects: 3}, false, true},
		{"connections and crash", 2, 1, false, limits{appends: 1, connects: 2, crashes: 1}, false, false},
		{"connections and drain", 2, 1, false, limits{connects: 2, drains: 1}, false, true},
		{"connections and suspicion", 2, 1, false, limits{connects: 2, suspicions: 1}, false, true},
		{"connections and timeout", 2, 1, false, limits{connects: 2, timeouts: 1}, false, false},
		{"cut off", 2, 1, true, limits{appends: 1, cuts: 2}, false, true},
		{"cut off and crash", 2, 1, true, limits{appends: 1, cuts: 1, crashes: 1}, false, true},
		{"cut off and drain", 2, 1, true, limits{cuts: 2, drains: 1}, false, true},
		{"cut off and suspicion", 2, 1, true, limits{cuts: 1, suspicions: 1}, false, true},
		{"cut off and connection", 2, 1, false, limits{cuts: 1, connects: 1}, false, false},
		{"two workers and crash", 2, 2, true, limits{crashes: 1}, false, false},
		{"three instances and crash", 3, 1, true, limits{crashes: 1}, false, true},
		{"three instances and cut off", 3, 1, true, limits{cuts: 1}, false, true},
		{"three instances and connection", 3, 1, false, limits{connects: 1}, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.large {
				testclass.Exhaustive(t)
			}
			began := time.Now()
			names := []string{"w1", "w2"}[:tt.workers]
			states, settled := explore(t, newWorld(exhaustiveConfig, tt.nodes, tt.limits, names, tt.wanted, tt.sendsLater))
			t.Logf("%d states, %d settled, %v", states, settled, time.Since(began))
		})
	}
}
