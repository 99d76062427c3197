package bench_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

// process is a kvcast serve, without the race detector, that serves.
type process struct {
	*harness.Process
	grpc string // address
}

// oneCore is a command before kvcast that keeps it, and what it counts as CPUs, to
// the first one.
var oneCore = []string{"taskset", "-c", "0"}

// serve starts kvcast, by way of another command if there is one, and returns when it
// serves.
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

// cpu returns the time that the process has run.
func (p *process) cpu() (time.Duration, error) { return harness.CPUTime(p.PID()) }

// residentBytes returns the memory of the process.
func (p *process) residentBytes() (int64, error) { return harness.ResidentBytes(p.PID()) }

// metrics returns the metrics of the process, summed over labels.
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

// Close stops the process, and is an error if it did not end well.
func (p *process) Close() error { return p.Stop() }

// requireProc skips where the CPU time of another process cannot be read.
func requireProc(tb testing.TB) {
	tb.Helper()
	if _, err := harness.CPUTime(os.Getpid()); err != nil {
		tb.Skipf("skipped: it measures another process through /proc, as Linux has it: %v", err)
	}
}
