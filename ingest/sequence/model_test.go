package sequence

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// account checks that every seq of a publisher without a replay socket is delivered or reported
// exactly once, in order.
type account struct {
	t interface{ Errorf(string, ...any) }
	// incarnation is the number of restarts, and next the seq that must be next.
	incarnation, next uint64
	begun             bool
}

func (a *account) do(actions []Action) {
	for _, act := range actions {
		switch act.Kind {
		case Deliver:
			a.deliver(act.Batch)
		case ReportBegin:
			if a.begun {
				break
			}
			if a.begun = true; act.FirstContact {
				a.next = act.Seq // kvcast was not connected before
			}
		case ReportGap:
			if act.First != a.next || act.Missed != act.Last-act.First+1 {
				a.t.Errorf("incarnation %d: gap %+v, want one from %d", a.incarnation, act, a.next)
			}
			a.next = act.Last + 1
		case ReportRestart:
			a.incarnation++
			a.next, a.begun = 0, false
		default:
		}
	}
}

func (a *account) deliver(b *Batch) {
	if b.Malformed {
		if b.Seq+1 != a.next {
			a.t.Errorf("incarnation %d: malformed batch %d is not reported as lost", a.incarnation, b.Seq)
		}
		return
	}
	if b.Seq != a.next {
		a.t.Errorf("incarnation %d: batch %d, want %d", a.incarnation, b.Seq, a.next)
	}
	if h := b.Fingerprint.Hash; h != blockOf(a.incarnation, b.Seq) {
		a.t.Errorf("incarnation %d: batch %d is that of %d in incarnation %d", a.incarnation, b.Seq, h&(1<<32-1), h>>32)
	}
	a.next = b.Seq + 1
}

func TestEverySeqIsAccountedFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := &account{t: t}
		m := New(Config{})
		arrive := func(b *Batch) { a.do(m.Arrival(testTime, 1, b)) }
		named := rapid.Bool().Draw(t, "engine names its epoch")
		last := uint64(0) // of the previous incarnation
		for incarnation := range uint64(rapid.IntRange(1, 5).Draw(t, "incarnations")) {
			epoch := ""
			if named {
				epoch = fmt.Sprint(incarnation)
			}
			first := rapid.Uint64Range(0, 20).Draw(t, "first")
			// Without an epoch only a seq that is not above the last shows a restart. So the first
			// batch must have such a seq, and must arrive.
			plain := incarnation > 0 && !named
			if plain {
				first = min(first, last)
				if m.former.continuesAt(first) {
					first = 0 // otherwise the batch could be of a second publisher
				}
			}
			seq := first
			var sent []*Batch
			for range rapid.IntRange(1, 30).Draw(t, "batches") {
				b := batchOf(incarnation, seq)
				b.Epoch = []byte(epoch)
				switch rapid.IntRange(0, 5).Draw(t, "fault") {
				case 0: // lost
					if !plain || len(sent) > 0 {
						seq++
						continue
					}
				case 1: // after a duplicate
					if len(sent) > 0 {
						again := *rapid.SampledFrom(sent).Draw(t, "duplicate")
						arrive(&again)
					}
				case 2:
					b.Malformed = true
				}
				arrive(b)
				sent = append(sent, b)
				last = seq
				seq++
			}
			if len(sent) == 0 {
				b := batchOf(incarnation, first)
				b.Epoch = []byte(epoch)
				arrive(b)
				last = first
			}
			if a.incarnation != incarnation || a.next != last+1 {
				t.Fatalf("incarnation %d up to seq %d, want incarnation %d up to %d", a.incarnation, a.next, incarnation, last+1)
			}
		}
	})
}

