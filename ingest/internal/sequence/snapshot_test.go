package sequence

import (
	"slices"
	"testing"
	"time"
)

// named returns a batch with the publisher id of its incarnation.
func named(incarnation, seq uint64) *Batch {
	b := batchOf(incarnation, seq)
	b.Publisher = publisherOf(incarnation)
	return b
}

// connectWithSnapshots opens a connection to an engine with a replay socket and snapshots.
func (s *script) connectWithSnapshots() {
	s.disconnect()
	s.connection++
	s.do(s.m.Connect(s.now, Connection{ID: s.connection, Replay: replayEndpoint, Snapshot: snapshotEndpoint}))
}

// replay answers a request to the replay socket with batches of an incarnation that the engine still has.
func (s *script) replay(incarnation, first, last uint64) {
	s.t.Helper()
	if s.request == nil || s.snapshot {
		s.t.Fatalf("no replay is requested: %+v", s.request)
	}
	s.m.Sent(s.request.ID)
	for seq := max(s.request.From, first); seq <= last; seq++ {
		if !s.reply(named(incarnation, seq)) {
			break
		}
	}
	s.end(OutcomeComplete)
}

// header answers a request for a snapshot with its header. It reports whether the snapshot is wanted.
func (s *script) header(incarnation, seq uint64) (more bool) {
	s.t.Helper()
	if s.request == nil || !s.snapshot {
		s.t.Fatalf("no snapshot is requested: %+v", s.request)
	}
	s.m.Sent(s.request.ID)
	actions, more := s.m.SnapshotHeader(s.now, s.request.ID, &Batch{Seq: seq, Publisher: publisherOf(incarnation)})
	s.do(actions)
	return more
}

// part passes a batch of a snapshot.
func (s *script) part(incarnation uint64) (more bool) {
	s.t.Helper()
	actions, more := s.m.SnapshotBatch(s.now, s.request.ID, &Batch{Publisher: publisherOf(incarnation)})
	s.do(actions)
	return more
}

// restore answers a request with a snapshot of two batches.
func (s *script) restore(incarnation, seq uint64) {
	s.t.Helper()
	if !s.header(incarnation, seq) || !s.part(incarnation) || !s.part(incarnation) {
		s.t.Fatal("the snapshot is not wanted")
	}
	s.end(OutcomeComplete)
}

// beginRead reads batches 0 to last of an engine with snapshots.
func (s *script) beginRead(last uint64) {
	s.t.Helper()
	s.connectWithSnapshots()
	s.replay(0, 0, last)
	if s.request != nil || s.m.State() != Live {
		s.t.Fatalf("state %v, request %+v", s.m.State(), s.request)
	}
	s.lines = nil
}

func (s *script) liveNamed(incarnation, seq uint64) { s.arrive(named(incarnation, seq)) }

func TestSnapshotBegins(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.replay(0, 50, 99)
	s.liveNamed(0, 98) // late
	s.liveNamed(0, 100)
	s.restore(0, 99)
	s.want("discarded", "part of the snapshot of 99", "part of the snapshot of 99", "restored up to 99", "batch 100 of 0")
	if s.request == nil || s.snapshot || s.request.From != 100 {
		t.Fatalf("request %+v, want a replay from 100", s.request)
	}
	s.replay(0, 50, 101)
	s.want("batch 101 of 0")
	s.liveNamed(0, 99) // included, and late
	s.liveNamed(0, 101)
	s.liveNamed(0, 102)
	s.want("batch 102 of 0")
	if s.request != nil || s.m.State() != Live {
		t.Fatalf("state %v, request %+v", s.m.State(), s.request)
	}
}

func TestSnapshotRepairsForgottenGap(t *testing.T) {
	s := newScript(t)
	s.beginRead(3)
	s.liveNamed(0, 100)
	s.replay(0, 50, 100) // twice, because replies may have been dropped
	s.replay(0, 50, 100)
	s.restore(0, 100)
	s.replay(0, 50, 101)
	s.want("discarded", "part of the snapshot of 100", "part of the snapshot of 100", "restored up to 100", "batch 101 of 0")
}

