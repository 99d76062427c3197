package main_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// clientsFolder has the clients, as make clients prepares them.
const clientsFolder = "../../bin/clients"

// example is a client in a separate process.
type example struct {
	t      *testing.T
	cmd    *exec.Cmd
	lines  *bufio.Scanner
	errOut lockedBuffer
}

// lockedBuffer buffers a process's standard error.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (s *lockedBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *lockedBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// runExample starts a client. It skips the test if make clients has not prepared the client.
func runExample(t *testing.T, program string, args ...string) *example {
	t.Helper()
	return runExampleWith(t, nil, program, args...)
}

// runExampleWith starts a client with a standard input.
func runExampleWith(t *testing.T, stdin io.Reader, program string, args ...string) *example {
	t.Helper()
	if _, err := os.Stat(program); err != nil {
		t.Skipf("%s is not here: make clients prepares it", program)
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	t.Cleanup(cancel)
	e := &example{t: t, cmd: exec.CommandContext(ctx, program, args...)}
	e.cmd.Stdin, e.cmd.Stderr = stdin, &e.errOut
	out, err := e.cmd.StdoutPipe()
	if err == nil {
		err = e.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	e.lines = bufio.NewScanner(out)
	t.Cleanup(func() { e.kill() })
	return e
}

// next returns the next line.
func (e *example) next() string {
	e.t.Helper()
	if !e.lines.Scan() {
		e.kill()
		e.t.Fatalf("the client ended: %v\n%s", e.lines.Err(), &e.errOut)
	}
	return e.lines.Text()
}

// kill kills the client, and returns the complete lines that it printed.
func (e *example) kill() (lines []string) {
	if e.cmd.ProcessState != nil {
		return nil
	}
	_ = e.cmd.Process.Kill()
	for e.lines.Scan() {
		lines = append(lines, e.lines.Text())
	}
	_ = e.cmd.Wait() // returns an error, since the process was killed
	return lines
}

// end waits until the client exits.
func (e *example) end() {
	e.t.Helper()
	for e.lines.Scan() {
		continue
	}
	if err := e.cmd.Wait(); err != nil {
		e.t.Errorf("the client ended with %v\n%s", err, &e.errOut)
	}
}

// TestClientInPython kills examples/python while it follows a stream, and restarts it at its position. The server limits
// the age of connections.
func TestClientInPython(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	script, err := filepath.Abs("../../examples/python/subscribe.py")
	if err != nil {
		t.Fatal(err)
	}
	python := clientsFolder + "/python/venv/bin/python"
	p, s := engine(t, "--subscribers-max-connection-age", "1s", "--subscribers-max-connection-age-grace", "1s")
	block := uint64(0)
	publishSome := func() {
		for range 20 {
			block++
			publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{block}, Tokens: []uint32{1, 2}, BlockSize: 2})
		}
	}
	line := regexp.MustCompile(`^(\S+:(\d+)) (w stored|w worker_added|snapshot of 1 workers, \d+ blocks)$`)
	at, last, snapshots := "", 0, 0
	take := func(text string) {
		t.Helper()
		m := line.FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("got line %q", text)
		}
		seq, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(m[3], "snapshot") {
			snapshots++
		} else if seq != last+1 {
			t.Fatalf("entry %d after %d", seq, last)
		}
		at, last = m[1], seq
	}
	publishSome()
	for range 3 {
		args := []string{script, "--addr", s.Address()}
		if at != "" {
			args = append(args, "--after", at)
		}
		e := runExample(t, python, args...)
		// Continue until the connection has reached its maximum age, and the client has resumed.
		for !strings.Contains(e.errOut.String(), "; resuming") || last < int(block) {
			if last >= int(block) {
				publishSome()
			}
			take(e.next())
		}
		publishSome()
		// Ignore a line truncated by the kill.
		for _, text := range e.kill() {
			if line.MatchString(text) {
				take(text)
			}
		}
		publishSome()
	}
	if snapshots != 1 {
		t.Errorf("got %d snapshots, want only the first", snapshots)
	}
	s.AwaitSample(fmt.Sprintf(`kvcast_ingest_batches_total{worker="w"} %d`, block))
	wrong := runExample(t, python, script, "--addr", s.Address(), "--after", "another:1", "--count", "1")
	if got, want := wrong.next(), fmt.Sprintf("snapshot of 1 workers, %d blocks", block); !strings.HasSuffix(got, want) {
		t.Errorf("after a position of another epoch: got %q, want a %s", got, want)
	}
	ahead := runExample(t, python, script, "--addr", s.Address(), "--after", fmt.Sprintf(":%d", block+1000))
	for ahead.lines.Scan() {
		t.Errorf("after a position that is ahead: got %q", ahead.lines.Text())
	}
	var exit *exec.ExitError
	if err := ahead.cmd.Wait(); !errors.As(err, &exit) || !strings.Contains(ahead.errOut.String(), "OUT_OF_RANGE") {
		t.Errorf("after a position that is ahead: %v\n%s", err, &ahead.errOut)
	}
}