func TestSeqsThatJumpToTheEnd(t *testing.T) {
	const top = math.MaxUint64
	m := New(Config{})
	type gap struct{ first, last, missed uint64 }
	var gaps []gap
	arrive := func(b *Batch) {
		for _, a := range m.Arrival(testTime, 1, b) {
			if a.Kind == ReportGap {
				gaps = append(gaps, gap{a.First, a.Last, a.Missed})
			}
		}
	}
	arrive(batchOf(0, 0))
	arrive(batchOf(0, top))
	arrive(batchOf(1, 0))
	arrive(batchOf(1, top))
	arrive(&Batch{Seq: top, Epoch: []byte("1"), Malformed: true})
	arrive(&Batch{Seq: 0, Epoch: []byte("1"), Fingerprint: Fingerprint{Hash: 6}})
	// The last gap is of all 2^64 seqs; its count saturates at 2^64-1.
	want := []gap{{1, top - 1, top - 1}, {1, top - 1, top - 1}, {0, top, top}}
	if d := cmp.Diff(want, gaps, cmp.AllowUnexported(gap{})); d != "" {
		t.Errorf("gaps (-want +got):\n%s", d)
	}
}

// view is a router's state for one publisher: its blocks, and whether they may differ from the
// engine's cache. It checks that no batch is missing without a report.
type view struct {
	t interface {
		Fatalf(string, ...any)
	}
	blocks     map[uint64]bool
	incomplete bool
	last       uint64
	begun      bool
}

func newView(t interface{ Fatalf(string, ...any) }) *view {
	return &view{t: t, blocks: make(map[uint64]bool)}
}

func (v *view) do(actions []Action) {
	for _, a := range actions {
		switch a.Kind {
		case Deliver:
			v.deliver(a.Batch)
		case ReportBegin:
			v.incomplete = v.incomplete || a.Missed > 0
		case ReportGap:
			v.incomplete = true
			if a.Missed > 0 {
				v.begun, v.last = true, a.Last
			}
		case ReportRestart:
			clear(v.blocks)
			v.begun, v.incomplete = false, false
		default:
		}
	}
}

func (v *view) deliver(b *Batch) {
	if b.Malformed {
		return
	}
	switch {
	case v.begun && b.Seq <= v.last:
		v.t.Fatalf("batch %d after %d", b.Seq, v.last)
	case v.begun && b.Seq != v.last+1 && !v.incomplete:
		v.t.Fatalf("batch %d after %d, and nothing reported", b.Seq, v.last)
	case !v.begun && b.Seq != 0 && !v.incomplete:
		v.t.Fatalf("batch %d first, and nothing reported", b.Seq)
	}
	v.begun, v.last = true, b.Seq
	v.blocks[b.Fingerprint.Hash] = true
}

// modelEngine is an engine with a replay socket.
type modelEngine struct {
	incarnation, next uint64
	stored            []uint64 // seqs in the replay buffer
	limit             int
	forgotten         map[uint64]bool // seqs missing in every replay
}

func (e *modelEngine) publish() (seq uint64) {
	seq = e.next
	e.next++
	e.stored = append(e.stored, seq)
	e.stored = e.stored[max(0, len(e.stored)-e.limit):]
	return seq
}

func (e *modelEngine) restart(first uint64) {
	*e = modelEngine{incarnation: e.incarnation + 1, next: first, limit: e.limit, forgotten: map[uint64]bool{}}
}

