package hostile_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pages "github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// openStream opens a stream of the console over a connection of its own from an address, and waits for the first event. The caller closes the connection.
func openStream(ctx context.Context, from net.IP, admin string) (net.Conn, error) {
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}).DialContext(ctx, "tcp", admin)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(roundLimit))
	_, _ = io.WriteString(c, "POST /console/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	answer, err := http.ReadResponse(bufio.NewReader(c), nil) //nolint:bodyclose // it ends with the connection
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	if err == nil {
		_, err = answer.Body.Read(make([]byte, 1))
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, c.SetDeadline(time.Time{})
}

// adminAttack attacks the admin port until the context is done, and calls begun when it has its way.
type adminAttack func(ctx context.Context, t *testing.T, admin string, begun func())

// streamsFrom opens streams of the console from so many addresses until each has all that it gets, and reads nothing.
func streamsFrom(addresses int) adminAttack {
	return func(ctx context.Context, t *testing.T, admin string, begun func()) {
		for i := range pages.MaxPages + addresses {
			c, err := openStream(ctx, net.IPv4(127, 0, 3, byte(1+i%addresses)), admin)
			if err == nil {
				defer func() { _ = c.Close() }()
			} else if i < pages.MaxPages && ctx.Err() == nil {
				t.Errorf("stream %d: %v", i, err)
			}
		}
		begun()
		<-ctx.Done()
	}
}

// requestsOf sends requests for paths again and again over so many connections, and reads the answers, or nothing.
func requestsOf(connections int, reads bool, paths ...string) adminAttack {
	return func(ctx context.Context, _ *testing.T, admin string, begun func()) {
		var group sync.WaitGroup
		defer group.Wait()
		var sent atomic.Int64
		for i := range connections {
			group.Go(func() {
				for ctx.Err() == nil {
					c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 3, 1)}}).DialContext(ctx, "tcp", admin)
					if err != nil {
						continue
					}
					stop := context.AfterFunc(ctx, func() { _ = c.Close() })
					if !reads {
						_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
					}
					_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", paths[i%len(paths)])
					if sent.Add(1) >= int64(connections) {
						begun()
					}
					if reads {
						_, _ = io.Copy(io.Discard, c)
					} else {
						<-ctx.Done()
					}
					stop()
					_ = c.Close()
				}
			})
		}
	}
}

var adminAttacks = map[string]adminAttack{
	"streams of one address":    streamsFrom(1),
	"streams of ten addresses":  streamsFrom(10),
	"scrapes":                   requestsOf(60, true, "/metrics"),
	"scrapes that are not read": requestsOf(60, false, "/metrics"),
	"profiles": requestsOf(60, true, "/debug/pprof/heap?gc=1", "/debug/pprof/goroutine?debug=2", "/debug/pprof/allocs", "/debug/pprof/profile?seconds=1000",
		"/debug/pprof/trace?seconds=1000"),
	"traces that are not read": requestsOf(60, false, "/debug/pprof/trace?seconds=1000"),
}

// TestProbesBesideHostilePages has clients of the admin port that make all requests that their addresses may. Probes, scrapes and the console of another
// address must be answered, and events arrive.
func TestProbesBesideHostilePages(t *testing.T) {
	testclass.Process(t)
	for _, name := range slices.Sorted(maps.Keys(adminAttacks)) {
		t.Run(name, func(t *testing.T) {
			s := harness.Serve(t, harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*"}})
			admin := s.Must(s.Admin())
			h := newHonest(t, s, s.Client())
			h.round()
			publishFleet(t, s)
			took := make(longest)
			trial{
				attack: func(ctx context.Context, begun func()) { adminAttacks[name](ctx, t, admin, begun) },
				round: func() {
					h.round()
					for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
						took.call(t, path, func(ctx context.Context) error {
							_, err := s.Get(ctx, path)
							return err
						})
					}
					took.call(t, "console", func(ctx context.Context) error {
						c, err := openStream(ctx, net.IPv4(127, 0, 0, 1), admin)
						if err == nil {
							err = c.Close()
						}
						return err
					})
				},
				rounds: patientRounds, forget: func() { h.took = nil },
				mostMiB: s.ResidentMiB() + 256, mostLogged: maxLogBytes,
			}.run(t, s)
			t.Logf("batches most %v; probes most %v", slices.Max(h.took), took)
		})
	}
}