// A replay socket that does not answer is given up as without snapshots, and a snapshot is requested before a loss is
// reported.
func TestSnapshotInsteadOfSilentReplay(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.end(OutcomeSilent)
	if s.request != nil {
		t.Fatal("requested, though nothing is known to be missing")
	}
	s.liveNamed(0, 100)
	s.restore(0, 101)
	s.liveNamed(0, 102)
	s.want("discarded", "part of the snapshot of 101", "part of the snapshot of 101", "restored up to 101", "batch 102 of 0")
	if s.request != nil {
		t.Fatalf("request %+v to a replay socket that does not answer", s.request)
	}
}

// The snapshot of a restarted engine is used, because its header names the incarnation.
func TestSnapshotOfRestartedEngine(t *testing.T) {
	s := newScript(t)
	s.beginRead(3)
	s.connectWithSnapshots()
	s.end(OutcomeComplete) // no batch since the last one
	s.liveNamed(0, 200)
	for s.request != nil && !s.snapshot {
		s.end(OutcomeComplete)
	}
	s.lines = nil
	s.restore(1, 100)
	s.want("restarted", "discarded", "part of the snapshot of 100", "part of the snapshot of 100", "restored up to 100")
}

// TestUnusableSnapshots checks that a snapshot that fails is requested a few times, and that the gap is then reported.
func TestUnusableSnapshots(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail func(s *script)
		// discarded reports whether a part was delivered.
		discarded bool
		asks      int
	}{
		{"that is silent", func(s *script) { s.end(OutcomeSilent) }, false, maxSnapshotFailures},
		{"that fails", func(s *script) { s.end(OutcomeFailed) }, false, maxSnapshotFailures},
		{"without a header", func(s *script) { s.end(OutcomeComplete) }, false, maxSnapshotFailures},
		{"that has no slot", func(s *script) { s.end(OutcomeBusy) }, false, 1},
		{"of batches that were read", func(s *script) {
			if s.header(0, 3) {
				s.t.Error("a snapshot up to the last batch read is wanted")
			}
			s.end(OutcomeFailed)
		}, false, maxSnapshotFailures},
		{"that ends early", func(s *script) { s.header(0, 100); s.part(0); s.end(OutcomeFailed) }, true, maxSnapshotFailures},
		{"with a batch of another incarnation", func(s *script) {
			s.header(0, 100)
			if s.part(1) {
				s.t.Error("more is wanted after a batch of another incarnation")
			}
			s.end(OutcomeFailed)
		}, true, maxSnapshotFailures},
		{"with a malformed batch", func(s *script) {
			s.header(0, 100)
			actions, more := s.m.SnapshotBatch(s.now, s.request.ID, &Batch{Malformed: true})
			s.do(actions)
			if more {
				s.t.Error("more is wanted after a malformed batch")
			}
			s.end(OutcomeFailed)
		}, true, maxSnapshotFailures},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t)
			s.beginRead(3)
			s.liveNamed(0, 100)
			s.replay(0, 50, 100)
			s.replay(0, 50, 100)
			asks := 0
			for ; s.request != nil && s.snapshot; asks++ {
				tt.fail(s)
			}
			for s.request != nil {
				s.replay(0, 50, 100)
			}
			if asks != tt.asks {
				t.Errorf("%d requests for a snapshot, want %d", asks, tt.asks)
			}
			want := "gap replay_forgotten 4-49"
			if tt.discarded {
				want = "gap replay_forgotten 0-49" // all blocks were discarded
			}
			if !slices.Contains(s.lines, want) {
				t.Errorf("got %q, want %q", s.lines, want)
			}
			if n := len(s.lines); s.lines[n-1] != "batch 100 of 0" {
				t.Errorf("the last line is %q, want batch 100", s.lines[n-1])
			}
			// No snapshot is requested for some time.
			s.lines = nil
			s.liveNamed(0, 200)
			for s.request != nil {
				s.replay(0, 150, 200)
			}
			if !slices.Contains(s.lines, "gap replay_forgotten 101-149") {
				t.Errorf("got %q, want a gap", s.lines)
			}
		})
	}
}

