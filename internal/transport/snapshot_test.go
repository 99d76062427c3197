package transport_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// snapshotServer answers the first request at the returned endpoint by a function.
func snapshotServer(t *testing.T, answer func(c *rawzmtp.Conn, request [][]byte)) (endpoint string) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		c, err := rawzmtp.Accept(l, zmtp.ROUTER, harness.Timeout)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		request, err := c.Receive(harness.Timeout)
		if err != nil {
			t.Error(err)
			return
		}
		answer(c, request)
	}()
	return "tcp://" + l.Addr().String()
}

func newSnapshots() *transport.Requests {
	n := native.New(native.Config{})
	r := transport.NewRequests(n, harness.Timeout, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
	r.Frames = n
	return r
}

// request requests a snapshot, and returns the sizes of its frames.
func request(ctx context.Context, r *transport.Requests, endpoint string) (sizes []int, err error) {
	q := transport.SnapshotRequest{Endpoint: endpoint, Frames: [][]byte{nil, []byte("snapshot")}}
	err = r.Snapshot(ctx, q, func(frame []byte, more bool) (bool, error) {
		sizes = append(sizes, len(frame))
		return !more, nil
	})
	return sizes, err
}

func TestSnapshotOfManyFrames(t *testing.T) {
	large := bytes.Repeat([]byte{1}, transport.MaxPayloadBytes)
	asked := make(chan [][]byte, 1)
	endpoint := snapshotServer(t, func(c *rawzmtp.Conn, request [][]byte) {
		asked <- request
		for range 40 {
			c.More([]byte{2})
		}
		c.Ping()
		c.More(large)
		c.Message(large)
		if err := c.Flush(); err != nil {
			t.Error(err)
		}
		c.Drain()
	})
	got, err := request(harness.Context(t), newSnapshots(), endpoint)
	if err != nil {
		t.Fatal(err)
	}
	var want []int
	for range 40 {
		want = append(want, 1)
	}
	if d := cmp.Diff(append(want, len(large), len(large)), got); d != "" {
		t.Errorf("sizes of frames (-want +got):\n%s", d)
	}
	if d := cmp.Diff([][]byte{{}, []byte("snapshot")}, <-asked); d != "" {
		t.Errorf("request (-want +got):\n%s", d)
	}
}

// A snapshot without an end is ended at the limit, also if its frames are empty.
func TestSnapshotIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name  string
		frame []byte
	}{{"frames of 1 KiB", make([]byte, 1<<10)}, {"empty frames", nil}} {
		t.Run(tt.name, func(t *testing.T) {
			endpoint := snapshotServer(t, func(c *rawzmtp.Conn, _ [][]byte) {
				for {
					for range 100 {
						c.More(tt.frame)
					}
					if c.Flush() != nil {
						return // the connection was closed
					}
				}
			})
			r := newSnapshots()
			r.SnapshotBytes = 1 << 20
			sizes, err := request(harness.Context(t), r, endpoint)
			if !errors.Is(err, transport.ErrSnapshotTooLarge) {
				t.Errorf("got error %v after %d frames, want %v", err, len(sizes), transport.ErrSnapshotTooLarge)
			}
			if limit := 1 << 20 / (len(tt.frame) + 64); len(sizes) != limit {
				t.Errorf("%d frames, want %d", len(sizes), limit)
			}
		})
	}
}

func TestSnapshotThatBreaksOff(t *testing.T) {
	endpoint := snapshotServer(t, func(c *rawzmtp.Conn, _ [][]byte) {
		c.More([]byte{1})
		if err := c.Flush(); err != nil {
			t.Error(err)
		}
	})
	sizes, err := request(harness.Context(t), newSnapshots(), endpoint)
	if err == nil || len(sizes) != 1 {
		t.Errorf("got %d frames and error %v, want 1 and an error", len(sizes), err)
	}
}

func TestSnapshotFrameIsBounded(t *testing.T) {
	endpoint := snapshotServer(t, func(c *rawzmtp.Conn, _ [][]byte) {
		c.More(make([]byte, transport.MaxPayloadBytes+1))
		_ = c.Flush() // it is refused before all of it is sent
		c.Drain()
	})
	sizes, err := request(harness.Context(t), newSnapshots(), endpoint)
	var protocol *zmtp.Error
	if !errors.As(err, &protocol) || protocol.Reason != zmtp.ReasonBytes || len(sizes) != 0 {
		t.Errorf("got %d frames and error %v, want a frame that is too large", len(sizes), err)
	}
}

func TestSnapshotWhereNothingListens(t *testing.T) {
	if _, err := request(harness.Context(t), newSnapshots(), "tcp://127.0.0.1:1"); err == nil {
		t.Error("no error")
	}
}

func TestSnapshotEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	endpoint := snapshotServer(t, func(c *rawzmtp.Conn, _ [][]byte) { cancel(); c.Drain() })
	if _, err := request(ctx, newSnapshots(), endpoint); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want %v", err, context.Canceled)
	}
}

