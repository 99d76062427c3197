package sequence

import (
	"testing"
	"time"
)

// A request says whether the replay socket answered the request before.
func TestRequestSaysWhetherTheLastWasAnswered(t *testing.T) {
	s := newScript(t)
	s.connect()
	for _, step := range []struct {
		answered bool
		outcome  Outcome
	}{
		{false, OutcomeFailed},   // nothing was answered yet
		{false, OutcomeComplete}, // an end marker is an answer
		{true, OutcomeSilent},
		{false, OutcomeFailed},
	} {
		if s.request == nil || s.request.Answered != step.answered {
			t.Fatalf("request %+v, want one with answered %v", s.request, step.answered)
		}
		s.live("", 0, 5) // shows a gap, so that another request follows
		s.end(step.outcome)
	}
}

// A publisher whose first batch arrives after its connection is closed is absent after the grace time.
func TestPublisherThatIsNeverConnectedIsAbsent(t *testing.T) {
	s := newScript(t)
	s.do(s.m.Arrival(s.now, 0, batchOf(0, 0)))
	if got, want := s.m.Deadline(), s.now.Add(time.Hour); !got.Equal(want) {
		t.Fatalf("deadline %v, want the end of the grace time %v", got, want)
	}
	s.now = s.m.Deadline()
	s.do(s.m.Tick(s.now, true))
	s.do(s.m.AttemptFailed(s.now, true))
	s.want("batch 0 of 0", "gap possible_restart 0-0")
}

// The grace time ends with an attempt to connect, which must fail before the publisher is absent. If the engine opens the
// connections, there is none.
func TestPublisherIsAbsentWhenTheLastAttemptHasFailed(t *testing.T) {
	const grace = time.Hour
	for _, tt := range []struct {
		name    string
		listens bool
		then    func(s *script)
		want    []string // after the batch
	}{
		{"it fails", false, func(s *script) { s.do(s.m.AttemptFailed(s.now, true)) }, []string{"gap possible_restart 0-0"}},
		{"it fails twice", false, func(s *script) {
			s.do(s.m.AttemptFailed(s.now, true))
			s.do(s.m.AttemptFailed(s.now, true))
		}, []string{"gap possible_restart 0-0"}},
		{"it has not ended", false, func(s *script) {
			if at := s.m.Deadline(); !at.IsZero() {
				s.t.Errorf("deadline %v, want none", at)
			}
		}, nil},
		{"it connects", false, func(s *script) {
			s.connect()
			s.finish(0, 0)
			s.do(s.m.AttemptFailed(s.now, true)) // of another connection
		}, nil},
		{"it fails, and the worker has lost its other connections", false, func(s *script) {
			s.do(s.m.AttemptFailed(s.now, false))
			if at, want := s.m.Deadline(), s.now.Add(grace); !at.Equal(want) {
				s.t.Errorf("deadline %v, want the end of another grace time %v", at, want)
			}
		}, nil},
		{"the worker is removed meanwhile", false, func(s *script) {
			s.do(s.m.Reset())
			s.do(s.m.AttemptFailed(s.now, true))
		}, nil},
		{"the engine opens the connections", true, func(*script) {}, []string{"gap possible_restart 0-0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t)
			s.m.cfg.CanReconnect = !tt.listens
			s.begin("", 0)
			s.disconnect()
			s.now = s.m.Deadline()
			attempts, want := 0, 1
			if tt.listens {
				want = 0
			}
			actions := s.m.Tick(s.now, true)
			for _, a := range actions {
				if a.Kind == AttemptConnection {
					attempts++
				}
			}
			s.do(actions)
			if attempts != want {
				t.Errorf("got %d attempts, want %d", attempts, want)
			}
			tt.then(s)
			s.want(tt.want...)
		})
	}
}

// A silent connection is suspect until a replacement has taken its place.
func TestReplacedConnectionIsNotSuspect(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 0, 0)
	s.do(s.m.ReplacementFailed())
	if got := s.m.State(); got != Suspect {
		t.Errorf("without a replacement: state %v, want %v", got, Suspect)
	}
	s.do(s.m.Replaced(s.now, Connection{ID: s.connection + 1}))
	if got := s.m.State(); got != Live {
		t.Errorf("replaced: state %v, want %v", got, Live)
	}
}

func TestStateDuringARepair(t *testing.T) {
	s := newScript(t)
	want := func(when string, want State) {
		t.Helper()
		if got := s.m.State(); got != want {
			t.Errorf("%s: state %v, want %v", when, got, want)
		}
	}
	s.connect()
	want("first contact", Starting)
	s.finish(0, 2)
	want("no repair", Live)
	s.live("", 0, 4)
	want("gap", Repairing)
	s.finish(0, 4)
	s.silence()
	want("silence", Verifying)
	s.end(OutcomeSilent)
	want("no answer", Suspect)
	s.silence()
	want("asked again", Suspect)
	s.connect()
	want("another connection", Repairing)
	s.answer(1, 0, 4, OutcomeComplete)
	want("restarted", Starting)
	s.finish(1, 4)
	want("replayed", Live)
}
