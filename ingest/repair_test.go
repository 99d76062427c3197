package ingest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// modelEngine is an engine with a replay socket, as plainly as it can be said.
type modelEngine struct {
	life, next uint64
	buffer     []uint64 // seqs that it remembers
	limit      int
	forgotten  map[uint64]bool // seqs that replay leaves out for good
}

func (e *modelEngine) publish() (seq uint64) {
	seq = e.next
	e.next++
	e.buffer = append(e.buffer, seq)
	e.buffer = e.buffer[max(0, len(e.buffer)-e.limit):]
	return seq
}

func (e *modelEngine) message(seq uint64) *zmqio.Message {
	return testMessage("kv", seq, blockOf(e.life, seq))
}

func (e *modelEngine) restart(first uint64) {
	*e = modelEngine{life: e.life + 1, next: first, limit: e.limit, forgotten: map[uint64]bool{}}
}

// listener is a lane that keeps what it was told, and judges whether what it lacks
// was.
type tale struct {
	t interface {
		Fatalf(string, ...any)
		Logf(string, ...any)
	}
	seen       map[uint64]bool // blocks
	incomplete bool
	last       uint64
	begun      bool
}

func (l *tale) Batch(b *feed.Batch) {
	if l.begun && b.Seq <= l.last {
		l.t.Fatalf("batch %d after %d", b.Seq, l.last)
	}
	if l.begun && b.Seq != l.last+1 && !l.incomplete {
		l.t.Fatalf("batch %d after %d, and nothing told", b.Seq, l.last)
	}
	if !l.begun && b.Seq != 0 && !l.incomplete {
		l.t.Fatalf("batch %d first, and nothing told", b.Seq)
	}
	l.begun, l.last = true, b.Seq
	l.seen[b.Events[0].BlockHashes[0]] = true
}

func (l *tale) Gap(g feed.Gap) {
	l.incomplete = true
	if g.Missed > 0 {
		l.begun, l.last = true, g.LastSeq
	}
}

func (l *tale) Restarted(feed.Restart) {
	clear(l.seen)
	l.begun, l.incomplete = false, false
}

// TestRepairTellsTheWholeTruth lets an engine publish, lose, forget and restart,
// and its replay be cut, have holes and fail: once all is quiet the lane knows what
// the engine published in this life, or was told that something is missing.
func TestRepairTellsTheWholeTruth(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &tale{t: t, seen: make(map[uint64]bool)}
		p, in := newTestPublisher(l)
		p.replay = "tcp://engine"
		p.replayAnswered = true
		var asked *repair
		p.worker.fetch = func(_ *publisher, r *repair) { asked = r }
		e := &modelEngine{limit: rapid.IntRange(1, 12).Draw(t, "memory"), forgotten: map[uint64]bool{}}
		now := testTime
		p.connect(now)
		live := func() {
			seq := e.publish()
			switch rapid.IntRange(0, 7).Draw(t, "live") {
			case 0: // lost
				return
			case 1: // does not decode; the replay has it whole
				m := e.message(seq)
				m.Frames[2] = fmt.Appendf(nil, "\xc1 %d %d", e.life, seq)
				p.messageAt(in, now, m)
				return
			case 2: // twice
				p.messageAt(in, now, e.message(seq))
			case 3: // nor does the replay have it
				e.forgotten[seq] = true
				return
			}
			p.messageAt(in, now, e.message(seq))
		}
		// restart is one while the engine replays.
		restart := func() {
			e.restart(0)
			p.disconnect()
			p.connect(now)
			live()
		}
		// ask answers one ask, with live batches between, and tells whether it was one
		// without faults.
		ask := func(sound bool) {
			from, ok := p.ask(asked)
			if !ok {
				asked = nil
				return
			}
			var err error
			fault := 0
			if !sound {
				fault = rapid.IntRange(0, 6).Draw(t, "replay")
			}
			replies := append([]uint64(nil), e.buffer...)
			life := e.life
			for i, seq := range replies {
				if seq < from || e.forgotten[seq] {
					continue
				}
				if fault == 1 && rapid.Bool().Draw(t, "hole") {
					continue
				}
				if fault == 2 && rapid.Bool().Draw(t, "cut") || fault == 3 {
					err = errReplaySilent
					break
				}
				if fault == 4 && i > 0 && e.life == life && rapid.IntRange(0, 3).Draw(t, "live between") == 0 {
					live()
				}
				if fault == 6 && e.life == life && rapid.IntRange(0, 3).Draw(t, "restart between") == 0 {
					restart()
				}
				m := testMessage("kv", seq, blockOf(life, seq))
				a := newArrival(&in.decoder, nil, seq, m.Frames[2])
				a.replayed = true
				if !p.replayed(in, now, asked, &a) {
					break
				}
			}
			if fault == 6 && rapid.Bool().Draw(t, "restart at the end") {
				restart()
			}
			if fault == 5 {
				err = errors.New("no end marker")
			}
			now = now.Add(time.Second)
			if _, again := p.asked(in, now, asked, err); !again {
				asked = nil
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0, 1, 2, 3:
				live()
			case 4, 5, 6:
				if asked != nil {
					ask(false)
				}
			case 7: // a connection that broke
				for range rapid.IntRange(0, 5).Draw(t, "missed") {
					e.publish()
				}
				p.disconnect()
				p.connect(now)
			case 8: // a restart behind the same connection, or another
				e.restart(rapid.Uint64Range(0, 2).Draw(t, "first"))
				for range rapid.IntRange(0, 20).Draw(t, "missed") {
					e.publish()
				}
				p.disconnect()
				p.connect(now)
			case 9:
				p.fetch(now, causeProbe)
			}
		}
		// Quiet: one more batch, whole, and no more faults.
		p.disconnect()
		p.connect(now)
		p.messageAt(in, now, e.message(e.publish()))
		for n := 0; asked != nil; n++ {
			if n > 100 {
				t.Fatalf("still asking: %+v", asked)
			}
			ask(true)
		}
		if p.repair != nil || p.held.first() != nil {
			t.Fatalf("repair %+v, %d held", p.repair, len(p.held.batches))
		}
		if p.state != SourceLive {
			t.Fatalf("state %v", p.state)
		}
		for hash := range l.seen {
			if hash>>32 != e.life && !l.incomplete {
				t.Fatalf("block of life %d in life %d", hash>>32, e.life)
			}
		}
		if !l.incomplete && len(l.seen) != int(e.next) {
			t.Fatalf("%d of %d blocks, and nothing told", len(l.seen), e.next)
		}
		if used := p.worker.shared.budgets.reordered.Used(); used != 0 {
			t.Fatalf("%d bytes held", used)
		}
	})
}
