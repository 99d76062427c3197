package simulator

import (
	"context"
	"slices"

	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// maxPassedSeqs is how far below the old seq an incarnation after FaultRestartPassed begins at most.
	maxPassedSeqs = 50
	// passedSeqs is how far above the old seq its first live batch is.
	passedSeqs = 2
)

// omittedShare is the share of the replies that FaultPartialReplay omits.
const omittedShare = 0.25

// faultState is the state of an engine's faults. Batches are counted across restarts, from 0.
type faultState struct {
	drawn        uint64            // number of batches whose faults are determined
	batch        []Fault           // faults of the next batch
	until        [numFaults]uint64 // batch before which a lasting fault ends
	lostBefore   uint64            // batches below this number are lost permanently
	closedUntil  uint64            // the sockets stay closed until this seq
	delayed      []delayed
	last         batch
	lastSentLive bool   // the last batch was sent live, whole and to all subscribers
	omitted      uint64 // number of replies that FaultPartialReplay has considered
}

// delayed is a batch to send right after batch number due.
type delayed struct{ seq, due uint64 }

// lasts reports whether a lasting fault applies to the next batch.
func (e *Engine) lasts(f Fault) bool { return e.faults.until[f] > e.summary.Batches }

// isQuiet reports whether a subscriber knows the last seq, and can request every batch that it has not received.
func (e *Engine) isQuiet() bool {
	f := e.feed
	answers := !f.faults.NoAnswer && !f.faults.NoEnd && f.faults.Skip == nil
	return e.faults.lastSentLive && answers && !f.silent && f.pub != nil && len(f.delayed) == 0
}

// applyFaults applies the faults of the next batch, except those of its message, and ends lasting faults. A
// second call for the same batch has no effect. The caller has locked mu.
func (e *Engine) applyFaults() error {
	t, n := &e.faults, e.summary.Batches
	if t.drawn > n {
		return nil
	}
	t.drawn, t.batch = n+1, nil
	for _, f := range e.cfg.Faults.OfBatch(n) {
		e.countFault(f)
		switch {
		case f.affectsBatch():
			t.batch = append(t.batch, f)
		case f == FaultClearReplay:
			e.feed.replayBuffer.clear()
		case f == FaultFlap:
			t.until[f] = n + e.cfg.Faults.Flap
			e.feed.closePorts(0)
		case f.affectsEngine():
			e.restart(f)
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
	s.silent = e.lasts(FaultSilent) || e.lasts(FaultUnresponsive)
	s.faults = ReplayFaults{
		NoAnswer: e.lasts(FaultNoReplay) || e.lasts(FaultUnresponsive),
		NoEnd:    e.lasts(FaultReplayWithoutEnd),
	}
	if e.lasts(FaultPartialReplay) {
		s.faults.Skip = e.skip
	}
	if e.lasts(FaultFlap) || e.feed.next < e.faults.closedUntil {
		return nil
	}
	e.faults.closedUntil = 0
	return s.openPorts()
}

// skip reports whether FaultPartialReplay omits a reply. Each replay omits different replies.
func (e *Engine) skip(seq uint64) bool {
	e.faults.omitted++
	return draw(e.cfg.Faults.Seed, seq, e.faults.omitted<<8) < omittedShare
}

// restart restarts the engine, and ends its lasting faults.
func (e *Engine) restart(f Fault) {
	t, faults := &e.faults, e.cfg.Faults
	next := e.cfg.FirstSeq
	switch f {
	case FaultRestartLate:
		t.lostBefore = e.summary.Batches + faults.Late
	case FaultRestartAhead:
		next += faults.Late
	case FaultRestartPassed:
		t.closedUntil = e.feed.next + passedSeqs
		if e.feed.next > next+maxPassedSeqs {
			next = e.feed.next - maxPassedSeqs
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
	e.observe(Change{})
	e.feed.restart(next)
	e.summary.NextSeq = next
	if f != FaultRestartInPlace {
		e.feed.closePorts(0) // updateSockets opens them
	}
}

func (e *Engine) observe(c Change) {
	if e.cfg.Observe != nil {
		e.cfg.Observe(c)
	}
}

// deliver sends the next batch with its faults, and the delayed batches that are due. The caller has locked mu.
func (e *Engine) deliver(events []wire.Event) error {
	t, n := &e.faults, e.summary.Batches
	toAll := e.feed.pub != nil && !e.feed.silent && e.subscribed()
	lost := n < t.lostBefore || slices.Contains(t.batch, FaultLose)
	b := e.feed.add(events, e.cfg.Replay != "" && !lost)
	e.observe(Change{e.feed.encoder.last, events})
	t.last, t.lastSentLive = b, false
	switch {
	case lost, slices.Contains(t.batch, FaultDrop):
	case slices.Contains(t.batch, FaultDelay):
		e.feed.delay(b)
		t.delayed = append(t.delayed, delayed{b.seq, n + e.cfg.Faults.Delay})
	case slices.Contains(t.batch, FaultTruncate):
		e.feed.publish(b.seq, b.payload[:len(b.payload)/2])
	case slices.Contains(t.batch, FaultDuplicate):
		e.feed.transmit(b)
		e.feed.transmit(b)
		t.lastSentLive = toAll
	default:
		e.feed.transmit(b)
		t.lastSentLive = toAll
	}
	var err error
	for err == nil && len(t.delayed) > 0 && t.delayed[0].due <= n {
		err = e.feed.sendDelayed(t.delayed[0].seq)
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
	if err := e.updateSockets(); err != nil || t.lastSentLive && len(e.feed.delayed) == 0 {
		return err
	}
	e.mu.Unlock()
	e.serveUntil(ctx, e.subscribed)
	e.mu.Lock()
	if ctx.Err() != nil {
		return nil
	}
	out := t.lastSentLive || slices.ContainsFunc(e.feed.delayed, func(b batch) bool { return b.seq == t.last.seq })
	if err := e.feed.sendDelayed(); err != nil || out {
		return err
	}
	e.feed.transmit(t.last)
	return nil
}
