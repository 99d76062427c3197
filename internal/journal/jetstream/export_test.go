package jetstream

import (
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
)

// IsShared reports whether other processes may append to the stream.
func (j *Journal) IsShared() bool { return j.shared != nil }

// SetCheckpointTimeout changes the time that a write of a checkpoint may take, and returns a function that changes it back.
func SetCheckpointTimeout(d time.Duration) (restore func()) {
	before := checkpoints.Timeout
	checkpoints.Timeout = d
	return func() { checkpoints.Timeout = before }
}

// StuckAfter returns the error of a journal that is opened and not loaded, after some ticks at which its embedded server has
// acknowledged nothing since a time.
func (j *Journal) StuckAfter(ticks int, since time.Time) error {
	d := j.mode.(*directory)
	j.stall.since.Store(int64(since.Sub(base)))
	d.w.sent = 1
	for range ticks {
		d.checkProgress()
	}
	return j.Err()
}

// Reconnect ends the connection to the servers, which is replaced.
func (j *Journal) Reconnect() error { return j.client.Conn.ForceReconnect() }
