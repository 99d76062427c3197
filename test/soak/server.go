package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// serverEnds is how long the server may take to end, or to answer: much longer than it
// does, as the machine may be slow.
const serverEnds = 2 * time.Minute

// server is a kvcast serve in a process of its own.
type server struct {
	dir   string
	cmd   *exec.Cmd
	addr  string
	admin string
	read  chan struct{} // closed when its log has ended
	once  sync.Once
	end   error

	mu     sync.Mutex
	last   []string // lines of the log, guarded by mu
	errors []string // those of level ERROR, guarded by mu
}

// startServer builds kvcast and starts it.
func startServer(ctx context.Context, race bool, flags ...string) (_ *server, err error) {
	dir, err := os.MkdirTemp("", "kvcast-soak-")
	if err != nil {
		return nil, err
	}
	s := &server{dir: dir, read: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	program := filepath.Join(dir, "kvcast")
	build := []string{"build", "-o", program}
	if race {
		build = append(build, "-race")
	}
	if out, err := exec.CommandContext(ctx, "go", append(build, "github.com/kvcast/kvcast/cmd/kvcast")...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build kvcast: %w\n%s", err, out)
	}
	// It ends with its standard input, so also when this process is killed.
	s.cmd = exec.Command(program, append([]string{"--end-with-stdin", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, flags...)...) //nolint:noctx // it is stopped by a signal
	if _, err := s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	log, err := s.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	serving := make(chan struct{})
	go s.follow(log, serving)
	select {
	case <-serving:
		return s, nil
	case <-s.read:
		err = errors.New("it ended early")
	case <-time.After(2 * time.Minute):
		err = errors.New("it does not serve")
	case <-ctx.Done():
		err = ctx.Err()
	}
	return nil, errors.Join(fmt.Errorf("start kvcast: %w\n%s", err, s.tail()), s.stop())
}

var servingLine = regexp.MustCompile(`msg=serving (grpc|admin)=(\S+)`)

// follow reads the log, and closes serving when both addresses are known.
func (s *server) follow(log io.Reader, serving chan<- struct{}) {
	defer close(s.read)
	lines := bufio.NewReader(log)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		s.line(strings.TrimSpace(line))
		m := servingLine.FindStringSubmatch(line)
		switch {
		case m == nil:
		case m[1] == "grpc":
			s.addr = m[2]
		default:
			s.admin = m[2]
			close(serving)
		}
	}
}

func (s *server) line(line string) {
	const keep = 30
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last = append(s.last, line); len(s.last) > keep {
		s.last = s.last[1:]
	}
	// What the runtime and the race detector say of a fault is in no log's form.
	if wrong := strings.Contains(line, "level=ERROR") || !strings.HasPrefix(line, "time="); wrong && len(s.errors) < keep {
		s.errors = append(s.errors, line)
	}
}

// tail is the end of the log.
func (s *server) tail() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.last, "\n")
}

// wrong is what the log says that should not be there.
func (s *server) wrong() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.errors) == 0 {
		return nil
	}
	return fmt.Errorf("the server logged:\n%s", strings.Join(s.errors, "\n"))
}

// stop asks the server to end. It is an error if it does not, or not well.
func (s *server) stop() error {
	s.once.Do(func() {
		_ = s.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
		late := time.AfterFunc(serverEnds, func() { _ = s.cmd.Process.Kill() })
		<-s.read
		err := s.cmd.Wait()
		if err != nil {
			err = fmt.Errorf("the server's end: %w", err)
		}
		if !late.Stop() {
			err = fmt.Errorf("the server did not end within %v of SIGTERM", serverEnds)
		}
		s.end = errors.Join(err, os.RemoveAll(s.dir))
	})
	return s.end
}

// usage is what the server takes.
type usage struct {
	rss         int64 // bytes
	goroutines  int
	descriptors int
	sockets     int // of the descriptors
}

// String writes it as the log has it.
func (u usage) String() string {
	return fmt.Sprintf("rss %d MiB, goroutines %d, fds %d of which sockets %d", u.rss>>20, u.goroutines, u.descriptors, u.sockets)
}

// usage measures the server.
func (s *server) usage(ctx context.Context) (u usage, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("measure the server: %w", err)
		}
	}()
	proc := fmt.Sprintf("/proc/%d", s.cmd.Process.Pid)
	status, err := os.ReadFile(proc + "/status")
	if err != nil {
		return u, err
	}
	if _, err := fmt.Sscanf(field(string(status), "VmRSS:"), "%d kB", &u.rss); err != nil {
		return u, err
	}
	u.rss <<= 10
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return u, err
	}
	for _, fd := range fds {
		to, err := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		if err != nil {
			continue // it was closed meanwhile
		}
		u.descriptors++
		if strings.HasPrefix(to, "socket:") {
			u.sockets++
		}
	}
	profile, err := s.get(ctx, "/debug/pprof/goroutine?debug=1")
	if err != nil {
		return u, err
	}
	u.goroutines, err = strconv.Atoi(field(string(profile), "goroutine profile: total"))
	return u, err
}

// field is the rest of the line that begins with a name.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// get asks the admin port.
func (s *server) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, serverEnds)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.admin+path, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true // what is measured is not to be what measures
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(res.Body)
	return body, errors.Join(err, res.Body.Close())
}

// repairs returns, of each worker, the replays that brought all there is.
func (s *server) repairs(ctx context.Context) (map[string]float64, error) {
	text, err := s.get(ctx, "/metrics")
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	all := make(map[string]float64)
	for line := range bytes.Lines(text) {
		if worker, value, ok := strings.Cut(string(line), "} "); ok && strings.HasPrefix(worker, "kvcast_ingest_replays_done_total{") {
			if all[worker], err = strconv.ParseFloat(strings.TrimSpace(value), 64); err != nil {
				return nil, fmt.Errorf("read metrics: %w", err)
			}
		}
	}
	return all, nil
}
