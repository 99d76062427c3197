package simulator

import (
	"context"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// FaultRestartPassed begins at most passedBy below the old seq, and the first batch that is sent is
// passedTo above it.
const (
	passedBy = 50
	passedTo = 2
)

// holePart is the share of replies that an answer with holes omits.
const holePart = 0.25

// faultState is the state of an engine's faults. Times are numbers of batches.
type faultState struct {
	drawn       uint64            // faults of batches before this one have been drawn
	batch       []Fault           // faults of the next batch
	until       [numFaults]uint64 // ends of lasting faults
	lostBefore  uint64            // batches before this one are lost permanently
	closedUntil uint64            // the sockets stay closed until this seq
	delayed     []delayed
	last        batch
	lastSent    bool   // the last batch was sent live, whole and to all subscribers
	answers     uint64 // number of answers with holes so far
}

// delayed is a batch that is sent late.
type delayed struct{ seq, due uint64 }

// lasts reports whether a fault is in effect at the next batch.
func (e *Engine) lasts(f Fault) bool { return e.faults.until[f] > e.summary.Batches }

// quiet reports whether a subscriber knows of all batches, and can request those that it has not
// received.
func (e *Engine) quiet() bool {
	f := e.feed
	answers := !f.faults.Mute && !f.faults.NoEnd && f.faults.Skip == nil
	return e.faults.lastSent && answers && !f.silent && f.net != nil && len(f.delayed) == 0
}

// applyFaults ends the faults that are over before the next batch, and applies those of the engine
// and its connections, once per batch. mu must be held.
func (e *Engine) applyFaults() error {
	t, n := &e.faults, e.summary.Batches
	if t.drawn > n {
		return nil
	}
	t.drawn, t.batch = n+1, nil
	for _, f := range e.cfg.Faults.Strike(n) {
		e.countFault(f)
		switch {
		case f.affectsBatch():
			t.batch = append(t.batch, f)
		case f == FaultAmnesia:
			e.feed.memory.clear()
		case f == FaultFlap:
			t.until[f] = n + e.cfg.Faults.Flap
			if err := e.feed.shut(0); err != nil {
				return err
			}
		case f.affectsEngine():
			if err := e.restart(f); err != nil {
				return err
			}
		default:
			t.until[f] = n + e.cfg.Faults.Span
		}
	}
	return e.updateSockets()
}

func (e *Engine) countFault(f Fault) {
	if e.summary.Faults == nil {
		e.summary.Faults = make(map[Fault]uint64)
	}
	e.summary.Faults[f]++
}

// updateSockets applies the lasting faults to the sockets.
func (e *Engine) updateSockets() error {
	s := e.feed.sockets
	s.silent = e.lasts(FaultSilent) || e.lasts(FaultDead)
	s.faults = ReplayFaults{
		Mute:  e.lasts(FaultMute) || e.lasts(FaultDead),
		NoEnd: e.lasts(FaultEndless),
	}
	if e.lasts(FaultHoles) {
		s.faults.Skip = e.skip
	}
	if e.lasts(FaultFlap) || e.feed.next < e.faults.closedUntil {
		return nil
	}
	e.faults.closedUntil = 0
	return s.open()
}

// skip reports whether an answer omits a batch; different answers omit different ones.
func (e *Engine) skip(seq uint64) bool {
	e.faults.answers++
	return draw(e.cfg.Faults.Seed, seq, e.faults.answers<<8) < holePart
}

// restart restarts the engine, and ends its lasting faults.
func (e *Engine) restart(f Fault) error {
	t, faults := &e.faults, e.cfg.Faults
	next := e.cfg.FirstSeq
	switch f {
	case FaultRestartLate:
		t.lostBefore = e.summary.Batches + faults.Late
	case FaultRestartAhead:
		next += faults.Late
	case FaultRestartPassed:
		t.closedUntil = e.feed.next + passedTo
		if e.feed.next > next+passedBy {
			next = e.feed.next - passedBy
		}
	default:
	}
	if f != FaultRestartLate {
		t.lostBefore = 0
	}
	if f != FaultRestartPassed {
		t.closedUntil = 0
	}
	t.until, t.delayed, e.feed.delayed = [numFaults]uint64{}, nil, nil
	e.load.Restart()
	e.feed.restart(next)
	e.summary.NextSeq = next
	if f == FaultRestartInPlace {
		return nil
	}
	return e.feed.shut(0) // updateSockets opens them
}

// deliver sends the next batch and the delayed ones that are due, with their faults. mu must be
// held.
func (e *Engine) deliver(events []wire.Event) error {
	t, n := &e.faults, e.summary.Batches
	heard := e.feed.net != nil && !e.feed.silent && e.subscribed()
	lost := n < t.lostBefore || slices.Contains(t.batch, FaultForget)
	b, err := e.feed.add(events, e.cfg.Replay != "" && !lost)
	if err != nil {
		return err
	}
	t.last, t.lastSent = b, false
	switch {
	case lost, slices.Contains(t.batch, FaultDrop):
	case slices.Contains(t.batch, FaultDelay):
		e.feed.hold(b)
		t.delayed = append(t.delayed, delayed{b.seq, n + e.cfg.Faults.Delay})
	case slices.Contains(t.batch, FaultTruncate):
		err = e.feed.publish(b.seq, b.payload[:len(b.payload)/2])
	case slices.Contains(t.batch, FaultTwice):
		if err = e.feed.transmit(b); err == nil {
			err = e.feed.transmit(b)
		}
		t.lastSent = heard
	default:
		err = e.feed.transmit(b)
		t.lastSent = heard
	}
	for err == nil && len(t.delayed) > 0 && t.delayed[0].due <= n {
		err = e.feed.release(t.delayed[0].seq)
		t.delayed = t.delayed[1:]
	}
	return err
}

// endFaults ends all faults, after the last batch.
func (e *Engine) endFaults(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := &e.faults
	if e.summary.Batches == 0 {
		return nil
	}
	t.until, t.closedUntil = [numFaults]uint64{}, 0
	if err := e.updateSockets(); err != nil || t.lastSent && len(e.feed.delayed) == 0 {
		return err
	}
	e.mu.Unlock()
	err := e.serveUntil(ctx, e.subscribed)
	e.mu.Lock()
	if err != nil || ctx.Err() != nil {
		return err
	}
	out := t.lastSent || slices.ContainsFunc(e.feed.delayed, func(b batch) bool { return b.seq == t.last.seq })
	if err := e.feed.release(); err != nil || out {
		return err
	}
	return e.feed.transmit(t.last)
}
