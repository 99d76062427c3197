package jetstream

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// IsShared reports whether other processes may append to the stream.
func (j *Journal) IsShared() bool { return j.shared != nil }

// IsUnanswered is isUnanswered.
var IsUnanswered = isUnanswered

// SetHealthz changes the answer of the embedded server to the question whether it is healthy, until the test ends.
func SetHealthz(t *testing.T, f func(asked int, answer *server.HealthStatus) *server.HealthStatus) {
	t.Helper()
	var asked atomic.Int32
	healthz = func(s *server.Server, o *server.HealthzOptions) *server.HealthStatus {
		return f(int(asked.Add(1)), s.Healthz(o))
	}
	t.Cleanup(func() { healthz = (*server.Server).Healthz })
}

// SetCheckpointTimeout changes the time that a write of a checkpoint may take, and returns a function that changes it back.
func SetCheckpointTimeout(d time.Duration) (restore func()) {
	before := checkpointTimeout
	checkpointTimeout = d
	return func() { checkpointTimeout = before }
}