// A snapshot that had no slot says nothing about the engine: one is requested again as soon as a replay that had none.
func TestBusySnapshotIsRequestedAgainSoon(t *testing.T) {
	for _, tt := range []struct {
		outcome Outcome
		rest    time.Duration
	}{{OutcomeBusy, busyRestTime}, {OutcomeFailed, RestTime}} {
		s := newScript(t)
		s.beginRead(3)
		lose := func(seq uint64) (wanted bool) {
			s.liveNamed(0, seq)
			s.replay(0, seq-50, seq)
			s.replay(0, seq-50, seq)
			return s.request != nil && s.snapshot
		}
		if !lose(100) {
			t.Fatal("no snapshot is requested for a gap")
		}
		var ended time.Time
		for s.request != nil && s.snapshot {
			ended = s.now.Add(time.Second) // that a request takes
			s.end(tt.outcome)
		}
		for s.request != nil {
			s.replay(0, 50, 100)
		}
		s.now = ended.Add(tt.rest - 5*time.Second) // the replays take some of them
		if lose(200) {
			t.Errorf("outcome %v: a snapshot is requested within %v", tt.outcome, tt.rest)
		}
		for s.request != nil {
			s.replay(0, 150, 200)
		}
		s.now = ended.Add(tt.rest)
		if !lose(300) {
			t.Errorf("outcome %v: no snapshot is requested after %v", tt.outcome, tt.rest)
		}
	}
}

// The blocks that snapshots have replaced are reported as lost, although no batch shows the loss, and nothing follows.
func TestLossOfAbortedSnapshotsIsReported(t *testing.T) {
	s := newScript(t)
	s.beginRead(3)
	s.connectWithSnapshots()
	for s.request != nil && !s.snapshot {
		s.replay(0, 100, 120)
	}
	var want []string
	for range maxSnapshotFailures {
		s.header(0, 120)
		s.part(0)
		s.end(OutcomeFailed)
		want = append(want, "discarded", "part of the snapshot of 120", "discarded, gap replay_incomplete")
	}
	for s.request != nil {
		s.end(OutcomeFailed)
	}
	s.want(want...)
}

// An engine whose replay is too short for its rate is not asked in a loop.
func TestSnapshotsAreRare(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.replay(0, 50, 99)
	s.restore(0, 99)
	s.replay(0, 50, 99)
	s.lines = nil
	s.liveNamed(0, 200)
	s.replay(0, 150, 200)
	s.replay(0, 150, 200)
	for s.request != nil {
		s.replay(0, 150, 200)
	}
	if s.lines[0] != "gap replay_forgotten 100-149" {
		t.Errorf("got %q, want a gap", s.lines[:1])
	}
	s.now = s.now.Add(snapshotRestTime)
	s.liveNamed(0, 300)
	s.replay(0, 250, 300)
	s.replay(0, 250, 300)
	s.lines = nil
	s.restore(0, 300)
	s.want("discarded", "part of the snapshot of 300", "part of the snapshot of 300", "restored up to 300")
}

// A restart that a live batch shows ends a snapshot in progress.
func TestRestartDuringSnapshot(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.replay(0, 50, 99)
	s.header(0, 99)
	s.part(0)
	s.liveNamed(1, 0)
	s.want("discarded", "part of the snapshot of 99", "restarted")
	s.replay(1, 0, 0)
	s.want("batch 0 of 1")
}

