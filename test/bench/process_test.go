package bench_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// process is a kvcast serve.
type process struct {
	cmd   *exec.Cmd
	log   strings.Builder // of read, until ended is closed
	ended chan struct{}
	grpc  string // address
	admin string // address
}

// startPatience bounds the time that it takes to serve.
const startPatience = 2 * time.Minute

var (
	grpcAddress  = regexp.MustCompile(`msg=serving grpc=(\S+)`)
	adminAddress = regexp.MustCompile(`msg=serving admin=(\S+)`)
)

// oneCore is a command before kvcast that keeps it, and what it counts as CPUs, to
// the first one.
var oneCore = []string{"taskset", "-c", "0"}

// serve starts kvcast with ports of its own, by way of another command if there is
// one, and returns when it serves.
func serve(by []string, args ...string) (*process, error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	words := slices.Concat(by, []string{path, "--end-with-stdin", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args)
	p := &process{cmd: exec.CommandContext(context.Background(), words[0], words[1:]...), ended: make(chan struct{})}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("start kvcast: %w", err)
	}
	// Open until the process ends, or this one does, however it does.
	if _, err := p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start kvcast: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start kvcast: %w", err)
	}
	found := make(chan [2]string, 1)
	go p.read(stderr, found)
	select {
	case addresses := <-found:
		p.grpc, p.admin = addresses[0], addresses[1]
		return p, nil
	case <-p.ended:
		return nil, fmt.Errorf("start kvcast: it ended:\n%s", p.log.String())
	case <-time.After(startPatience):
		return nil, errors.Join(errors.New("start kvcast: it does not serve"), p.Close())
	}
}

// read keeps what the process logs, gives its addresses once, and waits for its
// end.
func (p *process) read(stderr io.Reader, found chan<- [2]string) {
	defer close(p.ended)
	lines := bufio.NewScanner(stderr)
	var addresses [2]string
	for lines.Scan() {
		p.log.WriteString(lines.Text() + "\n")
		if m := grpcAddress.FindStringSubmatch(lines.Text()); m != nil {
			addresses[0] = m[1]
		}
		if m := adminAddress.FindStringSubmatch(lines.Text()); m != nil {
			addresses[1] = m[1]
			found <- addresses
		}
	}
	_ = p.cmd.Wait() // its status is read from ProcessState
}

// cpu is the time that the process has run.
func (p *process) cpu() (time.Duration, error) { return cpuTime(p.cmd.Process.Pid) }

// Close stops the process, and is an error if it did not end well.
func (p *process) Close() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-p.ended:
	case <-time.After(startPatience):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("stop kvcast: %v:\n%s", p.cmd.ProcessState, p.log.String())
	}
	return nil
}