// TestViewEqualsTheEngineOrTheLossIsReported combines lost batches, forgotten batches, restarts,
// and replays that are interrupted, have holes or fail, at random. After the last fault the view
// has all batches that the engine published in this incarnation, or a loss was reported.
func TestViewEqualsTheEngineOrTheLossIsReported(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := newView(t)
		m := New(Config{CanReconnect: true})
		var request *Request
		do := func(actions []Action) {
			v.do(actions)
			for _, a := range actions {
				switch a.Kind {
				case RequestReplay:
					request = a.Request
				case CancelReplay:
					request = nil
				default:
				}
			}
		}
		e := &modelEngine{limit: rapid.IntRange(1, 12).Draw(t, "stored"), forgotten: map[uint64]bool{}}
		now, connection := testTime, ConnectionID(0)
		reconnect := func() {
			do(m.Disconnect(now, connection))
			connection++
			do(m.Connect(now, Connection{ID: connection, Replay: replayEndpoint}))
		}
		reconnect()
		arrive := func(seq uint64, malformed bool) {
			b := batchOf(e.incarnation, seq)
			if b.Malformed = malformed; malformed {
				b.Fingerprint.Hash = ^b.Fingerprint.Hash
			}
			do(m.Arrival(now, connection, b))
		}
		live := func() {
			seq := e.publish()
			switch rapid.IntRange(0, 7).Draw(t, "live") {
			case 0: // lost
				return
			case 1: // the replay has it intact
				arrive(seq, true)
				return
			case 2: // a duplicate
				arrive(seq, false)
			case 3: // lost, and missing in every replay
				e.forgotten[seq] = true
				return
			}
			arrive(seq, false)
		}
		restart := func() {
			e.restart(0)
			reconnect()
			live()
		}
		// answer answers one request. Unless sound is true, live batches arrive and the engine
		// restarts between the replies.
		answer := func(sound bool) {
			q := *request
			request = nil
			m.Sent(q.ID)
			outcome, fault := OutcomeComplete, 0
			if !sound {
				fault = rapid.IntRange(0, 6).Draw(t, "replay")
			}
			incarnation := e.incarnation
			for i, seq := range append([]uint64(nil), e.stored...) {
				if seq < q.From || e.forgotten[seq] || fault == 1 && rapid.Bool().Draw(t, "hole") {
					continue
				}
				if fault == 2 && rapid.Bool().Draw(t, "interrupted") || fault == 3 {
					outcome = OutcomeSilent
					break
				}
				if fault == 4 && i > 0 && e.incarnation == incarnation && rapid.IntRange(0, 3).Draw(t, "live between") == 0 {
					live()
				}
				if fault == 6 && e.incarnation == incarnation && rapid.IntRange(0, 3).Draw(t, "restart between") == 0 {
					restart()
				}
				actions, more := m.Reply(now, q.ID, batchOf(incarnation, seq))
				if do(actions); !more {
					break
				}
			}
			if fault == 6 && rapid.Bool().Draw(t, "restart at the end") {
				restart()
			}
			if fault == 5 {
				outcome = OutcomeFailed // no end marker
			}
			now = now.Add(time.Second)
			do(m.ReplayEnded(now, q.ID, outcome))
			if at := m.retryAt(); !at.IsZero() {
				now = at
				do(m.Tick(now, true))
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0, 1, 2, 3:
				live()
			case 4, 5, 6:
				if request != nil {
					answer(false)
				}
			case 7: // the connection breaks
				for range rapid.IntRange(0, 5).Draw(t, "missed") {
					e.publish()
				}
				reconnect()
			case 8:
				e.restart(rapid.Uint64Range(0, 2).Draw(t, "first"))
				for range rapid.IntRange(0, 20).Draw(t, "missed") {
					e.publish()
				}
				reconnect()
			case 9:
				m.begin()
				m.startRepair(now, CauseSilence)
				do(m.actions)
			}
		}
		// No more faults, and one more batch.
		reconnect()
		arrive(e.publish(), false)
		for n := 0; request != nil; n++ {
			if n > 100 {
				t.Fatalf("still requests: %+v", m.repair)
			}
			answer(true)
		}
		if m.Replaying() || m.buffer.head() != nil || m.State() != Live {
			t.Fatalf("state %v, repair %+v, %d buffered", m.State(), m.repair, len(m.buffer.batches))
		}
		for hash := range v.blocks {
			if hash>>32 != e.incarnation && !v.incomplete {
				t.Fatalf("block of incarnation %d in incarnation %d", hash>>32, e.incarnation)
			}
		}
		if !v.incomplete && len(v.blocks) != int(e.next) {
			t.Fatalf("%d of %d blocks, and nothing reported", len(v.blocks), e.next)
		}
		if m.buffer.bytes != 0 {
			t.Fatalf("%d bytes buffered", m.buffer.bytes)
		}
	})
}
