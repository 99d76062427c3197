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
	// Program is the path of another build of kvcast; empty: a build of Program.
	Program string
	// Wrapper is a command that runs the program, such as taskset -c 0.
	Wrapper []string
	// Args follow "serve". The harness adds listen addresses with free ports, and permits registrations unless calls need
	// credentials.
	Args []string
}

// pollInterval is the time between two reads of the metrics.
const pollInterval = 20 * time.Millisecond

// logTailLines is the number of log lines in errors.
const logTailLines = 100

// Process is kvcast serve as a separate program. It exits with this process, however this process
// exits.
type Process struct {
	cmd   *exec.Cmd
	stop  func() error
	ended chan struct{} // closed when the program has exited

	mu       sync.Mutex    // guards all below
	log      []string      // lines
	changed  chan struct{} // closed when the log grows or ends
	complete bool          // the log has ended
}

// StartProcess starts kvcast serve, which the caller stops. It returns before the server serves:
// Addr and Admin wait for that.
func StartProcess(cfg ProcessConfig) (*Process, error) {
	program := cfg.Program
	if program == "" {
		var err error
		if program, err = Program(cfg.Race); err != nil {
			return nil, err
		}
	}
	// With port 0, a listener of another test could get the port of a server that was killed, and with it the clients that reconnect.
	port, err := AllocatePorts(2)
	if err != nil {
		return nil, err
	}
	command := slices.Concat(cfg.Wrapper, []string{
		program, "--end-with-stdin", "serve", "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--admin", fmt.Sprintf("127.0.0.1:%d", port+1),
	})
	if !slices.Contains(cfg.Args, "--auth-tokens") && !slices.Contains(cfg.Args, "--tls-client-ca") { // otherwise operators register workers
		command = append(command, "--auth-open-registration")
	}
	command = append(command, cfg.Args...)
	p := &Process{
		cmd:   exec.Command(command[0], command[1:]...), //nolint:noctx // Stop ends it
		ended: make(chan struct{}), changed: make(chan struct{}),
	}
	p.stop = sync.OnceValue(p.terminate)
	_, err = p.cmd.StdinPipe() // open until either process exits
	stderr, pipeErr := p.cmd.StderrPipe()
	if err = errors.Join(err, pipeErr); err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("start kvcast: %w", err)
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

func (p *Process) append(line string, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if line != "" {
		p.log = append(p.log, line)
	}
	p.complete = last
	close(p.changed)
	p.changed = make(chan struct{})
}

// Log returns the lines logged so far.
func (p *Process) Log() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.log)
}

// logTail returns the end of the log.
func (p *Process) logTail() string {
	lines := p.Log()
	return strings.Join(lines[max(0, len(lines)-logTailLines):], "\n")
}

// stacks ends the program, and returns the end of the log, followed by the stacks of all goroutines.
func (p *Process) stacks() string {
	logged := len(p.Log())
	_ = p.Signal(syscall.SIGQUIT) // fails if it has exited
	select {
	case <-p.ended:
	case <-time.After(Timeout):
	}
	return strings.Join(p.Log()[max(0, logged-logTailLines):], "\n")
}

// LogFaults returns the log lines that report an error or a crash.
func (p *Process) LogFaults() []string {
	return slices.DeleteFunc(p.Log(), func(line string) bool {
		// The runtime and the race detector do not write in the log's format.
		return strings.HasPrefix(line, "time=") && !strings.Contains(line, "level=ERROR")
	})
}

// Logged waits until a log line matches a pattern, and returns the match of its last group. It
// returns an error if the program exits first.
func (p *Process) Logged(pattern *regexp.Regexp) (string, error) {
	timeout := time.After(Timeout)
	for searched := 0; ; {
		p.mu.Lock()
		lines, changed, complete := p.log[searched:], p.changed, p.complete
		p.mu.Unlock()
		for _, line := range lines {
			if m := pattern.FindStringSubmatch(line); m != nil {
				return m[len(m)-1], nil
			}
		}
		searched += len(lines)
		if complete {
			return "", fmt.Errorf("kvcast ended before it logged %s:\n%s", pattern, p.logTail())
		}
		select {
		case <-changed:
		case <-timeout:
			return "", fmt.Errorf("kvcast has not logged %s within %v:\n%s", pattern, Timeout, p.stacks())
		}
	}
}

var (
	grpcLine  = regexp.MustCompile(`msg=serving grpc=(\S+)`)
	adminLine = regexp.MustCompile(`msg=serving admin=(\S+)`)
)

// Addr waits until the server serves, and returns its gRPC address.
func (p *Process) Addr() (string, error) { return p.Logged(grpcLine) }

// Admin waits until the admin port serves, and returns its address.
func (p *Process) Admin() (string, error) { return p.Logged(adminLine) }

// Get returns the body of a path of the admin port.
func (p *Process) Get(ctx context.Context, path string) (string, error) {
	admin, err := p.Admin()
	if err != nil {
		return "", err
	}
	return get(ctx, "http://"+admin+path)
}

// Metrics returns the metrics of the admin port.
func (p *Process) Metrics(ctx context.Context) (Metrics, error) {
	text, err := p.Get(ctx, metricsPath)
	if err != nil {
		return nil, err
	}
	return parseMetrics(text)
}

// AwaitMetric waits until the metrics contain a line, such as name{label="x"} 1.
func (p *Process) AwaitMetric(ctx context.Context, line string) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for {
		text, err := p.Get(ctx, metricsPath)
		if err != nil {
			return fmt.Errorf("wait for metric %s: %w", line, err)
		}
		if strings.Contains(text, "\n"+line+"\n") {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for metric %s: %w", line, ctx.Err())
		}
	}
}

// PID returns the id of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ended returns a channel that is closed when the process has exited.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Signal sends a signal to the process.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop sends SIGTERM and waits for the process to exit. It returns an error if the process does not
// exit within Timeout, or its exit status is not 0. Further calls return the same error.
func (p *Process) Stop() error { return p.stop() }

func (p *Process) terminate() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have exited already
	var late error
	select {
	case <-p.ended:
	case <-time.After(Timeout):
		_ = p.cmd.Process.Kill()
		<-p.ended
		late = fmt.Errorf("it did not exit within %v of SIGTERM", Timeout)
	}
	if state := p.cmd.ProcessState; late != nil || !state.Success() {
		return fmt.Errorf("stop kvcast: %w\n%s", errors.Join(late, errors.New(state.String())), p.logTail())
	}
	return nil
}

// Kill sends SIGKILL and waits for the process to exit.
func (p *Process) Kill() error {
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-p.ended
	return err
}

// ExitStatus returns the exit status of a process that has been stopped.
func (p *Process) ExitStatus() int { return p.cmd.ProcessState.ExitCode() }
