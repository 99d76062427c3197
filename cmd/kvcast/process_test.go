package main_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// program is kvcast, built once for all tests, with the race detector.
var program string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvcast-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// A program with the race detector waits a second before it exits, by default.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	program = filepath.Join(dir, "kvcast")
	build := exec.CommandContext(context.Background(), "go", "build", "-race", "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build kvcast: %v\n%s", err, out)
		return 1
	}
	status := m.Run()
	if status == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 1
		}
	}
	return status
}

// patience is after which a test gives up waiting for what comes within a second: also
// on a machine that is a hundred times slower.
const patience = 2 * time.Minute

// result is how a command ended.
type result struct {
	out    string
	err    string
	status int
}

// kvcast runs a command that ends by itself.
func kvcast(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run kvcast %v: %v", args, err)
	}
	return result{out: out.String(), err: errOut.String(), status: cmd.ProcessState.ExitCode()}
}

// process is a kvcast that runs until it is stopped.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	ended chan struct{}
	once  sync.Once

	mu   sync.Mutex // guards all below
	log  bytes.Buffer
	more chan struct{} // closed when the log grows
	eof  bool
}

// serve starts kvcast serve on ports of its own.
func serve(t *testing.T, args ...string) *process {
	t.Helper()
	return serveBy(t, program, args...)
}

// serveBy does so with another build of kvcast.
func serveBy(t *testing.T, program string, args ...string) *process {
	t.Helper()
	args = append([]string{"serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, args...)
	p := &process{t: t, cmd: exec.Command(program, args...), ended: make(chan struct{}), more: make(chan struct{})} //nolint:noctx // it is stopped by a signal
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go p.read(stderr)
	t.Cleanup(func() {
		if status := p.stop(); status != 0 || t.Failed() {
			t.Errorf("serve ended with status %d:\n%s", status, p.text())
		}
	})
	return p
}

// read collects what the process logs, and waits for its end.
func (p *process) read(stderr io.Reader) {
	defer close(p.ended)
	lines := bufio.NewReader(stderr)
	for {
		line, err := lines.ReadString('\n')
		p.mu.Lock()
		p.log.WriteString(line)
		p.eof = err != nil
		close(p.more)
		p.more = make(chan struct{})
		p.mu.Unlock()
		if err != nil {
			_ = p.cmd.Wait() // its status is read from ProcessState
			return
		}
	}
}

// logged waits until the log matches, and returns what the pattern captures.
func (p *process) logged(pattern string) string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	for {
		p.mu.Lock()
		m, more, eof := re.FindStringSubmatch(p.log.String()), p.more, p.eof
		p.mu.Unlock()
		if m != nil {
			return m[len(m)-1]
		}
		if eof {
			p.t.Fatalf("serve ended before it logged %s:\n%s", pattern, p.text())
		}
		select {
		case <-more:
		case <-time.After(patience):
			p.t.Fatalf("serve has not logged %s:\n%s", pattern, p.text())
		}
	}
}

func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

func (p *process) addr() string     { return p.logged(`msg=serving grpc=(\S+)`) }
func (p *process) admin() string    { return p.logged(`msg=serving admin=(\S+)`) }
func (p *process) endpoint() string { return p.logged(`msg=listening endpoint=(\S+)`) }

// stop asks the process to end, and returns its exit status.
func (p *process) stop() int {
	p.once.Do(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
		select {
		case <-p.ended:
		case <-time.After(patience):
			_ = p.cmd.Process.Kill()
			<-p.ended
			p.t.Errorf("serve did not end within %v of SIGTERM", patience)
		}
	})
	return p.cmd.ProcessState.ExitCode()
}

// client connects to the process.
func (p *process) client() kvcastv1.RouterEventServiceClient {
	p.t.Helper()
	conn, err := grpc.NewClient(p.addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			p.t.Errorf("close client: %v", err)
		}
	})
	return kvcastv1.NewRouterEventServiceClient(conn)
}
