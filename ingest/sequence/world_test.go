package sequence

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// limits are how often each kind of event may occur in a world.
type limits struct {
	batches, losses, restarts, cuts, holes, failures, forgets, silences uint8
}

// world is an engine, its connection and its replay socket, and a Machine that reads it.
// Time stands still: retries are due at once.
type world struct {
	m      *Machine
	view   worldView
	epochs bool // the engine names its incarnation
	replay bool // the engine has a replay socket
	left   limits

	incarnation, next uint64
	// firstStored is the first seq that the engine can replay.
	firstStored uint64
	connection  ConnectionID
	inFlight    []Batch // live batches that were published and have not arrived

	request  *Request
	sent     bool
	replies  []Batch   // remaining replies to the request
	lossless bool      // no fault so far permits a report of a loss
	trace    *[]string // records the actions; nil if not needed
}

// worldView is a router's state: a bit for each block, and whether a loss was reported.
type worldView struct {
	blocks   [3]uint8 // by incarnation
	reported bool
	last     uint64
	begun    bool
	wrong    string // describes an error in the order of batches; empty if there is none
}

func (v *worldView) do(a *Action) {
	switch a.Kind {
	case Deliver:
		b := a.Batch
		due := uint64(0)
		if v.begun {
			due = v.last + 1
		}
		if b.Seq != due && !v.reported || v.begun && b.Seq <= v.last {
			v.wrong = fmt.Sprintf("batch %d where %d is due", b.Seq, due)
		}
		v.begun, v.last = true, b.Seq
		v.blocks[b.Fingerprint.Hash>>32] |= 1 << b.Seq
	case ReportBegin:
		v.reported = v.reported || a.Missed > 0
	case ReportGap:
		v.reported = true
		if a.Missed > 0 {
			v.begun, v.last = true, a.Last
		}
	case ReportRestart:
		*v = worldView{wrong: v.wrong}
	default:
	}
}

func newWorld(l limits, replay, epochs bool) *world {
	w := &world{m: New(Config{Grace: time.Hour, CanReconnect: true}), epochs: epochs, replay: replay, left: l, lossless: true}
	return w
}

func (w *world) clone() *world {
	c := *w
	m := *w.m
	m.actions = nil
	m.order.history.ring = slices.Clone(m.order.history.ring)
	m.buffer.batches = slices.Clone(m.buffer.batches)
	if m.repair != nil {
		r := *m.repair
		m.repair = &r
	}
	c.m = &m
	c.inFlight = slices.Clone(w.inFlight)
	c.replies = slices.Clone(w.replies)
	return &c
}

// key returns a hash of the state. Worlds with the same key behave alike from there on.
func (w *world) key() uint64 {
	b := make([]byte, 0, 512)
	num := func(all ...uint64) {
		for _, n := range all {
			b = binary.AppendUvarint(b, n)
		}
	}
	flag := func(all ...bool) {
		for _, f := range all {
			b = append(b, map[bool]byte{true: 1}[f])
		}
	}
	batches := func(all []Batch) {
		num(uint64(len(all)))
		for i := range all {
			num(all[i].Seq, all[i].Fingerprint.Hash, uint64(all[i].connection))
		}
	}
	m, l := w.m, w.left
	b = append(b, l.batches, l.losses, l.restarts, l.cuts, l.holes, l.failures, l.forgets, l.silences)
	b = append(b, w.view.blocks[:]...)
	flag(w.view.reported, w.view.begun, w.sent, w.request != nil, w.lossless)
	num(w.view.last, w.incarnation, w.next, w.firstStored, uint64(w.connection))
	batches(w.inFlight)
	batches(w.replies)
	if w.request != nil {
		num(w.request.From)
	}
	num(uint64(m.state), uint64(m.order.progress), m.order.last, min(m.restarts, 1), m.former.last,
		uint64(m.current.ID), uint64(m.connections), uint64(m.replayHealth), m.unbuffered, uint64(m.buffer.requested))
	for _, p := range m.order.history.ring {
		num(p.seq, p.Hash)
	}
	b = append(b, m.incarnation.epoch...)
	b = append(b, '/')
	b = append(b, m.former.incarnation.epoch...)
	flag(m.incarnation.epochKnown, m.former.known, m.hasUnbuffered, m.possibleRestartReported, m.repair != nil, m.restUntil.IsZero())
	batches(m.buffer.batches)
	if r := m.repair; r != nil {
		q := r.request
		num(uint64(r.Cause), uint64(r.failures), uint64(r.recheck), r.forgottenTo, min(r.Batches, 1),
			uint64(q.target), uint64(q.connection), uint64(min(q.replies, 2)), uint64(q.cut))
		flag(r.answered, r.comparePast, r.pastUnknown, r.final, r.retryAt.IsZero(), q.sameIncarnation, q.advanced)
	}
	return xxh3.Hash(b)
}