// TestNATSReaderClientInPython reads the journal of a server from its NATS server by examples/python/nats_reader.py.
func TestNATSReaderClientInPython(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	script, err := filepath.Abs("../../examples/python/nats_reader.py")
	if err != nil {
		t.Fatal(err)
	}
	url := natstest.Start(t)
	const name = "a worker.*>é"
	p := publisherOf(t, simulator.SocketConfig{})
	// Without a replay socket: batches that a replay returns before the first live one are unproved, which is an event more.
	s := serve(t, "--journal", url, "--worker", "name="+name+",connect="+p.Endpoint())
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	for _, block := range []uint64{1, 2, 3} {
		publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{block}, Tokens: []uint32{1, 2}, BlockSize: 2})
	}
	s.AwaitSample(fmt.Sprintf("kvcast_ingest_batches_total{worker=%q} 3", name))
	python := clientsFolder + "/python/venv/bin/python"
	all := runExample(t, python, script, "--servers", url, "--count", "4")
	want := []string{" worker_added", " stored", " stored", " stored"} // after the record of the owner, which has no events
	at := ""
	for i, kind := range want {
		line := all.next()
		if !strings.HasSuffix(line, fmt.Sprintf(":%d %s%s", i+2, name, kind)) {
			t.Errorf("got %q, want entry %d%s", line, i+2, kind)
		}
		if i == 1 {
			at, _, _ = strings.Cut(line, " ")
		}
	}
	all.end()
	rest := runExample(t, python, script, "--servers", url, "--after", at, "--count", "2")
	for _, seq := range []string{":4 ", ":5 "} {
		if line := rest.next(); !strings.Contains(line, seq) {
			t.Errorf("after %s: got %q, want%s", at, line, seq)
		}
	}
	rest.end()
}

// serveTwoPrefixes starts a server with the workers a and b of the model m. The worker b holds the blocks of the tokens 1, 2
// and 3, 4, and a only the first.
func serveTwoPrefixes(t *testing.T) *process {
	t.Helper()
	a, b := publisherOf(t, simulator.SocketConfig{}), publisherOf(t, simulator.SocketConfig{})
	publish(t, a, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: []uint32{1, 2}, BlockSize: 2})
	publish(t, b, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2})
	s := serve(t,
		"--worker", "name=a,model=m,endpoint=10.0.0.5:8000,connect="+a.Endpoint()+",replay="+a.ReplayEndpoint(),
		"--worker", "name=b,model=m,endpoint=10.0.0.6:8000,connect="+b.Endpoint()+",replay="+b.ReplayEndpoint())
	for name, p := range map[string]*simulator.Publisher{"a": a, "b": b} {
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		if err := p.WaitSubscribed(ctx, 1); err != nil {
			t.Fatal(err)
		}
		publish(t, p) // a live batch shows that the replay socket is the engine's
		s.AwaitSample(`kvcast_ingest_batches_total{worker="` + name + `"} 2`)
	}
	return s
}

// TestRouterClientInPython routes prompts by examples/python/route.py, also while the server does not answer.
func TestRouterClientInPython(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	script, err := filepath.Abs("../../examples/python/route.py")
	if err != nil {
		t.Fatal(err)
	}
	s := serveTwoPrefixes(t)
	prompts, send := io.Pipe()
	e := runExampleWith(t, prompts, clientsFolder+"/python/venv/bin/python", script, "--addr", s.Address(), "--model", "m", "--timeout", "60")
	route := func(prompt, want string) {
		t.Helper()
		if _, err := fmt.Fprintln(send, prompt); err != nil {
			t.Fatal(err)
		}
		if got := e.next(); got != want {
			t.Errorf("%s: got %q, want %q", prompt, got, want)
		}
	}
	route("[1, 2, 3, 4, 5]", "b 10.0.0.6:8000 4 of 5 tokens")
	route("[1, 2, 9, 9]", "a 10.0.0.5:8000 2 of 4 tokens") // of equal prefixes, the worker with fewer requests
	route("[9]", "a 10.0.0.5:8000 0 of 1 tokens")
	route("[9]", "b 10.0.0.6:8000 0 of 1 tokens")
	s.End()
	route("[1, 2, 3, 4, 5]", "a 10.0.0.5:8000 0 of 5 tokens")
	if err := send.Close(); err != nil {
		t.Error(err)
	}
	e.end()
	if got := e.errOut.String(); !strings.Contains(got, "; routing without it") {
		t.Errorf("without a server: got %q", got)
	}
}

// TestClientInRust checks that a tonic client gets its stream from an idle, empty server, which sends nothing else for an hour: tonic waits for
// the headers before it returns the stream.
func TestClientInRust(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--subscribers-progress", "1h")
	e := runExample(t, clientsFolder+"/rust/debug/examples/subscribe", s.Address())
	for _, want := range []string{"a snapshot begins: discard the state", "resume after "} {
		if got := e.next(); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	got := kvcast(t, nil, "simulate", "--connect", s.Endpoint(), "--wait", "--batches", "5", "--rate", "0", "--name", "kv@w@m")
	if got.status != 0 {
		t.Fatalf("simulate: status %d: %s", got.status, got.err)
	}
	for _, want := range []string{"entry 1 of worker ", "resume after "} {
		if got := e.next(); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	e.kill()
}

// TestRouterClientInRust matches prompts in a view, by an example of clients/rust.
func TestRouterClientInRust(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	s := serveTwoPrefixes(t)
	e := runExampleWith(t, strings.NewReader("1 2 3 4 5\n9\n"), clientsFolder+"/rust/debug/examples/route", s.Address(), "m")
	for _, want := range []string{"b rank 0 has 4 tokens (TRUST_EXACT)", "no worker has a block of the prompt"} {
		if got := e.next(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	e.end()
}
