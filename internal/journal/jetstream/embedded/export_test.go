package embedded

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// SetHealthz replaces the result of nats-server's health check until the test ends. f gets the number of checks so far, this one
// included, and the real result.
func SetHealthz(t *testing.T, f func(checks int, result *server.HealthStatus) *server.HealthStatus) {
	t.Helper()
	var checks atomic.Int32
	healthz = func(s *server.Server, o *server.HealthzOptions) *server.HealthStatus {
		return f(int(checks.Add(1)), s.Healthz(o))
	}
	t.Cleanup(func() { healthz = (*server.Server).Healthz })
}

// LockFile returns the file descriptor through which the directory is locked.
func (s *Server) LockFile() int { return int(s.lock.Fd()) }

// AwaitStop waits for the stop of a server that is configured so, until a channel is closed.
func AwaitStop(cfg Config, stopped <-chan struct{}) error {
	return (&Server{cfg: cfg}).awaitStop(stopped)
}

// OpenPosition is openPosition.
var OpenPosition = openPosition

// Close is close. The error is the first of both.
func (p *Position) Close() error {
	unrenewed, err := p.close()
	p.file = nil
	return errors.Join(unrenewed, err)
}

// Abandon releases what the process has of the position, as a crash does.
func (p *Position) Abandon() {
	if p.file != nil {
		_ = p.file.close()
		p.file = nil
	}
}
