package bench_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

// process is a running kvcast serve without the race detector.
type process struct {
	*harness.Process
	grpc string // gRPC address
}

// oneCore is the command prefix that confines kvcast to the first CPU. kvcast then also uses
// GOMAXPROCS=1.
var oneCore = []string{"taskset", "-c", "0"}

// serve starts kvcast, optionally through a wrapper command, and returns once it serves.
func serve(wrapper []string, args ...string) (*process, error) {
	p, err := harness.StartProcess(harness.ProcessConfig{Wrapper: wrapper, Args: args})
	if err != nil {
		return nil, err
	}
	addr, err := p.Addr()
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return &process{p, addr}, nil
}

// cpu returns the CPU time of the process.
func (p *process) cpu() (time.Duration, error) { return harness.CPUTime(p.PID()) }

// residentBytes returns the resident memory of the process.
func (p *process) residentBytes() (int64, error) { return harness.ResidentBytes(p.PID()) }

// metrics returns the value of each metric of the process, summed over its label values.
func (p *process) metrics(ctx context.Context) (metrics, error) {
	samples, err := p.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	m := make(metrics)
	for _, s := range samples {
		m[s.Name] += s.Value
	}
	return m, nil
}

// Close stops the process, and returns an error if it did not exit cleanly.
func (p *process) Close() error { return p.Stop() }

// requireProc skips the test if the CPU time of another process cannot be read.
func requireProc(tb testing.TB) {
	tb.Helper()
	if _, err := harness.CPUTime(os.Getpid()); err != nil {
		tb.Skipf("skipped: measuring another process requires /proc: %v", err)
	}
}

// requireOneCore skips the benchmark if the CPU time of another process cannot be read, or a process cannot be confined to a core.
func requireOneCore(b *testing.B) {
	b.Helper()
	requireProc(b)
	if _, err := exec.LookPath(oneCore[0]); err != nil {
		b.Skipf("skipped: %v", err)
	}
}
