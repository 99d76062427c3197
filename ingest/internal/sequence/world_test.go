package sequence

import (
	"fmt"
	"math/bits"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// limits are how often each kind of event may occur in a world.
type limits struct {
	batches, losses, restarts, cuts, holes, failures, forgets, silences uint8
	duplicates, malformed, overruns, unstored                           uint8
	// crashes are ends of kvcast, which then starts again.
	crashes uint8
	// others are batches of another engine.
	others uint8
	// rereads are requests for all batches because of a loss.
	rereads uint8
	// waits are minutes that pass. Exhaustive tests have none, because keys do not contain the time.
	waits uint8
}

// world is an engine, its connections and its replay socket, and a Machine that reads it.
//
// What an engine has sent may arrive after it has restarted: live batches and the end of their
// connection, replies and the end of their request. The inputs of both, and those of the next
// incarnation, arrive in every order that the sockets permit.
//
// Time stands still except for waits: retries are due at once. Seqs are below 64.
type world struct {
	m      *Machine
	view   worldView
	cursor Cursor
	// durable are the states after the last three calls of the lane, the newest first. After a crash, kvcast continues
	// with one of them: calls that were not stored are lost with it.
	durable [3]durableState
	epochs  bool // the engine names its incarnation
	// offers is the kind of snapshots that the engine offers.
	offers snapshotKind
	replay bool // the engine has a replay socket
	// foreign reports whether the replay socket belongs to another engine, whose batches are of the incarnation foreigner.
	foreign    bool
	other      seqSet // what the other engine can replay
	otherBegan uint64 // number of its batches
	// listens reports whether the engine connects. Then its next connection may be known before the
	// end of the former connection.
	listens bool
	// resumes reports whether the engine publishes by a call, which begins with the last batch read if the engine has one
	// of that seq. Otherwise it has only later batches.
	resumes bool
	left    limits

	incarnation, next uint64
	stored            seqSet // what the engine can replay
	connections       ConnectionID
	current, former   pipe

	request *Request
	sent    bool
	// replies are the remaining replies to a request that was sent, by the incarnation repliesOf.
	replies   seqSet
	repliesOf uint64
	// snapshot is what is left of the reply to a request for a snapshot, if asked, which is of repliesOf and
	// includes the batches up to snapshotSeq. snapshotSent reports whether any was ever sent.
	asked, snapshotSent bool
	snapshot            snapshotPart
	snapshotSeq         uint64
	// alone reports whether the request was sent without a connection, and none was known since.
	alone bool
	// answered is the incarnation that answered such a request with batches. A late batch of an earlier
	// one is not delivered until another connection is known.
	answered uint64

	now      time.Time
	lossless bool      // no fault so far permits a report of a loss
	lossy    bool      // a fault permits that a loss remains which the replay socket can repair
	trace    *[]string // records the actions; nil if not needed
}

// foreigner is the incarnation of the engine that a foreign replay socket belongs to.
const foreigner = 3

// durableState is a router's state, and the cursor that is stored with it.
type durableState struct {
	view   worldView
	cursor Cursor
}

// snapshotKind is how an engine offers snapshots.
type snapshotKind uint8

const (
	noSnapshots snapshotKind = iota
	// snapshotsOfPublisher: live batches and replies have a publisher id, as vLLM's.
	snapshotsOfPublisher
	// snapshotsOfEpoch: live batches have an epoch, and a request makes the engine publish a batch, as SGLang's. They
	// are used to begin with only.
	snapshotsOfEpoch
)

// snapshotPart is the next part of a snapshot, which has two batches.
type snapshotPart uint8

const (
	snapshotDone snapshotPart = iota
	snapshotUpper
	snapshotLower
	snapshotHeader
)

// pipe is a connection on which an engine publishes. The zero value is none.
type pipe struct {
	id          ConnectionID // 0 after Machine.Disconnect
	incarnation uint64
	// inFlight are the batches that were published and have not arrived.
	inFlight seqSet
	known    bool // Machine.Connect was called
	closed   bool // no more batches are published on it
}

func (p *pipe) exists() bool { return *p != pipe{} }

// seqSet is a set of seqs below 64.
type seqSet uint64

func (s seqSet) lowest() (seq uint64) { return uint64(bits.TrailingZeros64(uint64(s))) }

// pop removes the lowest seq and returns it.
func (s *seqSet) pop() (seq uint64) {
	seq = s.lowest()
	*s &= *s - 1
	return seq
}

func (s seqSet) has(seq uint64) bool { return s>>seq&1 != 0 }

func (s *seqSet) add(seq uint64) { *s |= 1 << seq }

// worldView is a router's state: the blocks by incarnation, and whether a loss was reported.
type worldView struct {
	blocks   [4]seqSet
	reported bool
	last     uint64
	begun    bool
	// conflict reports whether batches of two publishers were delivered, which have no order.
	conflict bool
	// doubted reports whether a possible restart was reported, or that the replay socket no longer has a batch.
	doubted bool
	// restoring reports whether a part of a snapshot was delivered, and aborted whether the view was emptied of one.
	restoring, aborted bool
	// unproved reports whether a batch came from a replay socket that may be another engine's.
	unproved bool
	wrong    string // describes an error in the order of batches; empty if there is none
}

func (v *worldView) do(a *Action) {
	switch a.Kind {
	case Deliver:
		b := a.Batch
		if b.Malformed { // reported as lost before
			break
		}
		if b.Restored {
			if !v.restoring {
				v.wrong = "a batch of a snapshot that was not begun"
			}
			v.blocks[b.Fingerprint.Hash>>32] |= seqSet(b.Fingerprint.Time)
			break
		}
		due := uint64(0)
		if v.begun {
			due = v.last + 1
		}
		if !v.conflict && (b.Seq != due && !v.reported || v.begun && b.Seq <= v.last) {
			v.wrong = fmt.Sprintf("batch %d where %d is due", b.Seq, due)
		}
		v.begun, v.last = true, b.Seq
		v.blocks[b.Fingerprint.Hash>>32].add(b.Seq)
		v.unproved = v.unproved || b.Unproved
	case ReportBegin:
		v.reported = v.reported || a.Missed > 0
	case ReportGap:
		v.reported = true
		v.doubted = v.doubted || a.Reason == feed.GapPossibleRestart || a.Reason == feed.GapReplayForgotten
		if a.Missed > 0 {
			if !v.conflict && v.begun && a.First != v.last+1 {
				v.wrong = fmt.Sprintf("gap from %d after %d", a.First, v.last)
			}
			v.begun, v.last = true, a.Last
		}
	case ReportConflict:
		v.conflict = true
	case ReportProved:
		v.unproved = false
	case ReportForeign:
		*v = worldView{wrong: v.wrong, reported: true}
	case ReportRestart, BeginReread:
		*v = worldView{wrong: v.wrong}
	case AbortRestore:
		*v = worldView{wrong: v.wrong, aborted: true, reported: a.Reason != 0}
	case BeginRestore:
		*v = worldView{wrong: v.wrong, restoring: true}
	case EndRestore:
		v.restoring, v.begun, v.last = false, true, a.Seq
	default:
	}
}

func (w *world) do(actions []Action) {
	for i := range actions {
		a := &actions[i]
		// After requests that failed, a late batch may be delivered if a possible restart was reported before it.
		if a.Kind == Deliver && !w.foreign && isLate(a.Batch) && a.Batch.Fingerprint.Hash>>32 < w.answered && !w.view.doubted {
			w.view.wrong = fmt.Sprintf("late batch %d of an incarnation before that of the replies", a.Batch.Seq)
		}
		// With epochs and publisher ids, late batches of an earlier incarnation may lead to a restart too many, which is repaired.
		if a.Kind == ReportRestart && a.Evidence != EvidenceConflict && w.replay && w.lossless && !w.epochs && w.offers == noSnapshots && !w.view.conflict &&
			w.view.begun && w.view.blocks == only(w.incarnation, w.view.blocks[w.incarnation]) {
			w.view.wrong = "a restart of an engine that did not restart"
		}
		w.view.do(a)
		if v := &w.view; w.foreign && v.blocks[foreigner] != 0 && !v.unproved && !v.reported {
			v.wrong = "blocks of another engine pass for those of this one"
		}
		w.log(a)
		if w.trace != nil {
			*w.trace = append(*w.trace, describe(a))
		}
		switch a.Kind {
		case RequestReplay:
			w.ask(a.Request, false)
		case RequestSnapshot:
			w.ask(a.Request, true)
		case CancelReplay:
			w.ask(nil, false)
		case RepairFailed, SnapshotFailed:
			w.lossless = false
		case ReportRestart:
			w.lossless = w.lossless && !w.snapshotSent // as below
		case ReportConflict:
			w.lossless = w.lossless && w.offers == noSnapshots // a second snapshot may not be requested so soon
		case Reconnect:
			w.close()
		default:
		}
	}
	// The end of a connection is reported sooner than a socket is asked again that contradicts a live batch.
	contradicted := w.m.repair != nil && w.m.repair.Cause == CauseProof && (w.current.closed || w.former.exists())
	if w.request == nil && !w.m.retryAt().IsZero() && !contradicted {
		w.do(w.m.Tick(w.now.Add(maxRetryWait), true))
	}
}

// ask replaces the request in progress.
func (w *world) ask(q *Request, snapshot bool) {
	w.request, w.sent, w.replies, w.asked, w.snapshot = q, false, 0, snapshot, snapshotDone
}

// log makes the state durable if the lane is called for the action.
func (w *world) log(a *Action) {
	w.cursor.Apply(a)
	w.cursor.HasReplay = w.m.ReplayEndpoint() != ""
	if a.Kind == ReportGap || a.Kind == ReportRestart || a.Kind == Deliver && !a.Batch.Malformed ||
		a.Kind == BeginRestore || a.Kind == BeginReread || a.Kind == EndRestore || a.Kind == AbortRestore || a.Kind == ReportProved || a.Kind == ReportForeign {
		copy(w.durable[1:], w.durable[:])
		w.durable[0] = durableState{w.view, w.cursor}
	}
}

// crash ends kvcast, and starts it again in a durable state. What was in flight is lost.
func (w *world) crash(s durableState) {
	w.view, w.cursor = s.view, s.cursor
	for i := range w.durable {
		w.durable[i] = s
	}
	w.current, w.former = pipe{}, pipe{}
	w.ask(nil, false)
	w.alone, w.answered = false, 0
	w.m = New(w.m.cfg)
	if s.cursor != (Cursor{}) {
		replay := ""
		if w.replay {
			replay = replayEndpoint
		}
		w.m.Resume(w.now, &s.cursor, replay)
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

// publishing reports whether the engine has a connection.
func (w *world) publishing() bool { return w.current.exists() && !w.current.closed }

func (w *world) publish(arrives bool) {
	if arrives && w.publishing() {
		w.current.inFlight.add(w.next)
	}
	w.stored.add(w.next)
	w.next++
}

func (w *world) restart() {
	w.incarnation, w.next, w.stored = w.incarnation+1, 0, 0
	w.lossless = w.lossless && !w.resumes // the next connection begins after its first batches
	w.close()
}

// askForLoss makes the request due that repairs a loss.
func (w *world) askForLoss() {
	w.m.loss.at = w.now
	w.do(w.m.Tick(w.now, true))
}

// close ends the engine's connection. The machine is told later.
func (w *world) close() {
	if w.current.exists() {
		w.current.closed = true
	}
}

func (w *world) canConnect() bool {
	return !w.current.exists() || w.listens && w.current.closed && !w.former.exists()
}

// connect opens a connection. A listener learns of its publisher with the first batch.
func (w *world) connect() {
	if w.current.exists() {
		w.former = w.current
	}
	w.connections++
	w.current = pipe{id: w.connections, incarnation: w.incarnation}
	if !w.listens {
		w.learn(&w.current)
	}
}

func (w *world) learn(p *pipe) {
	p.known = true
	w.alone, w.answered = false, 0
	c := Connection{ID: p.id}
	if w.replay {
		c.Replay = replayEndpoint
	}
	if w.offers != noSnapshots {
		c.Snapshot, c.SnapshotsBegin = snapshotEndpoint, w.offers == snapshotsOfEpoch
	}
	if w.resumes {
		switch last, ok := w.m.Last(); {
		case !ok:
			p.inFlight = w.stored
		case w.stored.has(last):
			c.Resumes, p.inFlight = true, w.stored&^(1<<last-1)
		default:
			w.lossless = false
		}
	}
	w.do(w.m.Connect(w.now, c))
}

// arrive passes the next batch in flight to the machine.
func (w *world) arrive(p *pipe) { w.arriveAs(p, p.inFlight.pop(), false) }

func (w *world) arriveAs(p *pipe, seq uint64, malformed bool) {
	if !p.known {
		w.learn(p)
	}
	b := batchOf(p.incarnation, seq)
	if b.Malformed = malformed; malformed {
		w.lossless = w.lossless && !w.resumes // there is no other way to get it
		b.Fingerprint.Hash = ^b.Fingerprint.Hash
	}
	if w.offers == snapshotsOfPublisher && !malformed {
		b.Publisher = publisherOf(p.incarnation)
	}
	if w.epochs {
		b.Epoch = []byte(strconv.FormatUint(p.incarnation, 10))
	}
	id := p.id
	if id == 0 {
		b.Payload = late
	}
	if id == 0 && w.m.connections == 0 {
		// The replay socket of a publisher is not known before its first connection, and what it
		// published before first contact is not lost.
		w.lossless = false
	}
	if id == 0 && p.inFlight == 0 {
		*p = pipe{}
	}
	w.do(w.m.Arrival(w.now, id, b))
}

// late is the payload of a batch that arrives after the end of its connection was reported.
var late = []byte("late")

func isLate(b *Batch) bool { return len(b.Payload) > 0 }

// disconnect reports the end of a connection. If overtakes is true, batches of it arrive later.
func (w *world) disconnect(p *pipe, overtakes bool) {
	was := *p
	if *p = (pipe{}); overtakes {
		*p = was
		p.id, p.known = 0, true
	}
	if was.known {
		w.do(w.m.Disconnect(w.now, was.id))
	}
}

// send delivers the request to the engine, which sends its replies.
func (w *world) send() {
	w.sent, w.alone = true, !w.m.Connected()
	w.m.Sent(w.request.ID)
	if w.asked {
		w.snapshotSent = true
		if w.offers == snapshotsOfEpoch {
			w.publish(true)
			w.lossless = false // replies do not name the incarnation: a restart may be reported as possible
		}
		if w.next > 0 {
			w.snapshot, w.snapshotSeq, w.repliesOf = snapshotHeader, w.next-1, w.incarnation
		}
		return
	}
	w.replies, w.repliesOf = w.stored&^(1<<w.request.From-1), w.incarnation
	if w.foreign {
		w.replies, w.repliesOf = w.other&^(1<<w.request.From-1), foreigner
	}
}

func (w *world) reply() {
	b := batchOf(w.repliesOf, w.replies.pop())
	if w.offers == snapshotsOfPublisher {
		b.Publisher = publisherOf(w.repliesOf)
	}
	id := w.request.ID
	actions, more := w.m.Reply(w.now, id, b)
	w.do(actions)
	if !more && w.request != nil && w.request.ID == id {
		w.end(OutcomeComplete)
	}
}

// restore passes the next part of a snapshot to the machine.
func (w *world) restore() {
	half := seqSet(1)<<(w.snapshotSeq/2+1) - 1
	b := &Batch{Publisher: publisherOf(w.repliesOf)}
	if w.offers == snapshotsOfEpoch {
		b.Publisher = nil
	}
	b.Fingerprint.Hash = w.repliesOf << 32
	pass := w.m.SnapshotBatch
	switch w.snapshot {
	case snapshotHeader:
		b.Seq = w.snapshotSeq
		if w.offers == snapshotsOfEpoch {
			b.Epoch = []byte(strconv.FormatUint(w.repliesOf, 10))
		}
		pass = w.m.SnapshotHeader
	case snapshotLower:
		b.Fingerprint.Time = uint64(half)
	default:
		b.Fingerprint.Time = uint64((seqSet(1)<<(w.snapshotSeq+1) - 1) &^ half)
	}
	w.snapshot--
	id := w.request.ID
	actions, more := pass(w.now, id, b)
	w.do(actions)
	if w.request == nil || w.request.ID != id {
		return
	}
	if !more {
		w.end(OutcomeComplete)
	}
}

func (w *world) end(o Outcome) {
	id := w.request.ID
	if w.asked && w.sent && w.snapshot == snapshotDone && o == OutcomeComplete && w.next == 0 {
		o = OutcomeFailed // the engine has nothing
	}
	if q := &w.m.repair.request; o == OutcomeComplete && w.alone && q.replies > 0 && q.cut == cutNone {
		w.answered = w.repliesOf
	}
	w.ask(nil, false)
	w.do(w.m.ReplayEnded(w.now, id, o))
}

// cutOff reports whether the engine has restarted since it replied: a part of the replies may be lost.
func (w *world) cutOff() bool { return w.request != nil && w.sent && w.repliesOf != w.incarnation }

// settle lets everything arrive that was sent, publishes one more batch, and lets all pending events
// occur without further faults. It returns a description of the error; empty if there is none.
func (w *world) settle() string {
	published, waited, asked := false, false, 0
	for range 2000 {
		switch {
		case w.request != nil && !w.sent:
			w.send()
		case w.replies != 0:
			w.reply()
		case w.snapshot != snapshotDone:
			w.restore()
		case w.request != nil:
			w.end(OutcomeComplete)
		case w.former.inFlight != 0:
			w.arrive(&w.former)
		case w.former.exists():
			w.disconnect(&w.former, false)
		case w.current.inFlight != 0:
			w.arrive(&w.current)
		case w.current.closed:
			w.disconnect(&w.current, false)
		case !w.current.exists():
			w.connect()
		case !published:
			published = true
			w.publish(true)
		case w.m.State() == Conflicted && !waited: // one of two publishers has been silent for so long
			waited, published = true, false
			w.now = w.now.Add(conflictTimeout + time.Second)
		case !w.m.lossAt().IsZero() && asked < 3:
			asked++
			w.askForLoss()
		default:
			return w.check()
		}
	}
	return "it does not come to an end"
}

// only returns the blocks of one incarnation.
func only(incarnation uint64, blocks seqSet) (all [len(worldView{}.blocks)]seqSet) {
	all[incarnation] = blocks
	return all
}

func (w *world) check() string {
	want := only(w.incarnation, 1<<w.next-1)
	switch v := w.view; {
	case v.wrong != "":
		return v.wrong
	case v.restoring:
		return "the view has a part of a snapshot"
	case w.foreign && w.m.proof.origin == originForeign && v.blocks[foreigner] != 0:
		return "blocks of an engine that is known to be another"
	case w.foreign && w.m.proof.origin == originProved:
		return "the replay socket of another engine is taken for this one's"
	case v.blocks != want && !v.reported && !v.unproved:
		return fmt.Sprintf("blocks %b, want %b, and nothing is reported", v.blocks, want)
	case v.blocks[w.incarnation] != 0 && v.blocks != only(w.incarnation, v.blocks[w.incarnation]) && !v.doubted && !v.conflict && (!w.foreign || !v.unproved):
		return "a restart is neither detected nor reported as possible"
	case v.reported && !v.aborted && (w.replay || w.resumes) && w.lossless:
		return "a loss is reported that could have been repaired"
	case v.reported && w.replay && !w.foreign && !w.lossy && !v.conflict && w.stored == 1<<w.next-1:
		return "a loss remains that the replay socket can repair"
	case w.m.Replaying() || w.m.buffer.head() != nil || w.m.State() != Live && w.m.proof.origin != originForeign:
		return fmt.Sprintf("state %v, replaying %v, %d buffered", w.m.State(), w.m.Replaying(), len(w.m.buffer.batches))
	}
	return ""
}

func newWorld(l limits, replay, epochs, listens bool) *world {
	c := Config{Grace: time.Hour, CanReconnect: !listens}
	if replay {
		c.Silence = time.Minute
	}
	return &world{
		m: New(c), epochs: epochs, replay: replay, listens: listens, left: l, now: testTime, lossless: true,
	}
}
