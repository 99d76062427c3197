package engineclient_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestClientReconnects(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	got := newLines()
	c := connectClient(t, p, clientOf(p), got)
	enginetest.Remove(t, p.Publish, 1)
	got.want(t, "0/0 removed [1]")
	for i := range uint64(5) {
		enginetest.Remove(t, p.Drop, i) // on a connection that is closed next
		if err := c.Reconnect(harness.Context(t)); err != nil {
			t.Fatal(err)
		}
		got.want(t, fmt.Sprintf("0/%d removed [%d]", i+1, i))
		if s := c.Stats(); s.Connections != i+2 || s.Disconnections != i+1 || s.ConnectAttempts != i+2 || s.ConnectFailures != 0 ||
			s.Gaps != 0 || s.Restarts != 0 {
			t.Errorf("stats %+v", s)
		}
	}
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 7)
	got.want(t, "0/6 removed [7]")
	stopClient(t, c)
	got.wantNone(t)
}

func TestClientReconnectReportsAGapWithoutReplay(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	got := newLines()
	cfg := clientOf(p)
	cfg.Replay = ""
	c := connectClient(t, p, cfg, got)
	enginetest.Remove(t, p.Publish, 1)
	got.want(t, "0/0 removed [1]")
	if err := c.Reconnect(harness.Context(t)); err != nil {
		t.Fatal(err)
	}
	got.want(t, "0/0 gap possible_restart from 0, 0 missed")
}

func TestClientReconnectWhileTheHandlerIsCalled(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	for i := range uint64(5) {
		enginetest.Remove(t, p.Drop, i)
	}
	got, hold := newLines(), make(chan struct{})
	cfg := clientOf(p)
	cfg.Buffer = 1
	c := newClient(t, cfg, engineclient.HandlerFunc(func(ctx context.Context, e *engineclient.Event) error {
		<-hold
		return got.HandleEvent(ctx, e)
	}))
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Reconnect(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Reconnect while reading waits: %v", err)
	}
	close(hold)
	got.want(t, "0/0 removed [0]", "0/1 removed [1]", "0/2 removed [2]", "0/3 removed [3]", "0/4 removed [4]")
	harness.WaitFor(t, func() bool { return c.Stats().Connections == 2 && c.Connected() })
	stopClient(t, c)
	got.wantNone(t)
}

func TestClientWaitsForAConnection(t *testing.T) {
	t.Parallel()
	endpoint := "ipc://" + t.TempDir() + "/kv"
	got := newLines()
	c := newClient(t, engineclient.Config{
		Connect: endpoint, ReconnectMin: 10 * time.Millisecond, PollInterval: time.Millisecond,
	}, got)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := c.Connect(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), endpoint) {
		t.Errorf("Connect where nobody listens: %v", err)
	}
	if s := c.Stats(); s.Connected || s.State != ingest.SourceConnecting || s.Connections != 0 {
		t.Errorf("stats %+v", s)
	}
	harness.WaitFor(t, func() bool { return c.Stats().ConnectFailures >= 2 })
	if s := c.Stats(); s.ConnectAttempts < 2 {
		t.Errorf("stats %+v", s)
	}
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Endpoint: endpoint}})
	if err := c.WaitConnected(harness.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 1)
	got.want(t, "0/0 removed [1]")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, func() bool { return !c.Connected() })
	if s := c.Stats(); s.Disconnections != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestClientReadsAHost(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	enginetest.Remove(t, p.Drop, 1)
	port := func(endpoint string) int {
		t.Helper()
		n, err := strconv.Atoi(endpoint[strings.LastIndexByte(endpoint, ':')+1:])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, host := range []string{"127.0.0.1", "localhost"} {
		got := newLines()
		c := newClient(t, engineclient.Config{
			Host: host, PubPort: port(p.Endpoint()), ReplayPort: port(p.ReplayEndpoint()),
		}, got)
		if err := c.Connect(harness.Context(t)); err != nil {
			t.Fatal(err)
		}
		got.want(t, "0/0 removed [1]")
	}
	for _, host := range []string{"::1", "[::1]"} {
		c := newClient(t, engineclient.Config{Host: host, PubPort: 1}, discard)
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		cancel(enough)
		if err := c.Connect(ctx); !errors.Is(err, enough) || !strings.Contains(err.Error(), "to tcp://[::1]:1:") {
			t.Errorf("Connect to %s: %v", host, err)
		}
	}
}
