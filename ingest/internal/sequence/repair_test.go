package sequence

import (
	"bytes"
	"testing"
	"time"
)

// An engine that did not answer targetPast may restart during the same repair. The next request
// that brings nothing is followed by targetPast again.
func TestRestartAfterAnUnansweredComparisonIsRecognised(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.connect()
	s.live("", 0, 12)      // 10 and 11 are missing
	s.end(OutcomeComplete) // request for targetRest
	s.end(OutcomeComplete) // request for targetPast
	s.want("gap possible_restart 0-0")
	// The engine restarts, and the connection breaks later.
	s.answer(1, 0, 3, OutcomeComplete)
	s.answer(1, 0, 3, OutcomeComplete)
	s.want("restarted")
	s.connect()
	s.finish(1, 3)
	s.want("batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
}

// A gap that is detected while a silent engine is verified is repaired like any other gap, although
// the request for verification was not answered.
func TestGapNoticedWhileVerifyingIsRepaired(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.silence()
	s.live("", 0, 12)
	if !s.end(OutcomeSilent) {
		t.Fatal("abandoned after one unanswered request")
	}
	s.finish(0, 12)
	s.want("batch 10 of 0", "batch 11 of 0", "batch 12 of 0")
}

// The batch after the last one needs no repair, even if the request in progress is not answered.
func TestBatchInOrderWhileVerifyingIsDelivered(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.silence()
	if got := s.m.State(); got != Verifying {
		t.Errorf("state %v, want verifying", got)
	}
	s.live("", 0, 10)
	if s.end(OutcomeSilent) {
		t.Fatal("requested again, though nothing is missing")
	}
	s.want("batch 10 of 0")
}

// A live batch with a new epoch shows a restart, whatever its seq and the replay.
func TestNewEpochIsARestart(t *testing.T) {
	t.Run("with a replay that begins above the last seq", func(t *testing.T) {
		s := newScript(t)
		s.begin("1", 9)
		s.connect()
		s.answer(1, 100, 104, OutcomeComplete) // the same replies twice: the engine seems to have forgotten the earlier batches
		s.answer(1, 100, 104, OutcomeComplete)
		if s.request != nil {
			t.Fatal("still requests")
		}
		s.lines = nil
		s.live("2", 1, 105)
		for s.request != nil {
			s.answer(1, 100, 105, OutcomeComplete)
		}
		s.want("restarted", "gap replay_forgotten 0-99", "batch 100 of 1", "batch 101 of 1", "batch 102 of 1",
			"batch 103 of 1", "batch 104 of 1", "batch 105 of 1")
		for seq := uint64(106); seq < 110; seq++ {
			s.live("2", 1, seq)
			if s.request != nil {
				t.Fatalf("batch %d of the new epoch costs a replay", seq)
			}
		}
	})
	t.Run("that continues the seqs", func(t *testing.T) {
		s := newScript(t)
		s.begin("1", 9)
		s.live("2", 1, 10)
		s.finish(1, 10)
		if s.lines[0] != "restarted" || len(s.lines) != 12 {
			t.Errorf("got %q, want a restart and batches 0 to 10", s.lines)
		}
	})
	t.Run("during a repair", func(t *testing.T) {
		s := newScript(t)
		s.begin("1", 9)
		s.live("1", 0, 11) // 10 is missing
		first := s.request.ID
		s.connect()
		s.live("2", 1, 2)
		if s.request.ID == first {
			t.Fatal("the repair of the former incarnation goes on")
		}
		s.finish(1, 2)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1")
	})
	t.Run("except a late batch of the former epoch", func(t *testing.T) {
		s := newScript(t)
		s.begin("1", 9)
		s.connect()
		s.live("2", 1, 0)
		s.finish(1, 0)
		s.lines = nil
		s.live("1", 0, 9)
		if s.request != nil || len(s.lines) > 0 {
			t.Errorf("requested %+v, got %q, want nothing", s.request, s.lines)
		}
		s.live("2", 1, 1)
		s.want("batch 1 of 1")
	})
	t.Run("except alternating epochs, which are two publishers", func(t *testing.T) {
		s := newScript(t)
		s.begin("1", 9)
		s.live("2", 1, 0)
		s.finish(1, 0)
		s.lines = nil
		s.live("1", 0, 10)
		if s.request != nil {
			t.Errorf("requested %+v", s.request)
		}
		s.want("conflict", "gap ambiguous_publisher 0-0", "batch 10 of 0")
	})
}

func publisherBatch(id byte, incarnation, seq uint64) *Batch {
	b := batchOf(incarnation, seq)
	b.Publisher = bytes.Repeat([]byte{id}, 16)
	return b
}

// A live or replayed batch with another publisher id is of another incarnation.
func TestNewPublisherIDIsARestart(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.arrive(publisherBatch(1, 0, 0))
	s.reply(publisherBatch(1, 0, 0))
	s.end(OutcomeComplete)
	s.want("batch 0 of 0")

	s.arrive(publisherBatch(2, 1, 1)) // continues the seqs
	s.want("restarted")
	s.reply(publisherBatch(2, 1, 0))
	s.reply(publisherBatch(2, 1, 1))
	s.end(OutcomeComplete)
	s.want("batch 0 of 1", "batch 1 of 1")

	s.connect()
	if s.reply(publisherBatch(3, 2, 1)) {
		t.Fatal("more batches of a replay by another publisher are wanted")
	}
	s.end(OutcomeComplete)
	s.want("restarted")
}

func heartbeat(id byte, seq uint64) *Batch {
	return &Batch{Seq: seq, Fingerprint: Fingerprint{Hash: 99}, Publisher: bytes.Repeat([]byte{id}, 16), Empty: true}
}

// An idle publisher may repeat its last seq in a batch without events.
func TestHeartbeatIsNotARestart(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.arrive(publisherBatch(1, 0, 0))
	s.arrive(heartbeat(1, 0))
	s.arrive(heartbeat(1, 0))
	s.arrive(publisherBatch(1, 0, 1))
	s.want("batch 0 of 0", "batch 1 of 0")
	s.arrive(heartbeat(2, 1))
	if s.lines[0] != "restarted" {
		t.Errorf("got %q, want a restart at the heartbeat of another publisher", s.lines)
	}
}

func TestHeartbeatDuringARepairIsNotARestart(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.arrive(publisherBatch(1, 0, 10))
	s.arrive(heartbeat(1, 10))
	s.arrive(publisherBatch(1, 0, 11))
	s.arrive(heartbeat(1, 11))
	for n := 0; s.request != nil; n++ {
		if n > 20 {
			t.Fatal("still requests")
		}
		s.end(OutcomeSilent)
	}
	s.want("joined late 0-9", "batch 10 of 0", "batch 11 of 0")
}

// At most one request is in progress: each restart cancels the previous request.
func TestEachRestartCancelsThePreviousRequest(t *testing.T) {
	s := newScript(t)
	inProgress := 0
	do := func(actions []Action) {
		for _, a := range actions {
			switch a.Kind {
			case RequestReplay:
				inProgress++
			case CancelReplay:
				inProgress--
			default:
			}
		}
	}
	do(s.m.Connect(s.now, Connection{ID: 1, Replay: replayEndpoint}))
	for i := range 100 {
		do(s.m.Arrival(s.now, 1, publisherBatch(byte(i), uint64(i), 1)))
		if inProgress > 1 {
			t.Fatalf("%d requests are in progress after %d restarts", inProgress, i)
		}
	}
	do(s.m.Reset())
	if inProgress != 0 {
		t.Errorf("%d requests are in progress after Reset", inProgress)
	}
}

// A repair ends when the replay socket is no longer known.
func TestLostReplaySocketEndsTheRepair(t *testing.T) {
	s := newScript(t)
	s.begin("", 3)
	s.live("", 0, 6)
	s.do(s.m.Replaced(s.now, Connection{ID: 9}))
	s.m.useEndpoints(Connection{Replay: ""})
	s.live("", 0, 7)
	s.end(OutcomeSilent)
	if s.request != nil || s.m.Replaying() {
		t.Fatalf("still repairs: %+v", s.m.repair)
	}
	s.want("gap replay_unavailable 4-5", "batch 6 of 0", "batch 7 of 0")
}

// A replay with dropped replies does not count as complete.
func TestOverrunReplayIsNotComplete(t *testing.T) {
	s := newScript(t)
	s.begin("", 3)
	s.connect()
	if again := s.answer(0, 0, 3, OutcomeFailed); !again {
		t.Error("nothing more is requested")
	}
}

// After some requests that were not sent because others are in progress, buffered batches are delivered,
// and the socket is asked again after busyRestTime.
func TestBusyReplayReleasesBufferedBatches(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.live("", 0, 12)
	for range maxFailures - 1 {
		if !s.end(OutcomeBusy) {
			t.Fatal("not requested again")
		}
	}
	if s.end(OutcomeBusy) {
		t.Fatal("requested again")
	}
	s.want("gap replay_unavailable 10-11", "batch 12 of 0")
	s.now = s.now.Add(busyRestTime)
	s.live("", 0, 14)
	if s.request == nil {
		t.Fatal("the next gap is not repaired")
	}
}

// A publisher without a connection for the grace time is reported once, because it may have
// restarted, unless the worker has no other connection. A publisher that reconnects in time is not
// reported.
func TestPublisherAbsentForTheGraceTimeIsReported(t *testing.T) {
	const grace = time.Minute
	s := newScript(t)
	s.m.cfg.Grace = grace
	s.begin("", 0)
	pass := func(d time.Duration, workerConnected bool) {
		for end := s.now.Add(d); ; {
			at := s.m.Deadline()
			if at.IsZero() || at.After(end) {
				s.now = end
				return
			}
			s.now = at
			s.do(s.m.Tick(s.now, workerConnected))
		}
	}
	s.disconnect()
	pass(grace-time.Second, true)
	s.connect() // within the grace time
	s.finish(0, 0)
	pass(2*grace, true)
	s.want()
	s.disconnect()
	pass(3*grace/2, false) // the worker has no other connection
	s.want()
	pass(2*grace, true)
	s.want()
	s.do(s.m.AttemptFailed(s.now, true))
	pass(2*grace, true)
	s.want("gap possible_restart 0-0")
}

// If dropped messages cannot be requested, the next batch shows which seqs are missing. If no batch
// arrives, a gap of unknown seqs is reported.
func TestDroppedMessagesAreReportedIfNoBatchFollows(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 0, 0)
	s.do(s.m.Overrun(s.now))
	s.live("", 0, 3)
	if at := s.m.Deadline(); !at.IsZero() {
		t.Errorf("deadline %v after a batch has shown what was dropped", at)
	}
	s.want("batch 0 of 0", "gap replay_unavailable 1-2", "batch 3 of 0")
	s.do(s.m.Overrun(s.now))
	s.do(s.m.Overrun(s.now))
	s.now = s.m.Deadline()
	s.do(s.m.Tick(s.now, true))
	s.do(s.m.Overrun(s.now))
	s.want("gap replay_unavailable 0-0")
	if at := s.m.Deadline(); !at.IsZero() {
		t.Errorf("deadline %v after it was reported", at)
	}
}

