package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// child is a kvcast in a process of its own, ended by its context.
type child struct {
	what  string
	cmd   *exec.Cmd
	lines chan string   // what it prints; closed at its end
	log   *bytes.Buffer // what it said is wrong; to be read once it has ended
}

// childGrace is how long a child has to end after it was asked to.
const childGrace = 10 * time.Second

// start runs this program with other arguments. Its standard output, or its
// log, comes line by line.
func start(ctx context.Context, self, what string, log bool, args ...string) (*child, error) {
	c := &child{what: what, lines: make(chan string, 1024), log: new(bytes.Buffer)}
	// A child ends with its standard input, so also when this process is killed.
	c.cmd = exec.CommandContext(ctx, self, append([]string{"--end-with-stdin"}, args...)...)
	c.cmd.Cancel = func() error { return c.cmd.Process.Signal(syscall.SIGTERM) }
	c.cmd.WaitDelay = childGrace
	var out io.ReadCloser
	var err error
	if log {
		out, err = c.cmd.StderrPipe()
	} else {
		c.cmd.Stderr = c.log
		out, err = c.cmd.StdoutPipe()
	}
	if err == nil {
		_, err = c.cmd.StdinPipe() // open until Wait closes it
	}
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", what, err)
	}
	go func() {
		defer close(c.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case c.lines <- s.Text():
			default: // the demo reads only the first lines of a log
			}
		}
	}()
	return c, nil
}

// next waits for a line that matches, and returns what the pattern captures.
func (c *child) next(ctx context.Context, pattern *regexp.Regexp) (string, error) {
	last := ""
	for {
		select {
		case line, ok := <-c.lines:
			if !ok {
				_ = c.cmd.Wait() // whatever its status, it should not have ended
				return "", fmt.Errorf("%s ended early: %s", c.what, strings.TrimPrefix(last+strings.TrimSpace(c.log.String()), "kvcast: "))
			}
			if m := pattern.FindStringSubmatch(line); m != nil {
				return m[len(m)-1], nil
			}
			last = line
		case <-ctx.Done():
			return "", fmt.Errorf("wait for %s: %w", c.what, ctx.Err())
		}
	}
}

// wait waits for the child's end, which its context has asked for.
func (c *child) wait() error {
	for range c.lines { // to its end
	}
	if c.cmd.ProcessState != nil {
		return nil // it ended early, which has been told
	}
	err := c.cmd.Wait()
	if err == nil || errors.Is(err, context.Canceled) {
		return nil
	}
	return fmt.Errorf("%s: %w %s", c.what, err, c.log)
}

var anyLine = regexp.MustCompile(`.*`)

// simulated is an engine of the demo.
type simulated struct {
	*child
	about engineStarted
}

func startSimulated(ctx context.Context, self string, i int) (*simulated, error) {
	name := fmt.Sprintf("engine-%d", i)
	c, err := start(ctx, self, name, false, "simulate", "-o", "json", "--name", "engine", "--bind", "tcp://127.0.0.1:*",
		"--replay", "tcp://127.0.0.1:*", "--faults", demoFaults, "--stay", // to replay what it lost last
		"--wait", "--seed", strconv.Itoa(i+1), "--blocks", strconv.Itoa(demoBlocks),
		"--batches", strconv.Itoa(demoBatches), "--rate", strconv.Itoa(demoRate))
	if err != nil {
		return nil, err
	}
	s := &simulated{child: c}
	line, err := c.next(ctx, anyLine)
	if err == nil {
		err = json.Unmarshal([]byte(line), &s.about)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	s.about.Engine = name
	return s, nil
}

func (s *simulated) name() string     { return s.about.Engine }
func (s *simulated) endpoint() string { return s.about.Endpoint }
func (s *simulated) replay() string   { return s.about.Replay }

// ended waits until the engine has published all its batches, and returns what
// it holds then.
func (s *simulated) ended(ctx context.Context) (e engineEnded, err error) {
	line, err := s.next(ctx, anyLine)
	if err == nil {
		err = json.Unmarshal([]byte(line), &e)
	}
	e.Engine = s.name()
	return e, err
}

// served is the server of the demo.
type served struct {
	*child
	addr string
}

var servingLine = regexp.MustCompile(`msg=serving grpc=(\S+)|level=ERROR.*`)

func startServed(ctx context.Context, self, listen string, engines []*simulated) (*served, error) {
	args := []string{"serve", "--listen", listen, "--admin", "",
		"--auth-tokens", "", "--tls-cert", "", "--tls-key", ""} // whatever the variables say
	for _, e := range engines {
		args = append(args, "--worker", "name="+e.name()+",model=demo,block_size=16,connect="+e.endpoint()+",replay="+e.replay())
	}
	c, err := start(ctx, self, "kvcast serve", true, args...)
	if err != nil {
		return nil, err
	}
	s := &served{child: c}
	s.addr, err = c.next(ctx, servingLine)
	return s, err
}

// stop waits for all processes, which have been asked to end.
func (d *demo) stop() error {
	var errs []error
	for _, e := range d.engines {
		errs = append(errs, e.wait())
	}
	if d.server != nil {
		errs = append(errs, d.server.wait())
	}
	return errors.Join(errs...)
}
