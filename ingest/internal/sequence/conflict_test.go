package sequence

import (
	"testing"
	"time"
)

func TestConflictEndsWhenOnePublisherIsSilent(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	for _, seq := range []uint64{0, 1, 10, 2} { // 2 continues the seqs before the gap
		s.live("", 0, seq)
	}
	s.want("batch 0 of 0", "batch 1 of 0", "gap replay_unavailable 2-9", "batch 10 of 0",
		"conflict", "gap ambiguous_publisher 0-0", "batch 2 of 0")
	const step = conflictTimeout/2 + time.Second
	s.live("", 0, 11)
	s.now = s.now.Add(step)
	s.live("", 0, 12)
	if s.m.State() != Conflicted {
		t.Errorf("state %v before the timeout, want conflicted", s.m.State())
	}
	s.now = s.now.Add(step)
	s.live("", 0, 13)
	if s.m.State() != Live {
		t.Errorf("state %v after the timeout, want live", s.m.State())
	}
	s.live("", 0, 15)
	s.want("batch 11 of 0", "batch 12 of 0", "batch 13 of 0", "gap replay_unavailable 14-14", "batch 15 of 0")
}

func TestConflictEndsWhenOneConnectionCloses(t *testing.T) {
	const other = "tcp://other"
	for _, tt := range []struct {
		name   string
		closed ConnectionID
		want   string // replay endpoint after the end
	}{
		{"the first", 1, other},
		{"the second", 2, replayEndpoint},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t)
			s.begin("", 2)
			s.do(s.m.Connect(s.now, Connection{ID: 2, Replay: other}))
			s.finish(0, 2)
			s.do(s.m.Arrival(s.now, 1, batchOf(0, 3))) // on the earlier connection
			if got := s.m.ReplayEndpoint(); got != replayEndpoint {
				t.Errorf("replay endpoint %s, want %s of the connection of the last batch", got, replayEndpoint)
			}
			s.want("conflict", "gap ambiguous_publisher 0-0", "batch 3 of 0")
			s.do(s.m.Disconnect(s.now, tt.closed))
			if s.request == nil || s.request.Endpoint != tt.want {
				t.Fatalf("request %+v, want one to %s", s.request, tt.want)
			}
			s.finish(1, 1)
			s.want("restarted", "batch 0 of 1", "batch 1 of 1")
		})
	}
}

// When both publishers are silent, the conflict ends, and the blocks of the last to be active are
// replayed.
func TestConflictEndsWhenBothPublishersAreSilent(t *testing.T) {
	s := newScript(t)
	s.m.cfg.Silence = conflictTimeout / 2
	s.begin("", 2)
	s.do(s.m.Connect(s.now, Connection{ID: 2, Replay: replayEndpoint}))
	s.finish(0, 2)
	s.do(s.m.Arrival(s.now, 1, batchOf(0, 3))) // on the earlier connection
	s.want("conflict", "gap ambiguous_publisher 0-0", "batch 3 of 0")
	s.now = s.m.Deadline()
	s.do(s.m.Tick(s.now, true))
	s.finish(0, 3)
	s.want("restarted", "batch 0 of 0", "batch 1 of 0", "batch 2 of 0", "batch 3 of 0")
	if s.m.State() != Live {
		t.Errorf("state %v, want live", s.m.State())
	}
}

// Two publishers in conflict are told apart by their connections: the one that closes does not decide
// which seq is next.
func TestConflictFollowsTheSeqsOfEachConnection(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 0, 0)
	s.do(s.m.Connect(s.now, Connection{ID: 2}))
	s.do(s.m.Arrival(s.now, 1, batchOf(0, 1)))
	for seq := range uint64(3) { // nearer to the seqs of the first connection
		s.do(s.m.Arrival(s.now, 2, batchOf(1, 2+seq)))
	}
	s.lines = nil
	s.do(s.m.Disconnect(s.now, 2))
	s.live("", 0, 2)
	s.want("batch 2 of 0")
}
