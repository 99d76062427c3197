package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvcast/kvcast/test/harness"
)

// logLines is the number of last lines of the server's log that a failed soak prints.
const logLines = 30

// server is kvcast serve in a separate process.
type server struct {
	*harness.Process
	addr string
}

// startServer builds kvcast, starts it, and waits until it serves.
func startServer(race bool, flags ...string) (*server, error) {
	p, err := harness.StartProcess(harness.ProcessConfig{Race: race, Args: flags})
	if err != nil {
		return nil, err
	}
	s := &server{Process: p}
	if s.addr, err = p.Addr(); err == nil {
		_, err = p.Admin()
	}
	if err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// logFaults returns an error with the errors and crashes in the server's log.
func (s *server) logFaults() error {
	if lines := s.LogFaults(); len(lines) > 0 {
		return fmt.Errorf("the server logged:\n%s", strings.Join(lines, "\n"))
	}
	return nil
}

// logEnd returns the last lines of the log.
func (s *server) logEnd() string {
	lines := s.Log()
	return strings.Join(lines[max(0, len(lines)-logLines):], "\n")
}

// usage contains the resources that the server uses.
type usage struct {
	rss         int64 // bytes
	goroutines  int
	descriptors int
	sockets     int // included in descriptors
}

// String formats the usage for the log of the soak.
func (u usage) String() string {
	return fmt.Sprintf("rss %d MiB, goroutines %d, fds %d of which sockets %d", u.rss>>20, u.goroutines, u.descriptors, u.sockets)
}

// usage measures the server.
func (s *server) usage(ctx context.Context) (u usage, err error) {
	if u.rss, err = harness.ResidentBytes(s.PID()); err != nil {
		return u, err
	}
	if u.descriptors, u.sockets, err = harness.Descriptors(s.PID()); err != nil {
		return u, err
	}
	profile, err := s.Get(ctx, "/debug/pprof/goroutine?debug=1")
	if err != nil {
		return u, err
	}
	const prefix = "goroutine profile: total "
	line, _, _ := strings.Cut(profile, "\n")
	if u.goroutines, err = strconv.Atoi(strings.TrimPrefix(line, prefix)); err != nil {
		return u, fmt.Errorf("count goroutines: %w", err)
	}
	return u, nil
}

// repairs returns the number of complete replays of each worker.
func (s *server) repairs(ctx context.Context) (map[string]float64, error) {
	m, err := s.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	return m.By("kvcast_ingest_replays_done_total", "worker"), nil
}
