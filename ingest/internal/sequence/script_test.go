package sequence

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// testTime is the time at the start of a test.
var testTime = time.Unix(1_800_000_000, 42)

const (
	replayEndpoint   = "tcp://engine"
	snapshotEndpoint = "tcp://engine-snapshots"
)

// publisherOf returns the publisher id of an incarnation.
func publisherOf(incarnation uint64) []byte { return fmt.Appendf(nil, "publisher %d", incarnation) }

// batchOf returns the batch of a seq in an incarnation of a model engine.
func batchOf(incarnation, seq uint64) *Batch {
	return &Batch{Seq: seq, Fingerprint: Fingerprint{Hash: blockOf(incarnation, seq)}}
}

func blockOf(incarnation, seq uint64) uint64 { return incarnation<<32 | seq }

// script gives inputs to a Machine, and records its actions.
type script struct {
	t   testing.TB
	m   *Machine
	now time.Time
	// connection is the number of connections so far, which is the id of the last.
	connection ConnectionID
	// request is the request in progress; nil if there is none.
	request *Request
	// snapshot reports whether the request is for a snapshot.
	snapshot bool
	cursor   Cursor // after the actions
	lines    []string
	actions  []Kind // kinds of all other actions
}

func newScript(t testing.TB) *script {
	return &script{t: t, m: New(Config{Grace: time.Hour, CanReconnect: true}), now: testTime}
}

// do records actions: in request, lines or actions.
func (s *script) do(actions []Action) {
	for _, a := range actions {
		s.cursor.Apply(&a)
		s.cursor.HasReplay = s.m.ReplayEndpoint() != ""
		switch a.Kind {
		case Deliver:
			if a.Batch.Restored {
				s.lines = append(s.lines, fmt.Sprintf("part of the snapshot of %d", a.Batch.Seq))
			} else if !a.Batch.Malformed {
				s.lines = append(s.lines, fmt.Sprintf("batch %d of %d", a.Batch.Seq, a.Batch.Fingerprint.Hash>>32))
			}
		case ReportGap:
			s.lines = append(s.lines, fmt.Sprintf("gap %v %d-%d", a.Reason, a.First, a.Last))
		case ReportBegin:
			if a.FirstContact && a.Missed > 0 {
				s.lines = append(s.lines, fmt.Sprintf("joined late %d-%d", a.First, a.Last))
			}
		case ReportRestart:
			s.lines = append(s.lines, "restarted")
		case ReportConflict:
			s.lines = append(s.lines, "conflict")
		case BeginReread:
			s.lines = append(s.lines, "read again")
		case BeginRestore:
			s.lines = append(s.lines, "discarded")
		case AbortRestore:
			s.lines = append(s.lines, fmt.Sprintf("discarded, gap %v", a.Reason))
		case EndRestore:
			s.lines = append(s.lines, fmt.Sprintf("restored up to %d", a.Seq))
		case RequestReplay:
			s.request, s.snapshot = a.Request, false
		case RequestSnapshot:
			s.request, s.snapshot = a.Request, true
		case CancelReplay:
			s.request = nil
		default:
			s.actions = append(s.actions, a.Kind)
		}
	}
}

// connect closes the connection, and opens another to an engine with a replay socket.
func (s *script) connect() { s.connectTo(replayEndpoint) }

func (s *script) connectTo(replay string) {
	s.disconnect()
	s.connection++
	s.do(s.m.Connect(s.now, Connection{ID: s.connection, Replay: replay}))
}

func (s *script) disconnect() {
	if s.m.Connected() {
		s.do(s.m.Disconnect(s.now, s.connection))
	}
}

func (s *script) arrive(b *Batch) { s.do(s.m.Arrival(s.now, s.connection, b)) }

// live passes a live batch of an incarnation to the machine. The epoch may be empty.
func (s *script) live(epoch string, incarnation, seq uint64) {
	b := batchOf(incarnation, seq)
	b.Epoch = []byte(epoch)
	s.arrive(b)
}

// silence starts the verification of a silent connection.
func (s *script) silence() {
	s.m.begin()
	s.m.startRepair(s.now, CauseSilence)
	s.do(s.m.actions)
}

func (s *script) reply(b *Batch) (more bool) {
	s.t.Helper()
	if s.request == nil {
		s.t.Fatal("nothing is requested")
	}
	actions, more := s.m.Reply(s.now, s.request.ID, b)
	s.do(actions)
	return more
}

// end ends the request, and waits for a retry that is pending. It reports whether another request
// follows.
func (s *script) end(outcome Outcome) (again bool) {
	s.t.Helper()
	if s.request == nil {
		s.t.Fatal("nothing is requested")
	}
	id := s.request.ID
	s.request = nil
	s.now = s.now.Add(time.Second)
	s.do(s.m.ReplayEnded(s.now, id, outcome))
	s.retry()
	return s.request != nil
}

// retry advances the time to a pending retry.
func (s *script) retry() {
	if at := s.m.retryAt(); !at.IsZero() {
		s.now = at
		s.do(s.m.Tick(s.now, true))
	}
}

// answer answers the request with the batches of an incarnation from first, or the requested seq if
// that is larger, to last. It reports whether another request follows.
func (s *script) answer(incarnation, first, last uint64, outcome Outcome) (again bool) {
	s.t.Helper()
	if s.request == nil {
		s.t.Fatal("nothing is requested")
	}
	s.m.Sent(s.request.ID)
	for seq := max(s.request.From, first); seq <= last; seq++ {
		if !s.reply(batchOf(incarnation, seq)) {
			break
		}
	}
	return s.end(outcome)
}

// finish answers each request with all batches of an incarnation until no request follows, or the answer contradicts a live
// batch: the engine may have restarted, and its connection ends before the next request.
func (s *script) finish(incarnation, last uint64) {
	s.t.Helper()
	for n := 0; s.request != nil && s.m.proof.contradictions == 0; n++ {
		if n > 20 {
			s.t.Fatalf("still requests: %+v", s.m.repair)
		}
		s.answer(incarnation, 0, last, OutcomeComplete)
	}
}

// want compares the lines recorded since the last call.
func (s *script) want(lines ...string) {
	s.t.Helper()
	if d := cmp.Diff(lines, s.lines); d != "" {
		s.t.Fatalf("delivered and reported (-want +got):\n%s", d)
	}
	s.lines = nil
}

// begin delivers batches 0 to last of incarnation 0.
func (s *script) begin(epoch string, last uint64) {
	s.t.Helper()
	s.connect()
	s.live(epoch, 0, last)
	s.finish(0, last)
	if s.m.State() != Live || len(s.lines) != int(last)+1 {
		s.t.Fatalf("state %v after %v", s.m.State(), s.lines)
	}
	s.lines = nil
}
