package ingest_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// host is a transport to the engines of a host, which are up or not. An attempt to connect takes a time, and then connects if they
// are up.
type host struct {
	transport.Transport
	began time.Time
	takes time.Duration

	mu          sync.Mutex // guards all below
	up          bool
	connections []*hostConnection
	attempts    []time.Duration // when they began
	connected   []time.Duration
	removed     []time.Duration // when the worker was removed
}

// hostConnection is a transport.Receiver.
type hostConnection struct {
	mu     sync.Mutex // guards all below
	chunks []*transport.Chunk
	end    error
	wake   chan struct{}
}

func (c *hostConnection) push(end error, events ...transport.Event) {
	c.mu.Lock()
	if c.end == nil {
		c.chunks = append(c.chunks, &transport.Chunk{Events: events})
		c.end = end
	}
	c.mu.Unlock()
	c.Wake()
}

func (c *hostConnection) pop() (*transport.Chunk, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.chunks) == 0 {
		return nil, c.end
	}
	chunk := c.chunks[0]
	c.chunks = c.chunks[1:]
	return chunk, nil
}

func (c *hostConnection) Next(deadline func() time.Time) (*transport.Chunk, error) {
	return transport.Await(c.wake, deadline, c.pop)
}

func (c *hostConnection) Wake() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *hostConnection) Interrupt() {
	c.mu.Lock()
	if c.end == nil {
		c.end = transport.ErrInterrupted
	}
	c.mu.Unlock()
	c.Wake()
}

func (c *hostConnection) Recycle(*transport.Chunk) {}
func (c *hostConnection) Close() error             { return nil }

func (h *host) Subscribe(string, string, func(int)) (transport.Receiver, error) {
	c := &hostConnection{wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.attempts = append(h.attempts, time.Since(h.began))
	time.AfterFunc(h.takes, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.up {
			c.push(transport.ErrEnded, transport.Event{Kind: transport.Failed, Conn: 1})
			return
		}
		h.connections = append(h.connections, c)
		h.connected = append(h.connected, time.Since(h.began))
		c.push(nil, transport.Event{Kind: transport.Connected, Conn: 1})
	})
	return c, nil
}

func (h *host) Close() error { return nil }

// set starts or stops the engines. A stop closes their connections.
func (h *host) set(up bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.connections {
		c.push(transport.ErrEnded, transport.Event{Kind: transport.Disconnected, Conn: 1})
	}
	h.up, h.connections = up, nil
}

// AddWorker implements feed.Sink.
func (h *host) AddWorker(feed.Worker) feed.Lane { return noLane{} }

// noLane is the feed.Lane of a worker without batches.
type noLane struct{ feed.Lane }

// RemoveWorker implements feed.Sink.
func (h *host) RemoveWorker(string, feed.RemoveReason) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.removed = append(h.removed, time.Since(h.began))
}

// run reads engines until the function returns. Its time begins when they are connected, and they stop.
func (h *host) run(t *testing.T, c config.Config, sources int, f func()) {
	t.Helper()
	c.ConnectZMQ, c.Silence = config.ZMQNative, -1
	c.Workers = []config.Worker{{Name: "w"}}
	for i := range sources {
		c.Workers[0].Sources = append(c.Workers[0].Sources, config.Source{Connect: fmt.Sprintf("tcp://127.0.0.1:%d", 1+i)})
	}
	in, err := ingest.New(c, h)
	if err != nil {
		t.Fatal(err)
	}
	ingest.SetTransport(in, h)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	h.set(true)
	go func() { done <- in.Run(ctx) }()
	<-time.After(h.takes)
	synctest.Wait()
	h.mu.Lock()
	if len(h.connected) != sources {
		t.Errorf("got %d connections, want %d", len(h.connected), sources)
	}
	h.began, h.attempts, h.connected = time.Now(), nil, nil
	h.mu.Unlock()
	h.set(false)
	f()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestRestartedEngineIsConnectedSoon has engines that are away for some time. Their workers are connected within two seconds.
func TestRestartedEngineIsConnectedSoon(t *testing.T) {
	for _, away := range []time.Duration{0, time.Second, 5 * time.Second, 20 * time.Second, 59 * time.Second, 10 * time.Minute} {
		for _, takes := range []time.Duration{0, time.Second, 5 * time.Second} {
			t.Run(fmt.Sprintf("away %v, attempts take %v", away, takes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := &host{takes: takes}
					h.run(t, config.Config{Grace: time.Hour}, 1, func() {
						<-time.After(away)
						h.set(true)
						const most = 2 * time.Second
						<-time.After(most + takes)
						synctest.Wait()
						h.mu.Lock()
						defer h.mu.Unlock()
						if len(h.connected) != 1 {
							t.Errorf("not connected %v after the start; attempts at %v", most+takes, h.attempts)
						}
						for i, at := range h.attempts[1:] {
							if between := at - h.attempts[i]; between < 800*time.Millisecond || between > max(most, takes) {
								t.Errorf("attempts at %v", h.attempts)
								break
							}
						}
					})
				})
			})
		}
	}
}

