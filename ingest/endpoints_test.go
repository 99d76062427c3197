package ingest_test

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
)

// Both sockets of an engine are connected at every kind of address, and reconnected after a restart
// of the engine.
func TestEndpointsOfEveryKind(t *testing.T) {
	t.Parallel()
	sockets := t.TempDir()
	tests := []struct {
		name         string
		bind, replay string
		as           func(bound string) string // returns the configured endpoint
	}{
		{name: "ipc", bind: "ipc://" + filepath.Join(sockets, "pub"), replay: "ipc://" + filepath.Join(sockets, "replay")},
		{name: "IPv6", bind: "tcp://[::1]:*", replay: "tcp://[::1]:*"},
		{name: "IPv4", bind: "tcp://127.0.0.1:*", replay: "tcp://127.0.0.1:*"},
		{name: "name", bind: "tcp://127.0.0.1:*", replay: "tcp://127.0.0.1:*", as: func(s string) string {
			return strings.Replace(s, "127.0.0.1", "localhost", 1)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
				Endpoint: tt.bind, Replay: tt.replay, Mode: simulator.ModeBind,
			}})
			if tt.as == nil {
				tt.as = func(s string) string { return s }
			}
			v := newView()
			c.store(c.Drop, 3)
			start(t, worker(config.Source{Connect: tt.as(c.Endpoint()), Replay: tt.as(c.ReplayEndpoint())}), v)
			c.must(c.WaitSubscribed(harness.Context(t), 1))
			v.awaitBlocks(t, c.blocks)
			c.store(c.Drop, 3)
			c.store(c.Publish, 1)
			v.awaitBlocks(t, c.blocks)
			c.restart()
			c.must(c.RestartProcess(0))
			c.store(c.Drop, 2)
			c.must(c.WaitSubscribed(harness.Context(t), 1))
			c.store(c.Publish, 1)
			v.awaitBlocks(t, c.blocks)
			v.mu.Lock()
			defer v.mu.Unlock()
			if d := cmp.Diff(map[string]int{"added": 1, "restarted": 1}, v.reported); d != "" {
				t.Errorf("reported (-want +got):\n%s", d)
			}
		})
	}
}

// newMute returns an endpoint that accepts connections and sends nothing.
func newMute(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var taken []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			taken = append(taken, c)
		}
		for _, c := range taken {
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	return "tcp://" + l.Addr().String()
}

// A peer that accepts connections and does not speak ZMTP does not delay other engines.
func TestPublisherWithoutZMTPDelaysNoOther(t *testing.T) {
	t.Parallel()
	r := newRecorder(t)
	c := worker(config.Source{Connect: newMute(t), Replay: newMute(t)})
	c.Silence, c.Grace, c.ReplayTimeout = 10*time.Millisecond, -1, 10*time.Millisecond
	e := newEngine(t)
	c.Workers = append(c.Workers, config.Worker{Name: "x", Sources: []config.Source{{Connect: e.mustBind("tcp://127.0.0.1:*")}}})
	in, stop := start(t, c, r)
	r.want("add w model m block_size 0 ranks [0]", "add x model  block_size 0 ranks [0]")
	e.awaitSubscriber("")
	e.publish(0)
	r.want("x 0/0: batch 0")
	if s := in.Sources()[0]; s.State != ingest.SourceConnecting || s.Started {
		t.Errorf("source %+v, want that it connects", s)
	}
	stop()
	r.wantNone()
}

// A replay socket that does not reply delays live batches once, not at each gap. Losses are
// reported.
func TestUselessReplaySocketDelaysBatchesOnce(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		replay  func(*testing.T) string
		timeout time.Duration // an hour if the failure is detected without a timeout
	}{
		{"refused", func(*testing.T) string { return "tcp://127.0.0.1:1" }, time.Hour},
		{"silent", newMute, 100 * time.Millisecond},
		{"another kind of socket", func(t *testing.T) string { return newEngine(t).mustBind("tcp://127.0.0.1:*") }, time.Hour},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngine(t)
			c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), Replay: tt.replay(t)})
			c.ReplayTimeout = tt.timeout
			registry := prometheus.NewRegistry()
			c.Metrics = registry
			r := newRecorder(t)
			start(t, c, r)
			e.awaitSubscriber("")
			began := time.Now()
			e.publish(0, stored(1))
			r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[1]")
			for seq := uint64(2); seq < 100; seq += 2 {
				e.publish(seq, stored(seq))
				r.want(fmt.Sprintf("w 0/0: gap %d-%d, 1 missed", seq-1, seq-1), fmt.Sprintf("w 0/0: batch %d +[%d]", seq, seq))
			}
			r.wantNone()
			most := 2 + float64(time.Since(began)/ingest.RestTime)
			if n := harness.Gather(t, registry).Sum("kvcast_ingest_replays_failed_total"); n == 0 || n > most {
				t.Errorf("%v replays failed for 50 gaps, want 1 to %v: one in %v", n, most, ingest.RestTime)
			}
		})
	}
}
