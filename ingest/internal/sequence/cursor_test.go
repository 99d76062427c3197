package sequence

import "testing"

// resume continues at the cursor after the actions that s has recorded, without a connection.
func (s *script) resume(replay string) {
	s.m = New(s.m.cfg)
	s.m.Resume(s.now, &s.cursor, replay)
	s.request = nil
}

// A batch that was read before the resume is dropped, although the history does not have it: the replay shows that
// the engine did not restart.
func TestOldDuplicateAfterResumeIsNoRestart(t *testing.T) {
	s := newScript(t)
	s.begin("", 5)
	s.resume(replayEndpoint)
	s.connect()
	s.live("", 0, 3)
	s.finish(0, 5)
	s.live("", 0, 2)
	s.finish(0, 5)
	s.want()
	s.live("", 0, 6)
	s.want("batch 6 of 0")
}

// An engine that restarted before the resume and has passed the last seq is detected by its replay.
func TestRestartBeforeResumeIsDetected(t *testing.T) {
	s := newScript(t)
	s.begin("", 2)
	s.resume(replayEndpoint)
	s.connect()
	s.finish(1, 3)
	s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
}

// Without a replay socket a possible restart is reported once, and the batches that are missing are a gap.
func TestResumeWithoutReplay(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 0, 0)
	s.resume("")
	s.connectTo("")
	s.resume("")
	s.connectTo("")
	s.live("", 0, 3)
	s.want("batch 0 of 0", "gap possible_restart 0-0", "gap replay_unavailable 1-2", "batch 3 of 0")
	s.resume("")
	s.connectTo("")
	s.live("", 1, 3)
	s.want("gap possible_restart 0-0", "restarted", "gap replay_unavailable 0-2", "batch 3 of 1")
}

// Identifiers of the incarnation survive.
func TestEpochAfterResumeShowsARestart(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("a", 0, 0)
	s.resume("")
	s.connectTo("")
	s.live("b", 1, 1)
	s.want("batch 0 of 0", "gap possible_restart 0-0", "restarted", "gap replay_unavailable 0-0", "batch 1 of 1")
}

// After a conflict of two publishers the blocks of both are in the stream, and only a full replay can repair that.
func TestResumeDuringAConflictReplaysAll(t *testing.T) {
	s := newScript(t)
	s.begin("a", 1)
	s.connection++
	s.do(s.m.Connect(s.now, Connection{ID: s.connection, Replay: replayEndpoint}))
	s.finish(0, 1)
	s.do(s.m.Arrival(s.now, s.connection-1, batchOf(0, 2)))
	s.want("conflict", "gap ambiguous_publisher 0-0", "batch 2 of 0")
	s.resume(replayEndpoint)
	s.connect()
	s.finish(1, 2)
	s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1")
}

// A publisher that does not connect again is absent after the grace time.
func TestPublisherThatDoesNotReturnIsAbsent(t *testing.T) {
	s := newScript(t)
	s.begin("", 0)
	s.resume(replayEndpoint)
	s.now = s.m.Deadline()
	s.do(s.m.Tick(s.now, true))
	s.do(s.m.AttemptFailed(s.now, true))
	s.want("gap possible_restart 0-0")
}
