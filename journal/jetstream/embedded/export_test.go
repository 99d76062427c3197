package embedded

import (
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// SetHealthz changes nats-server's answer to the question whether it is healthy, until the test ends.
func SetHealthz(t *testing.T, f func(asked int, answer *server.HealthStatus) *server.HealthStatus) {
	t.Helper()
	var asked atomic.Int32
	healthz = func(s *server.Server, o *server.HealthzOptions) *server.HealthStatus {
		return f(int(asked.Add(1)), s.Healthz(o))
	}
	t.Cleanup(func() { healthz = (*server.Server).Healthz })
}