func (w *world) do(actions []Action) {
	for i := range actions {
		a := &actions[i]
		w.view.do(a)
		if w.trace != nil {
			*w.trace = append(*w.trace, describe(a))
		}
		switch a.Kind {
		case RequestReplay:
			w.request, w.sent, w.replies = a.Request, false, nil
		case CancelReplay:
			w.request, w.replies = nil, nil
		case RepairFailed:
			w.lossless = false
		default:
		}
	}
	if w.request == nil && !w.m.retryAt().IsZero() {
		w.do(slices.Clone(w.m.Tick(testTime.Add(maxRetryWait), true)))
	}
}

func describe(a *Action) string {
	s := fmt.Sprintf("    action %d", a.Kind)
	if a.Batch != nil {
		s += fmt.Sprintf(" batch %d of %d", a.Batch.Seq, a.Batch.Fingerprint.Hash>>32)
	}
	if a.Kind == ReportGap {
		s += fmt.Sprintf(" gap %v %d-%d", a.Reason, a.First, a.Last)
	}
	if a.Kind == RequestReplay {
		s += fmt.Sprintf(" request from %d because of %v", a.Request.From, a.Request.Cause)
	}
	return s
}

func (w *world) batch(seq uint64) Batch {
	b := *batchOf(w.incarnation, seq)
	if w.epochs {
		b.Epoch = []byte(strconv.FormatUint(w.incarnation, 10))
	}
	return b
}

// disconnect closes the connection, and reports that to the machine.
func (w *world) disconnect() {
	w.inFlight = nil
	if w.m.Connected() {
		w.do(w.m.Disconnect(testTime, w.connection))
	}
}

func (w *world) connect() {
	w.connection++
	c := Connection{ID: w.connection}
	if w.replay {
		c.Replay = replayEndpoint
	}
	w.do(w.m.Connect(testTime, c))
}

func (w *world) publish(arrives bool) {
	if arrives {
		w.inFlight = append(w.inFlight, w.batch(w.next))
	}
	w.next++
}

func (w *world) arrive() {
	b := w.inFlight[0]
	w.inFlight = w.inFlight[1:]
	w.do(w.m.Arrival(testTime, w.connection, &b))
}

// send delivers the request to the engine, which queues its replies.
func (w *world) send() {
	w.sent = true
	w.m.Sent(w.request.ID)
	for seq := max(w.request.From, w.firstStored); seq < w.next; seq++ {
		b := w.batch(seq)
		b.Epoch = nil
		w.replies = append(w.replies, b)
	}
}

func (w *world) reply() {
	b := w.replies[0]
	w.replies = w.replies[1:]
	id := w.request.ID
	actions, more := w.m.Reply(testTime, id, &b)
	w.do(actions)
	if !more && w.request != nil && w.request.ID == id {
		w.end(OutcomeComplete)
	}
}

func (w *world) end(o Outcome) {
	id := w.request.ID
	w.request, w.sent, w.replies = nil, false, nil
	w.do(w.m.ReplayEnded(testTime, id, o))
}

// step is an event that may occur in a world.
type step struct {
	name string
	do   func(w *world)
}

// steps returns the events that may occur next.
func (w *world) steps() (all []step) {
	add := func(ok bool, name string, do func(w *world)) {
		if ok {
			all = append(all, step{name, do})
		}
	}
	l, up := w.left, w.m.Connected()
	add(l.batches > 0, "publish", func(w *world) { w.left.batches--; w.publish(w.m.Connected()) })
	add(l.batches > 0 && up && l.losses > 0, "publish, lost", func(w *world) { w.left.batches--; w.left.losses--; w.publish(false) })
	add(len(w.inFlight) > 0, "arrive", (*world).arrive)
	add(!up, "connect", (*world).connect)
	add(up && l.cuts > 0, "cut", func(w *world) { w.left.cuts--; w.disconnect() })
	add(l.restarts > 0, "restart", func(w *world) {
		w.left.restarts--
		w.lossless = w.lossless && w.request == nil // otherwise the replies may be of either incarnation
		w.incarnation, w.next, w.firstStored = w.incarnation+1, 0, 0
		w.disconnect()
		if w.request != nil && w.sent {
			w.end(OutcomeFailed)
		}
	})
	add(w.request != nil && !w.sent, "send", (*world).send)
	add(len(w.replies) > 0, "reply", (*world).reply)
	add(len(w.replies) > 0 && l.holes > 0, "reply, lost", func(w *world) {
		w.left.holes--
		w.replies = w.replies[1:]
		// The same hole twice, or a hole before the first reply, looks like a forgotten batch.
		w.lossless = w.lossless && w.left.holes > 0 && w.m.repair.request.replies > 0
	})
	add(w.sent && w.request != nil && len(w.replies) == 0, "end", func(w *world) { w.end(OutcomeComplete) })
	add(w.request != nil && l.failures > 0, "silent", func(w *world) { w.left.failures--; w.end(OutcomeSilent) })
	add(w.request != nil && l.failures > 0, "failed", func(w *world) { w.left.failures--; w.end(OutcomeFailed) })
	add(w.firstStored < w.next && l.forgets > 0, "forget", func(w *world) { w.left.forgets--; w.firstStored++; w.lossless = false })
	add(up && w.replay && l.silences > 0 && w.m.repair == nil, "silence", func(w *world) {
		w.left.silences--
		w.m.begin()
		w.m.startRepair(testTime, CauseSilence)
		w.do(w.m.actions)
	})
	return all
}