// A replay verifies a silent connection. It shows whether the engine is silent or gone, or whether
// the connection is dead: the engine has published batches that did not arrive.
func TestSilentConnectionIsVerified(t *testing.T) {
	const silence = 30 * time.Second
	start := func(t *testing.T) *script {
		s := newScript(t)
		s.m.cfg.Silence = silence
		s.begin("", 3)
		s.actions = nil
		at := s.m.Deadline()
		if at.After(s.now.Add(silence)) {
			t.Fatalf("deadline %v, want one of silence", at)
		}
		s.now = at
		s.do(s.m.Tick(s.now, true))
		if s.request == nil || s.request.From != 3 || s.m.State() != Verifying {
			t.Fatalf("request %+v in state %v, want one of batch 3", s.request, s.m.State())
		}
		return s
	}
	has := func(s *script, k Kind) (yes bool) {
		for _, got := range s.actions {
			yes = yes || got == k
		}
		return yes
	}
	t.Run("the engine is silent", func(t *testing.T) {
		s := start(t)
		s.finish(0, 3)
		s.want()
		if s.m.State() != Live || has(s, Reconnect) {
			t.Errorf("state %v after %v, want live", s.m.State(), s.actions)
		}
	})
	t.Run("the engine is gone", func(t *testing.T) {
		s := start(t)
		s.end(OutcomeSilent)
		if s.m.State() != Suspect || !has(s, Reconnect) {
			t.Errorf("state %v after %v, want suspect and a new connection", s.m.State(), s.actions)
		}
		s.live("", 0, 4)
		if s.m.State() != Live {
			t.Errorf("state %v after a batch, want live", s.m.State())
		}
	})
	t.Run("the connection is dead", func(t *testing.T) {
		s := start(t)
		s.finish(0, 5)
		s.want("batch 4 of 0", "batch 5 of 0")
		if !has(s, Reconnect) {
			t.Errorf("%v, want a new connection", s.actions)
		}
	})
	t.Run("there is no replay socket", func(t *testing.T) {
		s := newScript(t)
		s.m.cfg.Silence = silence
		s.connectTo("")
		s.live("", 0, 0)
		s.actions = nil
		s.now = s.m.Deadline()
		s.do(s.m.Tick(s.now, true))
		if !has(s, OpenReplacement) {
			t.Fatalf("%v, want a connection beside the silent one", s.actions)
		}
		s.do(s.m.ReplacementFailed())
		if s.m.State() != Suspect {
			t.Errorf("state %v, want suspect", s.m.State())
		}
		s.do(s.m.Replaced(s.now, Connection{ID: 2}))
		s.want("batch 0 of 0")
	})
}

// A ROUTER that drops the last of many replies may still send the end marker.
func TestManyRepliesAreFollowedByAnotherRequest(t *testing.T) {
	s := newScript(t)
	s.connect()
	if again := s.answer(0, 0, replyQueue-1, OutcomeComplete); !again || s.request.From != replyQueue-1 {
		t.Fatalf("request %+v after %d replies, want one from the last", s.request, replyQueue)
	}
	if s.answer(0, 0, replyQueue+1, OutcomeComplete) {
		t.Error("requested again after few replies")
	}
	if len(s.lines) != replyQueue+2 {
		t.Errorf("%d batches, want %d", len(s.lines), replyQueue+2)
	}
}
