package sequence

import (
	"testing"
	"time"
)

// fail ends requests with an outcome until none follows, and returns how many there were and how long it took.
func (s *script) fail(o Outcome) (requests int, took time.Duration) {
	began := s.now
	for requests = 1; s.end(o); requests++ {
		if requests > 100 {
			s.t.Fatal("requests without end")
		}
	}
	return requests, s.now.Sub(began)
}

// askForLoss advances the time to when the socket is asked for what is lost.
func (s *script) askForLoss() {
	s.t.Helper()
	at := s.m.Deadline()
	if at.IsZero() || !at.Equal(s.m.lossAt()) {
		s.t.Fatalf("deadline %v, want a request because of a loss", at)
	}
	s.now = at
	s.do(s.m.Tick(s.now, true))
	if s.request == nil || s.request.Cause != CauseLoss {
		s.t.Fatalf("request %+v, want one because of a loss", s.request)
	}
}

// Batches that a replay socket may have are waited for as long as configured. If the socket has never answered, it is waited for
// once.
func TestReplaySocketIsAskedForAsLongAsConfigured(t *testing.T) {
	const patience = 30 * time.Second
	begin := func(t *testing.T) *script {
		s := newScript(t)
		s.m.cfg.Patience = patience
		return s
	}
	waitsFor := func(t *testing.T, s *script, last uint64, o Outcome) {
		t.Helper()
		s.live("", 0, last)
		requests, took := s.fail(o)
		if took < patience || took > 2*patience || requests < maxFailures {
			t.Errorf("given up after %d requests in %v, want several in at least %v", requests, took, patience)
		}
	}
	for _, tt := range []struct {
		name string
		o    Outcome
	}{{"silent", OutcomeSilent}, {"refused", OutcomeFailed}} {
		t.Run("a socket that has answered is "+tt.name, func(t *testing.T) {
			s := begin(t)
			s.begin("", 9)
			waitsFor(t, s, 12, tt.o)
			s.want("gap replay_unavailable 10-11", "batch 12 of 0")
			s.now = s.now.Add(RestTime)
			waitsFor(t, s, 14, tt.o)
			s.want("gap replay_unavailable 13-13", "batch 14 of 0")
		})
		t.Run("the socket of a recovered engine is "+tt.name, func(t *testing.T) {
			s := begin(t)
			s.m.Resume(s.now, &Cursor{Started: true, Delivered: true, Seq: 9, Batch: 9, HasReplay: true}, replayEndpoint)
			s.connect()
			waitsFor(t, s, 12, tt.o)
			s.want("gap possible_restart 0-0", "gap replay_unavailable 10-11", "batch 12 of 0")
			s.now = s.now.Add(RestTime)
			s.live("", 0, 14)
			if requests, took := s.fail(tt.o); requests > maxFirstFailures || took > 3*time.Second {
				t.Errorf("%d further requests in %v, want at most %d", requests, took, maxFirstFailures)
			}
		})
	}
	t.Run("nothing was read, and the socket has never answered", func(t *testing.T) {
		s := begin(t)
		s.connect()
		s.live("", 0, 5)
		if requests, _ := s.fail(OutcomeSilent); requests > 1 {
			t.Errorf("%d requests, want 1", requests)
		}
		s.want("joined late 0-4", "batch 5 of 0")
	})
	t.Run("an answer in time", func(t *testing.T) {
		s := begin(t)
		s.begin("", 9)
		s.live("", 0, 12)
		for s.now.Before(testTime.Add(patience)) {
			if !s.end(OutcomeSilent) {
				t.Fatalf("given up after %v", s.now.Sub(testTime))
			}
		}
		s.finish(0, 12)
		s.want("batch 10 of 0", "batch 11 of 0", "batch 12 of 0")
	})
}

// A socket that did not answer is asked again for as long as the loss remains. Once it answers, everything is read again.
func TestLossIsRepairedWhenTheSocketAnswers(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 3)
	s.end(OutcomeSilent)
	s.want("joined late 0-2", "batch 3 of 0")
	waits := make([]time.Duration, 0, 14)
	for range cap(waits) {
		before := s.now
		s.askForLoss()
		waits = append(waits, s.now.Sub(before))
		s.live("", 0, s.m.order.last+1) // is not kept waiting
		s.request = nil
		s.do(s.m.ReplayEnded(s.now, s.m.requestID, OutcomeSilent))
	}
	if first, last := waits[0], waits[len(waits)-1]; first > minLossWait || last != maxLossWait {
		t.Errorf("waits %v, want at most %v to %v", waits, minLossWait, maxLossWait)
	}
	last := s.m.order.last
	if len(s.lines) != len(waits) || s.m.ReplayState() != ReplayNeverAnswered {
		t.Fatalf("%q, replay socket %v", s.lines, s.m.ReplayState())
	}
	s.lines = nil
	s.askForLoss()
	s.live("", 0, last+1) // after the engine has answered
	s.answer(0, 0, last, OutcomeComplete)
	if s.request == nil {
		t.Fatal("the batch that arrived before the answer is not requested")
	}
	s.finish(0, last+1)
	if n := int(last) + 4; len(s.lines) != n || s.lines[0] != "batch 18 of 0" || s.lines[1] != "read again" || s.lines[n-1] != "batch 18 of 0" {
		t.Errorf("%d lines %q, want all batches again", len(s.lines), s.lines)
	}
	if at := s.m.lossAt(); !at.IsZero() || s.m.State() != Live {
		t.Errorf("asked again at %v, state %v", at, s.m.State())
	}
}

// What was read is kept if the engine no longer has what was lost, and the socket is not asked for it again.
func TestLossThatTheEngineForgotIsFinal(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 3)
	s.end(OutcomeSilent)
	s.askForLoss()
	s.answer(0, 3, 3, OutcomeComplete)
	s.want("joined late 0-2", "batch 3 of 0")
	if at := s.m.lossAt(); !at.IsZero() || s.m.ReplayState() != ReplayAnswers {
		t.Fatalf("asked again at %v, replay socket %v", at, s.m.ReplayState())
	}
	s.live("", 0, 5) // the next gap is repaired at once
	s.finish(0, 5)
	s.want("batch 4 of 0", "batch 5 of 0")
}

// Batches before the first one read make the view more complete, though not whole.
func TestEarlierBatchesThanTheFirstAreRead(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 5)
	s.end(OutcomeSilent)
	s.askForLoss()
	s.answer(0, 4, 5, OutcomeComplete)
	s.want("joined late 0-4", "batch 5 of 0", "read again", "joined late 0-3", "batch 4 of 0", "batch 5 of 0")
	if at := s.m.lossAt(); !at.IsZero() {
		t.Errorf("asked again at %v", at)
	}
}

// An answer of another incarnation is read as that of a restarted engine.
func TestRestartIsSeenWhenALossIsAskedFor(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 1)
	s.end(OutcomeSilent)
	s.askForLoss()
	s.answer(1, 1, 1, OutcomeComplete)
	s.finish(1, 1)
	s.want("joined late 0-0", "batch 1 of 0", "restarted", "batch 0 of 1", "batch 1 of 1")
}

// A later run of kvcast asks again for what an earlier one lost.
func TestLossIsRepairedByALaterRun(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 3)
	s.end(OutcomeSilent)
	later := newScript(t)
	later.m.Resume(later.now, &s.cursor, replayEndpoint)
	later.connect()
	later.finish(0, 3)
	later.lines = nil
	later.askForLoss()
	later.finish(0, 3)
	later.want("read again", "batch 0 of 0", "batch 1 of 0", "batch 2 of 0", "batch 3 of 0")
}
