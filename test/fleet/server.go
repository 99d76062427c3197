package fleet

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// Server is kvcast serve over all its runs, behind a proxy that always has the same address.
type Server struct {
	harness.ProcessConfig
	Proxy   *harness.Proxy
	Process *harness.Process // of the current run; nil before the first
}

// NewServer returns a server that is not started.
func NewServer(t *testing.T, args ...string) *Server {
	t.Helper()
	return &Server{ProcessConfig: harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args}, Proxy: harness.NewProxy(t, "")}
}

// Start starts the next run, and waits until it serves. The test ends it.
func (s *Server) Start(t *testing.T) {
	t.Helper()
	s.Launch(t)
	s.Serve(t)
}

// Launch starts the next run. The test ends it.
func (s *Server) Launch(t *testing.T) {
	t.Helper()
	s.Proxy.Retarget("") // the port of the last run may be another server's now
	s.Process = start(t, s.ProcessConfig)
}

// Serve waits until the current run serves.
func (s *Server) Serve(t *testing.T) {
	t.Helper()
	s.Proxy.Retarget(Address(t, s.Process))
}

// Start starts kvcast serve. The test ends it.
func Start(t *testing.T, args ...string) *harness.Process {
	t.Helper()
	return start(t, harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
}

func start(t *testing.T, c harness.ProcessConfig) *harness.Process {
	t.Helper()
	p, err := harness.StartProcess(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// Address waits until a process serves, and returns its address.
func Address(t *testing.T, p *harness.Process) string {
	t.Helper()
	addr, err := p.Addr()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}
