package main_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/faultfs"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(faultfs.RunTests(m)) }

// waitTimeout bounds each wait for a condition that usually takes at most a second.
const waitTimeout = harness.Timeout

// program returns the path of kvcast, which is built with the race detector if this test is.
func program(t *testing.T) string {
	t.Helper()
	path, err := harness.Program(testclass.RaceEnabled)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// result is the output and the exit status of a command.
type result struct {
	out    string
	err    string
	status int
}

// kvcast runs a command until it exits.
func kvcast(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t), args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run kvcast %v: %v", args, err)
	}
	return result{out: out.String(), err: errOut.String(), status: cmd.ProcessState.ExitCode()}
}

// process is kvcast serve, which stops with the test.
type process struct {
	*harness.Process
	t *testing.T
}

// serve starts kvcast serve. It is built with the race detector if this test is.
func serve(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
}

func start(t *testing.T, cfg harness.ProcessConfig) *process {
	t.Helper()
	p, err := harness.StartProcess(cfg)
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
	return &process{p, t}
}

// logged waits until a log line matches a pattern, and returns the match of the pattern's last group.
func (p *process) logged(pattern string) string {
	p.t.Helper()
	return p.must(p.Logged(regexp.MustCompile(pattern)))
}

func (p *process) must(s string, err error) string {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

func (p *process) addr() string     { p.t.Helper(); return p.must(p.Addr()) }
func (p *process) endpoint() string { p.t.Helper(); return p.logged(`msg=listening endpoint=(\S+)`) }

// stop stops the process, and returns its exit status.
func (p *process) stop() int {
	_ = p.Stop() // the cleanup of start reports the error
	return p.ExitStatus()
}

// client returns a client of the process.
func (p *process) client() kvcastv1.RouterEventServiceClient {
	p.t.Helper()
	return kvcastv1.NewRouterEventServiceClient(harness.Dial(p.t, p.addr()))
}

// residentMiB returns the resident memory of the process.
func (p *process) residentMiB() int {
	p.t.Helper()
	n, err := harness.ResidentBytes(p.PID())
	if err != nil {
		p.t.Fatal(err)
	}
	return int(n >> 20)
}

// peakResidentMiB returns the most resident memory that the process has had.
func (p *process) peakResidentMiB() int {
	p.t.Helper()
	n, err := harness.PeakResidentBytes(p.PID())
	if err != nil {
		p.t.Fatal(err)
	}
	return int(n >> 20)
}

// sum returns the sum of a metric's samples.
func (p *process) sum(metric string) float64 {
	p.t.Helper()
	m, err := p.Metrics(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	return m.Sum(metric)
}

// metric waits until the admin port shows a line such as name{label="x"} 1.
func (p *process) metric(line string) {
	p.t.Helper()
	if err := p.AwaitMetric(p.t.Context(), line); err != nil {
		p.t.Fatal(err)
	}
}
