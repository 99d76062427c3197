package harness

import (
	"regexp"
	"strings"
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Server is kvcast serve in a test, which fails if it cannot be asked.
type Server struct {
	*Process
	t testing.TB
}

// ServerOf returns the Server of a process, whose end is another's.
func ServerOf(t testing.TB, p *Process) *Server { return &Server{p, t} }

// Serve starts kvcast serve, and stops it at the end of the test. The test fails if the server does not stop in order. The log of kvcast is printed if the
// test has failed.
func Serve(t testing.TB, cfg ProcessConfig) *Server {
	t.Helper()
	p, err := StartProcess(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		} else if t.Failed() {
			t.Logf("the log of kvcast:\n%s", strings.Join(p.Log(), "\n"))
		}
	})
	return ServerOf(t, p)
}

// AwaitLog waits until a log line matches a pattern, and returns the match of the pattern's last group.
func (s *Server) AwaitLog(pattern string) string {
	s.t.Helper()
	return s.Must(s.Logged(regexp.MustCompile(pattern)))
}

// Must returns a text, unless there is an error.
func (s *Server) Must(text string, err error) string {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return text
}

// Address waits until the server serves, and returns its address.
func (s *Server) Address() string {
	s.t.Helper()
	return s.Must(s.Addr())
}

// Endpoint waits until the server listens for engines, and returns where.
func (s *Server) Endpoint() string {
	s.t.Helper()
	return s.AwaitLog(`msg=listening endpoint=(\S+)`)
}

// End stops the server, and returns its exit status.
func (s *Server) End() int {
	_ = s.Stop() // the cleanup of Serve reports the error
	return s.ExitStatus()
}

// Client returns a client of the server.
func (s *Server) Client() kvcastv1.RouterEventServiceClient {
	s.t.Helper()
	return kvcastv1.NewRouterEventServiceClient(Dial(s.t, s.Address()))
}

// Operator returns a client of the server's workers.
func (s *Server) Operator() kvcastv1.WorkerServiceClient {
	s.t.Helper()
	return kvcastv1.NewWorkerServiceClient(Dial(s.t, s.Address()))
}

// LogBytes returns the bytes of the log so far.
func (s *Server) LogBytes() (n int) {
	for _, line := range s.Log() {
		n += len(line) + 1
	}
	return n
}

// ResidentMiB returns the resident memory.
func (s *Server) ResidentMiB() int {
	s.t.Helper()
	return s.mib(ResidentBytes(s.PID()))
}

// PeakResidentMiB returns the most resident memory that the server has had.
func (s *Server) PeakResidentMiB() int {
	s.t.Helper()
	return s.mib(PeakResidentBytes(s.PID()))
}

func (s *Server) mib(bytes int64, err error) int {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	return int(bytes >> 20)
}

// Sum returns the sum of a metric's samples with the labels, as Metrics.Sum does.
func (s *Server) Sum(metric string, want ...string) float64 {
	s.t.Helper()
	m, err := s.Metrics(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return m.Sum(metric, want...)
}

// AwaitSample waits until the admin port shows a line such as name{label="x"} 1.
func (s *Server) AwaitSample(line string) {
	s.t.Helper()
	if err := s.AwaitMetric(s.t.Context(), line); err != nil {
		s.t.Fatal(err)
	}
}
