package simulator

import (
	"context"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// passedBy is how far below the old seq a run begins that is to pass it, and
// passedTo how far above it the first batch is that is heard of.
const (
	passedBy = 50
	passedTo = 2
)

// holePart is the part of the replies that an answer with holes leaves out.
const holePart = 0.25

// trouble is how an engine stands with its faults. Times are numbers of batches.
type trouble struct {
	struck  uint64            // the faults of batches before it have struck
	batch   []Fault           // what befalls the next batch
	until   [numFaults]uint64 // when faults end that last
	late    uint64            // batches before it are lost for good
	unheard uint64            // the sockets stay closed until the seq is this
	delayed []delayed
	last    remembered
	sound   bool   // the last batch went out live as it should
	answers uint64 // answers with holes so far
}

// delayed is a batch that is held back.
type delayed struct{ seq, due uint64 }

// lasts tells whether a fault is on at the next batch.
func (e *Engine) lasts(f Fault) bool { return e.trouble.until[f] > e.summary.Batches }

// quiet tells whether whoever hears the engine knows of all its batches, and can
// have them.
func (e *Engine) quiet() bool {
	f := e.feed
	answers := !f.faults.Mute && !f.faults.NoEnd && f.faults.Skip == nil
	return e.trouble.sound && answers && !f.silent && f.net != nil && len(f.held) == 0
}

// strike ends what is over before the next batch, and lets happen what befalls the
// engine. It does so once for each batch. It is called with mu held.
func (e *Engine) strike() error {
	t, n := &e.trouble, e.summary.Batches
	if t.struck > n {
		return nil
	}
	t.struck, t.batch = n+1, nil
	for _, f := range e.cfg.Faults.Strike(n) {
		e.countFault(f)
		switch {
		case f.befallsBatch():
			t.batch = append(t.batch, f)
		case f == FaultAmnesia:
			e.feed.memory.clear()
		case f == FaultFlap:
			t.until[f] = n + e.cfg.Faults.Flap
			if err := e.feed.shut(0); err != nil {
				return err
			}
		case f.befallsEngine():
			if err := e.restart(f); err != nil {
				return err
			}
		default:
			t.until[f] = n + e.cfg.Faults.Span
		}
	}
	return e.adjust()
}

func (e *Engine) countFault(f Fault) {
	if e.summary.Faults == nil {
		e.summary.Faults = make(map[Fault]uint64)
	}
	e.summary.Faults[f]++
}

// adjust makes the sockets as the faults that last have them.
func (e *Engine) adjust() error {
	s := e.feed.sockets
	s.silent = e.lasts(FaultSilent) || e.lasts(FaultDead)
	s.faults = ReplayFaults{
		Mute:  e.lasts(FaultMute) || e.lasts(FaultDead),
		NoEnd: e.lasts(FaultEndless),
	}
	if e.lasts(FaultHoles) {
		s.faults.Skip = e.skip
	}
	if e.lasts(FaultFlap) || e.feed.next < e.trouble.unheard {
		return nil
	}
	e.trouble.unheard = 0
	return s.open()
}

// skip makes holes in answers, others in each.
func (e *Engine) skip(seq uint64) bool {
	e.trouble.answers++
	return draw(e.cfg.Faults.Seed, seq, e.trouble.answers<<8) < holePart
}

// restart lets the engine begin anew. What lasted is over.
func (e *Engine) restart(f Fault) error {
	t, faults := &e.trouble, e.cfg.Faults
	next := e.cfg.FirstSeq
	switch f {
	case FaultRestartLate:
		t.late = e.summary.Batches + faults.Late
	case FaultRestartAhead:
		next += faults.Late
	case FaultRestartPassed:
		t.unheard = e.feed.next + passedTo
		if e.feed.next > next+passedBy {
			next = e.feed.next - passedBy
		}
	default:
	}
	if f != FaultRestartLate {
		t.late = 0
	}
	if f != FaultRestartPassed {
		t.unheard = 0
	}
	t.until, t.delayed, e.feed.held = [numFaults]uint64{}, nil, nil
	e.load.Restart()
	e.feed.restart(next)
	e.summary.NextSeq = next
	if f == FaultRestartInPlace {
		return nil
	}
	return e.feed.shut(0) // adjust opens them
}

// deliver sends the next batch, and what was held back until now, as their faults
// have it. It is called with mu held.
func (e *Engine) deliver(events []wire.Event) error {
	t, n := &e.trouble, e.summary.Batches
	heard := e.feed.net != nil && !e.feed.silent && e.subscribed()
	lost := n < t.late || slices.Contains(t.batch, FaultForget)
	b, err := e.feed.add(events, e.cfg.Replay != "" && !lost)
	if err != nil {
		return err
	}
	t.last, t.sound = b, false
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
		t.sound = heard
	default:
		err = e.feed.transmit(b)
		t.sound = heard
	}
	for err == nil && len(t.delayed) > 0 && t.delayed[0].due <= n {
		err = e.feed.release(t.delayed[0].seq)
		t.delayed = t.delayed[1:]
	}
	return err
}

// calm ends all faults after the last batch.
func (e *Engine) calm(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := &e.trouble
	if e.summary.Batches == 0 {
		return nil
	}
	t.until, t.unheard = [numFaults]uint64{}, 0
	if err := e.adjust(); err != nil || t.sound && len(e.feed.held) == 0 {
		return err
	}
	e.mu.Unlock()
	err := e.serveUntil(ctx, e.subscribed)
	e.mu.Lock()
	if err != nil || ctx.Err() != nil {
		return err
	}
	out := t.sound || slices.ContainsFunc(e.feed.held, func(b remembered) bool { return b.seq == t.last.seq })
	if err := e.feed.release(); err != nil || out {
		return err
	}
	return e.feed.transmit(t.last)
}
