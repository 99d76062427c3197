package ingest_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// listening returns the configuration of a listener.
func listening(zmq config.ZMQ, bind string) config.Config {
	return config.Config{ListenZMQ: zmq, Listeners: []config.Listener{{Bind: bind}}}
}

// wantRefused fails the test unless a listener accepts a connection and closes it.
func wantRefused(t *testing.T, network, address string) {
	t.Helper()
	c, err := (&net.Dialer{Timeout: harness.Timeout}).DialContext(t.Context(), network, address)
	if errors.Is(err, syscall.ECONNRESET) { // closed before the dialer has noticed that it was accepted
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(harness.Timeout))
	n, err := c.Read(make([]byte, 1))
	if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes, error %v, want a closed connection", n, err)
	}
}

func TestSuspendedListenerRefusesEngines(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		for _, tt := range []struct{ name, network, bind string }{
			{"tcp", "tcp", "tcp://127.0.0.1:*"},
			{"ipc", "unix", "ipc://" + t.TempDir() + "/socket"},
		} {
			t.Run(tt.name, func(t *testing.T) {
				r := newRecorder(t)
				c, registry := listening(zmq, tt.bind), prometheus.NewRegistry()
				c.Metrics = registry
				in, _ := start(t, c, r)
				endpoint := in.Endpoints()[0]
				address := strings.TrimPrefix(strings.TrimPrefix(endpoint, "tcp://"), "ipc://")
				e := newEngine(t)
				if err := e.Connect(endpoint); err != nil {
					t.Fatal(err)
				}
				e.awaitSubscriber("")
				e.send("kv@p@m", seqFrame(0), payload(0))
				r.want("add p model m block_size 0 ranks []", "p 0/0: batch 0")
				for seq := uint64(1); seq < 4; seq++ {
					in.SuspendListeners()
					in.SuspendListeners() // changes nothing
					wantMetrics(t, registry, map[string]float64{"listeners_suspended": 1})
					awaitState(t, in, 0, ingest.SourceConnecting)
					wantRefused(t, tt.network, address)
					if l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address); tt.network == "tcp" && !errors.Is(err, syscall.EADDRINUSE) {
						t.Errorf("the port of a suspended listener is free: %v, %v", l, err)
					}
					if err := errors.Join(in.ResumeListeners(), in.ResumeListeners()); err != nil {
						t.Fatal(err)
					}
					wantMetrics(t, registry, map[string]float64{"listeners_suspended": 0})
					e.awaitSubscriber("")
					e.send("kv@p@m", seqFrame(seq), payload(seq))
					r.want("p 0/0: gap possible_restart 0-0, 0 missed", fmt.Sprintf("p 0/0: batch %d", seq)) // it has no replay socket
				}
				r.wantNone()
			})
		}
	})
}

func TestSuspendedListenerEnds(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		in, stop := start(t, listening(zmq, "tcp://127.0.0.1:*"), newRecorder(t))
		in.SuspendListeners()
		stop()
		in.SuspendListeners()
		if err := in.ResumeListeners(); err != nil {
			t.Error(err)
		}
	})
}

// blockedSink is a Sink whose lanes block until it is released.
type blockedSink struct {
	blocked func()
	release chan struct{}
}

func (s *blockedSink) AddWorker(feed.Worker) feed.Lane        { return s }
func (s *blockedSink) RemoveWorker(string, feed.RemoveReason) {}
func (s *blockedSink) Restarted(feed.Restart)                 {}
func (s *blockedSink) Gap(feed.Gap)                           {}
func (s *blockedSink) Batch(*feed.Batch)                      { s.blocked(); <-s.release }

// TestSuspendedListenerClosesConnectionsThatAreNotRead has an engine whose messages are not processed, as while the journal stores
// nothing. A listener that waited for them would keep the engine until the journal stores again.
func TestSuspendedListenerClosesConnectionsThatAreNotRead(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		blocked := make(chan struct{})
		s := &blockedSink{blocked: sync.OnceFunc(func() { close(blocked) }), release: make(chan struct{})}
		in, _ := start(t, listening(zmq, "tcp://127.0.0.1:*"), s)
		t.Cleanup(func() { close(s.release) })
		address := strings.TrimPrefix(in.Endpoints()[0], "tcp://")
		c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, address, harness.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			for seq := uint64(0); ; seq++ {
				c.Message([]byte("kv@p@m"), seqFrame(seq), payload(seq))
				if c.Flush() != nil {
					return
				}
			}
		}()
		for _, done := range []chan struct{}{blocked, closed} {
			if done == closed {
				in.SuspendListeners()
			}
			select {
			case <-done:
			case <-time.After(harness.Timeout):
				t.Fatal("the connection is open")
			}
		}
		wantRefused(t, "tcp", address)
		if err := in.ResumeListeners(); err != nil {
			t.Fatal(err)
		}
		again, err := rawzmtp.Dial(t.Context(), zmtp.PUB, address, harness.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		_ = again.Close()
	})
}
