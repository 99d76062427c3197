package sequence

import "testing"

// The engine restarts before the end marker of a replay, and its next incarnation continues the seqs
// on another connection. The end of the replay does not deliver that batch, because the replies say
// nothing about its incarnation.
func TestRestartDuringTheReplayOfTheStartIsRecognised(t *testing.T) {
	for _, outcome := range []Outcome{OutcomeFailed, OutcomeSilent, OutcomeComplete} {
		s := newScript(t)
		s.connect()
		s.m.Sent(s.request.ID)
		for seq := range uint64(3) {
			s.reply(batchOf(0, seq))
		}
		s.want("batch 0 of 0", "batch 1 of 0", "batch 2 of 0")
		s.connect()
		s.live("", 1, 3)
		s.end(outcome)
		s.finish(1, 3)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
	}
}