// TestGraceTimeEndsWithAnAttempt has engines that are away for nearly the grace time, while the next attempt would be made much
// later, or is in progress.
func TestGraceTimeEndsWithAnAttempt(t *testing.T) {
	const grace = time.Minute
	for _, tt := range []struct {
		name    string
		sources int
		wait    time.Duration // the longest between attempts
		takes   time.Duration
		away    time.Duration // 0: for ever
		inTime  bool          // the last attempt begins before the end of the grace time
	}{
		{"the next attempt is due later", 1, time.Hour, 0, grace - 1, false},
		{"the next attempt is due later, and takes a time", 1, time.Hour, 3 * time.Second, grace + time.Second, false},
		{"an attempt is in progress", 1, 54 * time.Second, 20 * time.Second, grace + time.Second, true},
		{"two sources", 2, time.Hour, 3 * time.Second, grace + time.Second, false},
		{"for ever", 1, time.Hour, 0, 0, false},
		{"for ever, with an attempt that takes a time", 1, time.Hour, 3 * time.Second, 0, false},
		{"for ever, with an attempt in progress", 1, 54 * time.Second, 20 * time.Second, 0, true},
		{"for ever, two sources", 2, time.Hour, 3 * time.Second, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &host{takes: tt.takes}
				h.run(t, config.Config{Grace: grace, ReconnectMin: tt.wait, ReconnectMax: tt.wait}, tt.sources, func() {
					if tt.away > 0 {
						time.AfterFunc(tt.away, func() { h.set(true) })
					}
					<-time.After(grace + 20*time.Second)
					synctest.Wait()
					h.mu.Lock()
					defer h.mu.Unlock()
					if len(h.attempts) < tt.sources {
						t.Fatalf("attempts at %v, connected at %v, removed at %v", h.attempts, h.connected, h.removed)
					}
					last := h.attempts[tt.sources-1]
					if inTime := last < grace; inTime != tt.inTime || last > grace {
						t.Errorf("attempts at %v", h.attempts)
					}
					connected, removed := slices.Repeat([]time.Duration{last + tt.takes}, tt.sources), []time.Duration(nil)
					if tt.away == 0 {
						connected, removed = nil, []time.Duration{last + tt.takes}
					}
					if !slices.Equal(h.connected, connected) || !slices.Equal(h.removed, removed) {
						t.Errorf("connected at %v, removed at %v, want %v and %v; attempts at %v", h.connected, h.removed, connected, removed, h.attempts)
					}
				})
			})
		})
	}
}

// TestEngineIsReadAgainBeforeItsWorkerIsRemoved has a connection that ends, and sockets. The next attempt is due in an hour, and is
// made when the grace time ends.
func TestEngineIsReadAgainBeforeItsWorkerIsRemoved(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		c := worker(config.Source{Connect: "tcp://" + l.Addr().String()})
		c.ConnectZMQ, c.Grace, c.ReconnectMin, c.ReconnectMax = zmq, 10*time.Millisecond, time.Hour, time.Hour
		r := newRecorder(t)
		in, err := ingest.New(c, r)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- in.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			r.ended.Store(true)
		})
		for seq, want := range [][]string{
			{"add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[1]"},
			{"w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: batch 1 +[2]"},
		} {
			engine, err := rawzmtp.Accept(l, zmtp.PUB, harness.Timeout)
			if err != nil {
				t.Fatal(err)
			}
			engine.Message(nil, seqFrame(uint64(seq)), payload(uint64(seq), stored(uint64(seq)+1)))
			if err := engine.Flush(); err != nil {
				t.Fatal(err)
			}
			r.want(want...)
			if err := engine.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestRestartedEngineIsReadAgain has an engine whose port is closed until some attempts to connect have failed.
func TestRestartedEngineIsReadAgain(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		e := newEngine(t)
		endpoint := e.mustBind("tcp://127.0.0.1:*")
		c := worker(config.Source{Connect: endpoint})
		c.ConnectZMQ = zmq
		r := newRecorder(t)
		in, _ := start(t, c, r)
		e.awaitSubscriber("")
		e.publish(0, stored(1))
		r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[1]")
		e.Close()
		harness.WaitFor(t, func() bool {
			s, _ := in.Stats("w")
			return s.ConnectFailures >= 10
		})
		e = newEngine(t)
		bindAgain(t, e, endpoint)
		e.awaitSubscriber("")
		e.publish(0, stored(2))
		r.want("w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: restarted", "w 0/0: batch 0 +[2]")
	})
}