// A silent engine is given up after three times the timeout of replays.
func TestSilentSnapshot(t *testing.T) {
	endpoint := snapshotServer(t, func(c *rawzmtp.Conn, _ [][]byte) { c.Drain() })
	n := native.New(native.Config{})
	r := transport.NewRequests(n, 50*time.Millisecond, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
	r.Frames = n
	began := time.Now()
	_, err := request(harness.Context(t), r, endpoint)
	if !errors.Is(err, transport.ErrReplaySilent) || time.Since(began) < 150*time.Millisecond {
		t.Errorf("got error %v after %v, want %v", err, time.Since(began), transport.ErrReplaySilent)
	}
}

// slowFrames is an engine that sends a frame of a snapshot each pause, without an end.
type slowFrames struct {
	transport.Receiver
	pause time.Duration
}

func (s slowFrames) RequestFrames(string, ...[]byte) (transport.Receiver, error) { return s, nil }

func (s slowFrames) Next(deadline func() time.Time) (*transport.Chunk, error) {
	if left := time.Until(deadline()); left < s.pause {
		time.Sleep(left)
		return nil, os.ErrDeadlineExceeded
	}
	time.Sleep(s.pause)
	return &transport.Chunk{Messages: []transport.Message{{Frames: [][]byte{{1}}, Count: 1, More: true}}}, nil
}

func (slowFrames) Recycle(*transport.Chunk) {}
func (slowFrames) Interrupt()               {}
func (slowFrames) Close() error             { return nil }

// A snapshot may take a minute to be sent, and longer to be applied.
func TestSnapshotTimeIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name           string
		pause, applied time.Duration
		frames         int
	}{
		{"slow engine", 4 * time.Second, 0, 15},
		{"slow engine, frames are applied slowly", 4 * time.Second, time.Minute, 15},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newSnapshots()
				r.Frames = slowFrames{pause: tt.pause}
				frames := 0
				began := time.Now()
				err := r.Snapshot(t.Context(), transport.SnapshotRequest{Endpoint: "tcp://127.0.0.1:1"}, func([]byte, bool) (bool, error) {
					frames++
					time.Sleep(tt.applied)
					return false, nil
				})
				if !errors.Is(err, transport.ErrSnapshotTooSlow) || !strings.Contains(err.Error(), "not complete within 1m0s") {
					t.Errorf("got error %v, want %v", err, transport.ErrSnapshotTooSlow)
				}
				want := time.Minute + time.Duration(tt.frames)*tt.applied
				if took := time.Since(began); frames != tt.frames || took != want {
					t.Errorf("%d frames in %v, want %d in %v", frames, took, tt.frames, want)
				}
			})
		})
	}
}

// endlessFrames is an engine whose snapshots take until ended is closed.
type endlessFrames struct {
	slowFrames
	asked chan struct{}
	ended chan struct{}
}

func (e endlessFrames) RequestFrames(string, ...[]byte) (transport.Receiver, error) {
	e.asked <- struct{}{}
	return e, nil
}

func (e endlessFrames) Next(func() time.Time) (*transport.Chunk, error) {
	<-e.ended
	return nil, transport.ErrEnded
}

// The snapshots of one worker leave slots for those of others.
func TestSnapshotsOfOneWorkerAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSnapshots()
		frames := endlessFrames{asked: make(chan struct{}, 8), ended: make(chan struct{})}
		r.Frames = frames
		errs := make(chan error, 8)
		request := func(worker *semaphore.Weighted) {
			q := transport.SnapshotRequest{Endpoint: "tcp://127.0.0.1:1", Worker: worker}
			go func() { errs <- r.Snapshot(t.Context(), q, nil) }()
			synctest.Wait()
		}
		first, second := semaphore.NewWeighted(transport.MaxWorkerSnapshots), semaphore.NewWeighted(transport.MaxWorkerSnapshots)
		for range 4 {
			request(first)
		}
		if n := len(frames.asked); n != transport.MaxWorkerSnapshots {
			t.Errorf("%d snapshots of one worker are received, want %d", n, transport.MaxWorkerSnapshots)
		}
		request(second)
		if n := len(frames.asked); n != transport.MaxWorkerSnapshots+1 {
			t.Errorf("%d snapshots are received, want one of another worker too", n)
		}
		began := time.Now()
		for range 2 {
			if err := <-errs; !errors.Is(err, transport.ErrReplayBusy) || time.Since(began) > 10*time.Second {
				t.Errorf("got error %v after %v, want %v within 10s", err, time.Since(began), transport.ErrReplayBusy)
			}
		}
		close(frames.ended)
		for range transport.MaxWorkerSnapshots + 1 {
			<-errs
		}
		request(first) // its slots are free again
		if n := len(frames.asked); n != transport.MaxWorkerSnapshots+2 {
			t.Errorf("%d snapshots were received, want another of the first worker", n)
		}
		<-errs
	})
}
