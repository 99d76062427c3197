package jetstream

import "time"

// IsShared reports whether other processes may append to the stream.
func (j *Journal) IsShared() bool { return j.shared != nil }

// IsUnanswered is isUnanswered.
var IsUnanswered = isUnanswered

// SetCheckpointTimeout changes the time that a write of a checkpoint may take, and returns a function that changes it back.
func SetCheckpointTimeout(d time.Duration) (restore func()) {
	before := checkpointTimeout
	checkpointTimeout = d
	return func() { checkpointTimeout = before }
}

// StuckAfter reports whether an embedded server counts as stuck after some ticks at which it has acknowledged nothing for some
// time.
func StuckAfter(ticks int, silent time.Duration) bool {
	var d stuckDetector
	stuck := false
	for range ticks {
		stuck = d.tick(silent)
	}
	return stuck
}