// A part of a snapshot that an earlier run has delivered is discarded when the next run is connected.
func TestResumedPartOfSnapshotIsDiscarded(t *testing.T) {
	s := newScript(t)
	s.beginRead(3)
	s.liveNamed(0, 100)
	s.replay(0, 50, 100)
	s.replay(0, 50, 100)
	s.header(0, 100)
	s.part(0)
	if c := &s.cursor; !c.Restoring || c.Started || c.Delivered || c.Publisher != string(publisherOf(0)) {
		t.Fatalf("cursor %+v", c)
	}
	next := newScript(t)
	next.m.Resume(next.now, &s.cursor, replayEndpoint)
	next.connectWithSnapshots()
	next.want("discarded, gap replay_incomplete")
	next.replay(0, 50, 100)
	next.restore(0, 100)
	next.want("discarded", "part of the snapshot of 100", "part of the snapshot of 100", "restored up to 100")
	if c := &next.cursor; c.Restoring || !c.Started || c.Seq != 100 {
		t.Fatalf("cursor %+v", c)
	}
}

// After a snapshot and no batch, a restart of kvcast finds the engine by its publisher id.
func TestResumeAfterSnapshot(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.replay(0, 50, 99)
	s.restore(0, 99)
	next := newScript(t)
	next.m.Resume(next.now, &s.cursor, replayEndpoint)
	next.connectWithSnapshots()
	next.replay(0, 50, 100)
	next.want("batch 100 of 0")
}

// The wait of a request that failed is that of replays.
func TestFailedSnapshotIsRequestedAfterAWait(t *testing.T) {
	s := newScript(t)
	s.connectWithSnapshots()
	s.replay(0, 50, 99)
	for n := 1; n < maxSnapshotFailures; n++ {
		began := s.now.Add(time.Second) // that a request takes
		s.end(OutcomeFailed)
		if got, want := s.now.Sub(began), retryWait(n); got != want {
			t.Errorf("requested again after %v, want %v", got, want)
		}
	}
}

// Snapshots without contents are not used for a gap.
func TestSnapshotsThatBeginOnly(t *testing.T) {
	s := newScript(t)
	s.connection++
	s.do(s.m.Connect(s.now, Connection{ID: s.connection, Replay: replayEndpoint, Snapshot: snapshotEndpoint, SnapshotsBegin: true}))
	s.answer(0, 50, 99, OutcomeComplete)
	if s.request == nil || !s.snapshot {
		t.Fatalf("request %+v, want one for a snapshot", s.request)
	}
	s.live("1", 0, 99) // the barrier
	actions, _ := s.m.SnapshotHeader(s.now, s.request.ID, &Batch{Seq: 99, Epoch: []byte("1")})
	s.do(actions)
	s.end(OutcomeComplete)
	s.live("1", 0, 100)
	s.answer(0, 99, 100, OutcomeComplete) // the replay socket is the publisher's
	s.want("discarded", "restored up to 99", "batch 100 of 0")
	s.live("1", 0, 200)
	for s.request != nil {
		if s.snapshot {
			t.Fatal("a snapshot is requested for a gap")
		}
		s.answer(0, 150, 200, OutcomeComplete)
	}
	if s.lines[0] != "gap replay_forgotten 101-149" {
		t.Errorf("got %q, want a gap", s.lines[0])
	}
}

// The live barrier of a snapshot shows later, by its fingerprint, that the engine did not restart.
func TestBarrierOfSnapshotIsCompared(t *testing.T) {
	for _, late := range []bool{false, true} {
		s := newScript(t)
		s.connection++
		s.do(s.m.Connect(s.now, Connection{ID: s.connection, Replay: replayEndpoint, Snapshot: snapshotEndpoint, SnapshotsBegin: true}))
		s.answer(0, 50, 99, OutcomeComplete)
		if !late {
			s.live("1", 0, 99)
		}
		actions, _ := s.m.SnapshotHeader(s.now, s.request.ID, &Batch{Seq: 99, Epoch: []byte("1")})
		s.do(actions)
		s.end(OutcomeComplete)
		if late {
			s.live("1", 0, 99)
		}
		s.want("discarded", "restored up to 99")
		s.connect()
		s.answer(0, 50, 100, OutcomeComplete)
		s.want("batch 100 of 0")
		s.connect()
	}
}
