package sequence

import (
	"testing"
	"time"
)

// newResumed returns a script with batches 0 to last of incarnation 0, after which the connection was resumed. The history
// has the last one only if recovered is set.
func newResumed(t *testing.T, last uint64, recovered bool) *script {
	t.Helper()
	s := newScript(t)
	s.connectTo("")
	for seq := range last + 1 {
		s.live("", 0, seq)
	}
	if recovered {
		s.resume("")
	}
	s.lines, s.actions = nil, nil
	s.connectResumed()
	return s
}

func (s *script) connectResumed() {
	s.disconnect()
	s.connection++
	s.do(s.m.Connect(s.now, Connection{ID: s.connection, Resumes: true}))
}

func TestResumedConnection(t *testing.T) {
	type batch struct{ incarnation, seq uint64 }
	for _, tt := range []struct {
		name      string
		recovered bool
		batches   []batch
		want      []string
	}{
		{"no restart", false, []batch{{0, 5}, {0, 6}}, []string{"batch 6 of 0"}},
		{"earlier batches first", false, []batch{{0, 3}, {0, 4}, {0, 5}, {0, 6}}, []string{"batch 6 of 0"}},
		{"no restart, after a recovery", true, []batch{{0, 5}, {0, 6}}, []string{"batch 6 of 0"}},
		{"the batch before, after a recovery", true, []batch{{0, 4}, {0, 5}, {0, 6}}, []string{"batch 6 of 0"}},
		{"restart", false, []batch{{1, 5}, {1, 6}}, []string{"restarted", "gap replay_unavailable 0-4", "batch 5 of 1", "batch 6 of 1"}},
		{"restart, after a recovery", true, []batch{{1, 5}}, []string{"restarted", "gap replay_unavailable 0-4", "batch 5 of 1"}},
		{"restart, the batch before", true, []batch{{1, 4}, {1, 5}}, []string{"restarted", "gap replay_unavailable 0-4", "batch 5 of 1"}},
		{"restart, from the start", true, []batch{{1, 0}, {1, 1}}, []string{"restarted", "batch 0 of 1", "batch 1 of 1"}},
		{"the last batch is forgotten", false, []batch{{0, 6}}, []string{"gap possible_restart 0-0", "batch 6 of 0"}},
		{"more is forgotten", false, []batch{{0, 8}}, []string{"gap possible_restart 0-0", "gap replay_unavailable 6-7", "batch 8 of 0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newResumed(t, 5, tt.recovered)
			for _, b := range tt.batches {
				s.live("", b.incarnation, b.seq)
			}
			s.want(tt.want...)
			if at := s.m.Deadline(); !at.IsZero() {
				t.Errorf("deadline %v after the first batch", at)
			}
		})
	}
}

// A publisher that accepts the call, and then sends nothing that was read, may have restarted.
func TestResumedConnectionWithoutTheLastBatch(t *testing.T) {
	s := newResumed(t, 5, false)
	if at := s.m.Deadline(); !at.Equal(s.now.Add(resumeTimeout)) {
		t.Fatalf("deadline %v, want %v later", at, resumeTimeout)
	}
	s.do(s.m.Tick(s.now.Add(resumeTimeout-time.Nanosecond), true))
	s.want()
	s.do(s.m.Tick(s.now.Add(resumeTimeout), true))
	s.want("gap possible_restart 0-0")
	s.live("", 0, 5)
	s.live("", 0, 6)
	s.want("batch 6 of 0")
}

// Nothing is reported when a resumed connection breaks before its first batch, and the next one resumes.
func TestConnectionResumedTwice(t *testing.T) {
	s := newResumed(t, 5, false)
	s.connectResumed()
	s.live("", 0, 5)
	s.want()
	s.disconnect()
	if at := s.m.Deadline(); !at.Equal(s.now.Add(s.m.cfg.Grace)) {
		t.Errorf("deadline %v, want the grace time", at)
	}
	s.connectTo("") // which does not resume
	s.want("gap possible_restart 0-0")
}

// A batch without events and time is the same for every engine.
func TestEmptyBatchIsNoEvidence(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	empty := Batch{Seq: 0, Empty: true, Fingerprint: Fingerprint{Hash: 1}}
	first, again := empty, empty
	s.arrive(&first)
	s.connectResumed()
	s.arrive(&again)
	s.want("batch 0 of 0", "gap possible_restart 0-0")
}

// An epoch shows that the engine has not restarted, if the publisher has forgotten the last batch, and if that has neither events nor a time.
func TestResumedConnectionWithAnEpoch(t *testing.T) {
	for _, tt := range []struct {
		name  string
		epoch string
		seq   uint64
		want  []string
	}{
		{"the last batch is forgotten", "a", 2, []string{"batch 2 of 0"}},
		{"more is forgotten", "a", 4, []string{"gap replay_unavailable 2-3", "batch 4 of 0"}},
		{"restart, the same batch", "b", 1, []string{"restarted", "gap replay_unavailable 0-0", "batch 1 of 0"}},
		{"restart, an earlier batch", "b", 0, []string{"restarted", "batch 0 of 0"}},
		{"restart", "b", 2, []string{"restarted", "gap replay_unavailable 0-1", "batch 2 of 0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t)
			s.connectTo("")
			s.live("a", 0, 0)
			s.live("a", 0, 1)
			s.lines = nil
			s.connectResumed()
			s.live(tt.epoch, 0, tt.seq)
			s.want(tt.want...)
		})
	}
	s := newScript(t)
	s.connectTo("")
	empty := Batch{Seq: 0, Empty: true, Fingerprint: Fingerprint{Hash: 1}, Epoch: []byte("a")}
	first, again := empty, empty
	s.arrive(&first)
	s.connectResumed()
	s.arrive(&again)
	s.want("batch 0 of 0")
}

// After a loss that was reported last, the seq of the last batch read has no batch.
func TestResumeAtALoss(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 0, 0)
	s.do([]Action{{Kind: ReportGap, First: 1, Last: 3, Missed: 3}})
	s.resume("")
	s.lines = nil
	s.connectResumed()
	s.live("", 0, 3)
	s.live("", 0, 4)
	s.want("gap possible_restart 0-0", "batch 4 of 0")
}
