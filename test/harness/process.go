package harness

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ProcessConfig configures a Process.
type ProcessConfig struct {
	// Race runs the program built with the race detector.
	Race bool
	// Wrapper is a command that runs the program, such as taskset -c 0.
	Wrapper []string
	// Args follow "serve". The harness adds listen addresses with free ports.
	Args []string
	// LogLines is the number of last log lines to keep; 0 keeps all.
	LogLines int
}

// pollInterval is the time between two reads of the metrics.
const pollInterval = 20 * time.Millisecond

// maxFaultLines bounds the number of lines that Process.LogFaults returns.
const maxFaultLines = 30

// Process is kvcast serve as a separate program. It exits with this process, however this process
// exits.
type Process struct {
	cmd   *exec.Cmd
	stop  func() error
	ended chan struct{} // closed when the program has exited

	mu       sync.Mutex    // guards all below
	log      []string      // lines
	faults   []string      // lines
	logLines int           // maximum length of log; 0 means no limit
	addr     string        // of gRPC; empty before it serves
	admin    string        // address; empty before it serves
	changed  chan struct{} // closed when the log grows or ends
	complete bool          // the log has ended
}

// StartProcess starts kvcast serve, which the caller stops. It returns before the server serves:
// Addr and Admin wait for that.
func StartProcess(cfg ProcessConfig) (*Process, error) {
	p, err := startProcess(cfg)
	if err != nil {
		return nil, fmt.Errorf("start kvcast: %w", err)
	}
	return p, nil
}

func startProcess(cfg ProcessConfig) (*Process, error) {
	program, err := Program(cfg.Race)
	if err != nil {
		return nil, err
	}
	command := slices.Concat(cfg.Wrapper,
		[]string{program, "--end-with-stdin", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, cfg.Args)
	p := &Process{
		cmd:   exec.Command(command[0], command[1:]...), //nolint:noctx // Stop ends it
		ended: make(chan struct{}), changed: make(chan struct{}), logLines: cfg.LogLines,
	}
	p.stop = sync.OnceValue(p.terminate)
	if _, err := p.cmd.StdinPipe(); err != nil { // open until either process exits
		return nil, err
	}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go p.read(stderr)
	return p, nil
}

// read collects the log, and waits for the program to exit.
func (p *Process) read(stderr io.Reader) {
	defer close(p.ended)
	lines := bufio.NewReader(stderr)
	for {
		line, err := lines.ReadString('\n')
		p.append(strings.TrimSuffix(line, "\n"), err != nil)
		if err != nil {
			_ = p.cmd.Wait() // ProcessState has the status
			return
		}
	}
}

var servingLine = regexp.MustCompile(`msg=serving (grpc|admin)=(\S+)`)

func (p *Process) append(line string, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := servingLine.FindStringSubmatch(line); m != nil && m[1] == "grpc" {
		p.addr = m[2]
	} else if m != nil {
		p.admin = m[2]
	}
	if line != "" {
		p.log = append(p.log, line)
		if p.logLines > 0 && len(p.log) > p.logLines {
			p.log = p.log[1:]
		}
		// The runtime and the race detector do not write in the log's format.
		if fault := strings.Contains(line, "level=ERROR") || !strings.HasPrefix(line, "time="); fault && len(p.faults) < maxFaultLines {
			p.faults = append(p.faults, line)
		}
	}
	p.complete = last
	close(p.changed)
	p.changed = make(chan struct{})
}

// Log returns the log so far.
func (p *Process) Log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.log, "\n")
}

// LogFaults returns the first log lines that report an error or a crash.
func (p *Process) LogFaults() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.faults)
}

// Logged waits until a log line matches a pattern, and returns the match of its last group. It
// returns an error if the program exits first.
func (p *Process) Logged(pattern *regexp.Regexp) (string, error) {
	searched := 0
	return p.await(pattern.String(), func() string {
		if p.logLines > 0 {
			searched = 0 // older lines have been dropped since
		}
		for ; searched < len(p.log); searched++ {
			if m := pattern.FindStringSubmatch(p.log[searched]); m != nil {
				return m[len(m)-1]
			}
		}
		return ""
	})
}

// Addr waits until the server serves, and returns its gRPC address.
func (p *Process) Addr() (string, error) {
	return p.await("its gRPC address", func() string { return p.addr })
}

// Admin waits until the admin port serves, and returns its address.
func (p *Process) Admin() (string, error) {
	return p.await("its admin address", func() string { return p.admin })
}

// await waits until find, which is called with mu held, returns a value.
func (p *Process) await(what string, find func() string) (string, error) {
	timeout := time.After(Timeout)
	for {
		p.mu.Lock()
		found, changed, complete := find(), p.changed, p.complete
		p.mu.Unlock()
		switch {
		case found != "":
			return found, nil
		case complete:
			return "", fmt.Errorf("kvcast ended before it logged %s:\n%s", what, p.Log())
		}
		select {
		case <-changed:
		case <-timeout:
			return "", fmt.Errorf("kvcast has not logged %s:\n%s", what, p.Log())
		}
	}
}

// Get returns the body of a path of the admin port.
func (p *Process) Get(ctx context.Context, path string) (string, error) {
	admin, err := p.Admin()
	if err != nil {
		return "", err
	}
	body, err := Get(ctx, "http://"+admin+path)
	if err != nil {
		return "", fmt.Errorf("get %s: %w", path, err)
	}
	return body, nil
}

// Metrics returns the metrics of the admin port.
func (p *Process) Metrics(ctx context.Context) (Metrics, error) {
	admin, err := p.Admin()
	if err != nil {
		return nil, err
	}
	return Scrape(ctx, admin)
}

// AwaitMetric waits until a sample, named as by Sample.String, has a value.
func (p *Process) AwaitMetric(ctx context.Context, series string, want float64) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for {
		m, err := p.Metrics(ctx)
		if err != nil {
			return fmt.Errorf("wait for metric %s: %w", series, err)
		}
		if slices.ContainsFunc(m, func(s Sample) bool { return s.Value == want && s.String() == series }) {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for metric %s %v: %w", series, want, ctx.Err())
		}
	}
}

// PID returns the id of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal to the process.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop sends SIGTERM and waits for the process to exit. It returns an error if the process does not
// exit within Timeout, or not with status 0. Further calls return the same error.
func (p *Process) Stop() error { return p.stop() }

func (p *Process) terminate() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have exited already
	var late error
	select {
	case <-p.ended:
	case <-time.After(Timeout):
		_ = p.cmd.Process.Kill()
		<-p.ended
		late = fmt.Errorf("it did not end within %v of SIGTERM", Timeout)
	}
	if state := p.cmd.ProcessState; late != nil || !state.Success() {
		return fmt.Errorf("stop kvcast: %w\n%s", errors.Join(late, errors.New(state.String())), p.Log())
	}
	return nil
}

// ExitStatus returns the exit status of a process that has been stopped.
func (p *Process) ExitStatus() int { return p.cmd.ProcessState.ExitCode() }
