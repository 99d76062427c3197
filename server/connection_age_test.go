package server_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// from returns the client's address of a stream's connection, which identifies the connection.
func (s *subscription) from(t testing.TB) string {
	t.Helper()
	p, ok := peer.FromContext(s.stream.Context())
	if !ok {
		t.Fatal("the stream has no connection")
	}
	return p.LocalAddr.String()
}

// TestSubscribersResumeAfterConnectionAge appends entries, with and without pauses, while several connections in
// sequence reach their maximum age.
func TestSubscribersResumeAfterConnectionAge(t *testing.T) {
	for _, tt := range []struct {
		name  string
		pause time.Duration
	}{
		{"never idle", time.Millisecond},
		{"mostly idle", 20 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := overTCP(t, server.Config{
				// On a slow machine, the timers of gRPC and of the stream may differ by up to a quarter of the
				// grace time.
				Limits: server.Limits{MaxConnectionAge: 100 * time.Millisecond, MaxConnectionAgeGrace: 4 * time.Second},
			}, journal.Config{MaxBytes: 1 << 30})
			h.addWorker()
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				pause := time.NewTicker(tt.pause)
				defer pause.Stop()
				for n := uint64(0); ; n++ {
					h.append(n)
					select {
					case <-stop:
						return
					case <-pause.C:
					}
				}
			}()
			c := checker.New(checker.Options{}) // checks all streams in sequence
			req := earliest()
			connections := make(map[string]bool)
			follow := func() {
				began := time.Now()
				s := h.subscribe(c, req)
				if _, err := s.next(); err != nil {
					t.Fatal(err)
				}
				if at := s.from(t); connections[at] {
					t.Errorf("the stream uses the connection from %s, on which an earlier stream has ended", at)
				} else {
					connections[at] = true
				}
				wantStatus(t, s.end(), codes.Unavailable, "MAX_CONNECTION_AGE")
				if took := time.Since(began); took < 100*time.Millisecond {
					t.Errorf("the stream ended after %v, before its connection had the maximum age", took)
				}
				req = after(c.Position())
			}
			for range 2 {
				follow()
			}
			close(stop)
			<-stopped
			for c.Position().GetSeq() < h.Journal.Bounds().Newest {
				follow()
			}
			if got, want := uint64(c.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE)), h.Journal.Bounds().Newest-1; got != want {
				t.Errorf("got %d blocks, want %d", got, want)
			}
		})
	}
}

// TestReplayContinuesDuringGrace reads a replay after the subscriber on the same connection has been ended.
func TestReplayContinuesDuringGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limits := server.Limits{MaxConnectionAge: time.Second, MaxConnectionAgeGrace: 5 * time.Minute, StallTimeout: time.Hour}
		h := inMemory(t, server.Config{Limits: limits}, journal.Config{MaxBytes: 1 << 30})
		h.addWorker()
		h.load(128) // 8 MiB
		stream, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{})
		if err := firstError(t, err, stream.Recv); err != nil {
			t.Fatal(err)
		}
		s := h.subscribe(checker.New(checker.Options{}), latest())
		wantStatus(t, s.end(), codes.Unavailable, "MAX_CONNECTION_AGE")
		last := uint64(0)
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("at %d: %v", last, err)
			}
			last = m.GetPosition().GetSeq()
		}
		if want := h.Journal.Bounds().Newest; last != want {
			t.Errorf("the replay ended at %d, want %d", last, want)
		}
	})
}

// watchedConn calls a function when a read fails.
type watchedConn struct {
	net.Conn
	closed func()
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.closed()
	}
	return n, err
}

// TestGraceEndsReplay does not read a replay until its connection is closed.
func TestGraceEndsReplay(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxConnectionAge: 2 * time.Second, MaxConnectionAgeGrace: 100 * time.Millisecond}}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	h.load(512)
	closed := make(chan struct{})
	var once sync.Once // the client may connect again
	conn := h.Dial(t, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		return &watchedConn{Conn: c, closed: func() { once.Do(func() { close(closed) }) }}, err
	}))
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).Replay(t.Context(), &kvcastv1.ReplayRequest{})
	if err := firstError(t, err, stream.Recv); err != nil {
		t.Fatal(err)
	}
	select {
	case <-closed:
	case <-time.After(harness.Timeout):
		t.Fatal("the connection is still open")
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		t.Error("the replay was complete, so the test had no effect")
	}
}