// settle publishes one more batch, and lets all pending events occur without further faults. It
// returns a description of the error; empty if there is none.
func (w *world) settle() string {
	if !w.m.Connected() {
		w.connect()
	}
	w.publish(true)
	for n := 0; ; n++ {
		switch {
		case n > 200:
			return "it does not come to an end"
		case w.request != nil && !w.sent:
			w.send()
		case len(w.replies) > 0:
			w.reply()
		case w.request != nil:
			w.end(OutcomeComplete)
		case len(w.inFlight) > 0:
			w.arrive()
		default:
			return w.check()
		}
	}
}

func (w *world) check() string {
	var want [3]uint8
	want[w.incarnation] = 1<<w.next - 1
	switch v := w.view; {
	case v.wrong != "":
		return v.wrong
	case v.blocks != want && !v.reported:
		return fmt.Sprintf("blocks %b, want %b, and nothing is reported", v.blocks, want)
	case v.reported && w.replay && w.lossless:
		return "a loss is reported that could have been repaired"
	case w.m.Replaying() || w.m.buffer.head() != nil || w.m.State() != Live:
		return fmt.Sprintf("state %v, replaying %v, %d buffered", w.m.State(), w.m.Replaying(), len(w.m.buffer.batches))
	}
	return ""
}

// explain repeats a path of steps, and returns its steps and actions.
func explain(start *world, path []string) (trace []string) {
	w := start.clone()
	w.trace = &trace
	for _, name := range path {
		trace = append(trace, name)
		for _, s := range w.steps() {
			if s.name == name {
				s.do(w)
				break
			}
		}
	}
	trace = append(trace, "settle")
	w.settle()
	return trace
}

// explore runs every order of steps, and returns the number of states.
func explore(t *testing.T, start *world) (states int) {
	seen := make(map[uint64]struct{})
	var path []string
	var visit func(w *world)
	visit = func(w *world) {
		key := w.key()
		if _, ok := seen[key]; ok || t.Failed() {
			return
		}
		seen[key] = struct{}{}
		wrong := w.view.wrong
		if w.request == nil && len(w.inFlight) == 0 { // every order of steps reaches such a state
			wrong = w.clone().settle()
		}
		if wrong != "" {
			t.Errorf("%s, after:\n%s", wrong, strings.Join(explain(start, path), "\n"))
			return
		}
		for _, s := range w.steps() {
			next := w.clone()
			path = append(path, s.name)
			s.do(next)
			visit(next)
			path = path[:len(path)-1]
		}
	}
	visit(start)
	return len(seen)
}

// TestExhaustiveSmallWorlds runs every order of events in small worlds. In each, the view finally
// has the engine's blocks, or a loss was reported. No loss is reported that a replay could have
// repaired.
func TestExhaustiveSmallWorlds(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine explores millions of states: see the tests without the race detector")
	}
	for _, tt := range []struct {
		name           string
		replay, epochs bool
		limits         limits
	}{
		{"losses and holes", true, false, limits{batches: 4, losses: 2, holes: 2, failures: 1}},
		{"losses", true, false, limits{batches: 6, losses: 3}},
		{"cuts", true, false, limits{batches: 4, losses: 1, cuts: 2, failures: 1}},
		{"restart", true, false, limits{batches: 4, losses: 1, restarts: 1, cuts: 1}},
		{"restart and six batches", true, false, limits{batches: 6, restarts: 1}},
		{"restart with failing replays", true, false, limits{batches: 4, restarts: 1, losses: 1, failures: 2}},
		{"restart with epochs", true, true, limits{batches: 4, losses: 1, restarts: 1, cuts: 1}},
		{"forgotten replays", true, false, limits{batches: 4, losses: 1, forgets: 2, cuts: 1}},
		{"restart and forgotten replays", true, false, limits{batches: 4, losses: 1, forgets: 2, restarts: 1}},
		{"silence", true, false, limits{batches: 4, losses: 2, silences: 2, restarts: 1}},
		{"without replay", false, false, limits{batches: 6, losses: 2, restarts: 2, cuts: 2}},
		{"without replay, with epochs", false, true, limits{batches: 6, losses: 2, restarts: 2, cuts: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			states := explore(t, newWorld(tt.limits, tt.replay, tt.epochs))
			t.Logf("%d states", states)
		})
	}
}
