package jetstream

import (
	"log/slog"
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

// StuckAfter returns the error of a journal with an embedded server after some ticks at which it has acknowledged nothing since
// a time. The server says that it is healthy.
func StuckAfter(ticks int, since time.Time) error {
	before := healthz
	healthz = func(*server.Server, *server.HealthzOptions) *server.HealthStatus { return new(server.HealthStatus) }
	defer func() { healthz = before }()
	j := &Journal{server: new(embedded), failed: make(chan struct{}), log: slog.New(slog.DiscardHandler), since: since}
	j.w.sent = 1
	for range ticks {
		j.overdue()
	}
	return j.err
}
