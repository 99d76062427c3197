package interop_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/test/harness"
)

// Paths that make peers and make live prepare, and the peers' sources.
const (
	prepared = "../../bin/peers"
	python   = "../../bin/live/venv/bin/python"
	script   = "testdata/peer.py"
)

// peerVariable has the name of a peer as which the test binary runs.
const peerVariable = "KVCAST_INTEROP_PEER"

// goPeers are the peers that are part of the test binary.
var goPeers = map[string]func(arguments) error{}

func TestMain(m *testing.M) {
	if run := goPeers[os.Getenv(peerVariable)]; run != nil {
		a, err := parseArguments(os.Args[1:])
		if err == nil {
			err = run(a)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// arguments are what a peer is started with.
type arguments struct {
	kind, how, endpoint string
	heartbeat           time.Duration
}

func parseArguments(args []string) (arguments, error) {
	ms, err := strconv.Atoi(args[3])
	return arguments{args[0], args[1], args[2], time.Duration(ms) * time.Millisecond}, err
}

// serveLines publishes a message for each line of the input.
func serveLines(endpoint string, publish func(frames [][]byte) error) error {
	fmt.Println(endpoint)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		words := strings.Fields(in.Text())
		frames := [][]byte{[]byte(words[0])}
		for _, word := range words[1:] {
			size, err := strconv.Atoi(word)
			if err != nil {
				return err
			}
			frames = append(frames, frame(size))
		}
		if err := publish(frames); err != nil {
			return err
		}
		fmt.Println("sent")
	}
	return in.Err()
}

var period = func() (b [251]byte) {
	for i := range b {
		b[i] = byte(i)
	}
	return b
}()

// frame returns a frame that peers send.
func frame(size int) []byte { return bytes.Repeat(period[:], size/len(period)+1)[:size] }

// library is an implementation of ZeroMQ.
type library struct {
	name    string
	command []string // without the arguments; empty for the test binary
	can     ability
}

// ability is what a library, or its program here, can do.
type ability uint8

const (
	ipc        ability = 1 << iota // JeroMQ has TCP connections instead of Unix sockets
	reconnects                     // after a connection has ended
	pings                          // sends PINGs
	pongs                          // speaks ZMTP 3.1, so that it gets PINGs
	routes

	// hangs: a connection that it makes is sometimes never read, and never made again. JeroMQ does so
	// up to 0.6.0 (zeromq/jeromq pull request 1022), whatever it connects to.
	hangs
)

var libraries = []library{
	{name: "go-zeromq", can: ipc},
	{name: "libzmq", can: ipc | reconnects | pings | pongs},
	{name: "pyzmq", command: []string{python, script}, can: ipc | reconnects | pings | pongs | routes},
	{name: "jeromq", command: []string{"java", "-XX:TieredStopAtLevel=1", "-cp", prepared + "/java/*:" + prepared + "/java", "Peer"}, can: reconnects | pings | hangs},
	{name: "rust", command: []string{prepared + "/rust/debug/peer"}, can: ipc},
}

// eachLibrary runs a test with each library that can do something and is here, in parallel.
func eachLibrary(t *testing.T, can ability, test func(t *testing.T, l library)) {
	for _, l := range libraries {
		if l.can&can != can {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			if missing := l.missing(); missing != "" {
				t.Skip(missing)
			}
			test(t, l)
		})
	}
}

// missing says why a library cannot be used; empty if it can.
func (l library) missing() string {
	if len(l.command) == 0 {
		if goPeers[l.name] == nil {
			return "this binary is built without cgo"
		}
		return ""
	}
	file := l.command[0]
	if l.name == "jeromq" {
		file = prepared + "/java/Peer.class"
	}
	if _, err := os.Stat(file); err != nil {
		return l.name + " is not here: make peers fetches it, or says why it cannot"
	}
	return ""
}

// peer is a process.
type peer struct {
	t        *testing.T
	cmd      *exec.Cmd
	in       io.WriteCloser
	out      *bufio.Reader
	endpoint string
}

// start starts a peer.
func (l library) start(t *testing.T, a arguments) *peer {
	t.Helper()
	command := l.command
	if len(command) == 0 {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		command = []string{self}
	}
	args := []string{a.kind, a.how, a.endpoint, strconv.FormatInt(a.heartbeat.Milliseconds(), 10)}
	cmd := exec.Command(command[0], slices.Concat(command[1:], args)...) //nolint:noctx // it is killed
	log := new(bytes.Buffer)
	cmd.Stderr = log
	if len(l.command) == 0 {
		cmd.Env = append(os.Environ(), peerVariable+"="+l.name, "GORACE=atexit_sleep_ms=0")
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("output of the peer:\n%s", log)
		}
	})
	p.endpoint = p.line()
	return p
}

// line reads a line.
func (p *peer) line() string {
	p.t.Helper()
	stop := time.AfterFunc(harness.Timeout, func() { _ = p.cmd.Process.Kill() })
	defer stop.Stop()
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.t.Fatalf("read from the peer: %v", err)
	}
	return strings.TrimSpace(line)
}

// publish has the peer publish a message.
func (p *peer) publish(first string, sizes ...int) {
	p.t.Helper()
	for _, size := range sizes {
		first += " " + strconv.Itoa(size)
	}
	if _, err := io.WriteString(p.in, first+"\n"); err != nil {
		p.t.Fatal(err)
	}
	if got := p.line(); got != "sent" {
		p.t.Fatalf("the peer says %q", got)
	}
}

// kill kills the process with SIGKILL.
func (p *peer) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait() // returns an error, since the process was killed
	}
}

// ipcEndpoint returns an endpoint with a short path.
func ipcEndpoint(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return "ipc://" + filepath.Join(dir, "s")
}
