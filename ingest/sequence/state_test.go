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
	s.want("batch 0 of 0", "gap possible_restart 0-0")
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
