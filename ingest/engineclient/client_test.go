package engineclient_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// discard is a handler that ignores all events.
var discard = engineclient.HandlerFunc(func(context.Context, *engineclient.Event) error { return nil })

// lines is a handler that formats each event as a line.
type lines chan string

func newLines() lines { return make(lines, 10_000) }

func (l lines) HandleEvent(_ context.Context, e *engineclient.Event) error {
	l <- eventLine(e)
	return nil
}

func eventLine(e *engineclient.Event) string {
	switch e.Kind {
	case engineclient.EventStored, engineclient.EventRemoved, engineclient.EventCleared:
		s := fmt.Sprintf("%d/%d %v %v", e.Rank, e.Seq, e.Kind, e.BlockHashes)
		if e.More {
			s += " ..."
		}
		return s
	case engineclient.EventGap:
		return fmt.Sprintf("%d/%d gap %v from %d, %d missed", e.Rank, e.Seq, e.Gap.Reason, e.Gap.FirstSeq, e.Gap.Missed)
	default:
		return fmt.Sprintf("%d %v", e.Rank, e.Kind)
	}
}

// want waits for these events, and fails the test at the first difference.
func (l lines) want(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for i := range want {
		select {
		case line := <-l:
			got = append(got, line)
		case <-time.After(harness.Timeout):
			t.Fatalf("events stopped coming (-want +got):\n%s", cmp.Diff(want, got))
		}
		if got[i] != want[i] {
			t.Fatalf("events differ (-want +got):\n%s", cmp.Diff(want[:i+1], got))
		}
	}
}

func (l lines) wantNone(t *testing.T) {
	t.Helper()
	select {
	case line := <-l:
		t.Errorf("unexpected event: %s", line)
	default:
	}
}

// clientOf returns the configuration of a Client that reads a simulated engine.
func clientOf(p *simulator.Publisher) engineclient.Config {
	return engineclient.Config{
		Worker:        "w",
		Model:         "m",
		Connect:       p.Endpoint(),
		Replay:        p.ReplayEndpoint(),
		ReplayTimeout: harness.Timeout,
		ReconnectMin:  10 * time.Millisecond,
		ReconnectMax:  20 * time.Millisecond,
		PollInterval:  time.Millisecond,
	}
}

// newClient returns a Client that is stopped when the test ends.
func newClient(t *testing.T, c engineclient.Config, h engineclient.Handler) *engineclient.Client {
	t.Helper()
	client, err := engineclient.New(c, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopClient(t, client) })
	return client
}

// connectClient returns a Client whose subscription the engine has received.
func connectClient(t *testing.T, p *simulator.Publisher, c engineclient.Config, h engineclient.Handler) *engineclient.Client {
	t.Helper()
	client := newClient(t, c, h)
	if err := client.Connect(harness.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	return client
}

func stopClient(t *testing.T, c *engineclient.Client) {
	t.Helper()
	if err := c.Stop(); err != nil {
		t.Errorf("Stop: %v", err)
	}
}

func TestClientReads(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	enginetest.Remove(t, p.Drop, 1)
	got := newLines()
	c := connectClient(t, p, clientOf(p), got)
	got.want(t, "0/0 removed [1]")
	if _, err := p.Publish(enginetest.Stored(2), enginetest.Stored(3), wire.Event{Kind: wire.KindCleared}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(); err != nil { // a batch without events
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 4)
	got.want(t, "0/1 stored [2] ...", "0/1 stored [3] ...", "0/1 cleared []", "0/3 removed [4]")
	enginetest.Remove(t, p.Drop, 5)
	enginetest.Remove(t, p.Publish, 6)
	got.want(t, "0/4 removed [5]", "0/5 removed [6]")
	enginetest.Remove(t, p.Lose, 7)
	enginetest.Remove(t, p.Publish, 8)
	got.want(t, "0/6 gap replay_incomplete from 6, 1 missed", "0/7 removed [8]")
	if err := p.Restart(0); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 9)
	got.want(t, "0 restarted", "0/0 removed [9]")
	stopClient(t, c)
	got.wantNone(t)

	s := c.Stats()
	if s.Connections != 1 || s.Replays == 0 || s.ReplaysDone == 0 || s.Replayed == 0 || s.HandlerTime <= 0 {
		t.Errorf("stats %+v", s)
	}
	if s.Messages < 6 || s.ConnectAttempts == 0 {
		t.Errorf("stats %+v", s)
	}
	s.Messages, s.ConnectAttempts = 0, 0
	s.Connections, s.Replays, s.ReplaysDone, s.ReplaysFailed, s.Replayed, s.HandlerTime = 0, 0, 0, 0, 0, 0
	s.Duplicates, s.ConnectFailures = 0, 0
	want := engineclient.Stats{
		State:   ingest.SourceStopped,
		Started: true, LastSeq: 0,
		WorkerStats: ingest.WorkerStats{
			Batches: 8, Stored: 2, Removed: 6, Cleared: 1,
			Gaps: 1, Missed: 1, Restarts: 1,
		},
		Handled: 11, HandledAny: true, HandledSeq: 0,
	}
	if d := cmp.Diff(want, s); d != "" {
		t.Errorf("stats (-want +got):\n%s", d)
	}
}

func TestClientDeliversEachEvent(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{BatchConfig: simulator.BatchConfig{
		Rank: 3, FirstSeq: 7, Now: func() time.Time { return time.Unix(1_700_000_000, 0) },
	}})
	events := make(chan *engineclient.Event, 10)
	// These batches are published before the client starts: the first may arrive live, by replay,
	// or after an empty replay.
	if _, err := p.Publish(enginetest.Stored(5)); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 6)
	connectClient(t, p, clientOf(p), engineclient.HandlerFunc(func(_ context.Context, e *engineclient.Event) error {
		events <- e
		return nil
	}))
	began := time.Now().Add(-time.Minute)
	var got []*engineclient.Event
	for range 3 {
		e := <-events
		if e.IngestTime.Before(began) || e.IngestTime.After(time.Now()) {
			t.Errorf("ingest time %v", e.IngestTime)
		}
		e.IngestTime = time.Time{}
		if (e.Kind == engineclient.EventStored) != (len(e.TokensHashes) == 1) {
			t.Errorf("%v has tokens hashes %v", e.Kind, e.TokensHashes)
		}
		e.TokensHashes, e.RawID, e.Gap.At = nil, 0, 0
		got = append(got, e)
	}
	want := []*engineclient.Event{
		{
			Kind: engineclient.EventGap, Worker: "w", Model: "m", Rank: 3, Seq: 6,
			Gap: feed.Gap{Rank: 3, Reason: feed.GapJoinedLate, LastSeq: 6},
		},
		{
			Kind: engineclient.EventStored, Worker: "w", Model: "m", Rank: 3, Seq: 7, EngineTime: time.Unix(1_700_000_000, 1000),
			Event: wire.Event{
				Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: enginetest.BlockSize,
				BlockHashes: []uint64{5}, Tokens: []uint32{1, 2, 3, 4},
			},
		},
		{
			Kind: engineclient.EventRemoved, Worker: "w", Model: "m", Rank: 3, Seq: 8, EngineTime: time.Unix(1_700_000_000, 2000),
			Event: wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{6}},
		},
	}
	for i := range got {
		got[i].EngineTime = got[i].EngineTime.Truncate(time.Second)
		want[i].EngineTime = want[i].EngineTime.Truncate(time.Second)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
}

func TestClientStartsOnce(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := newClient(t, clientOf(p), discard)
	if err := c.WaitConnected(t.Context()); !errors.Is(err, engineclient.ErrNotStarted) {
		t.Errorf("WaitConnected before Start: %v", err)
	}
	if err := c.Reconnect(t.Context()); !errors.Is(err, engineclient.ErrNotStarted) {
		t.Errorf("Reconnect before Start: %v", err)
	}
	if d := cmp.Diff(engineclient.Stats{}, c.Stats()); d != "" {
		t.Errorf("stats before Start (-want +got):\n%s", d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); !errors.Is(err, engineclient.ErrStarted) {
		t.Errorf("Start while it runs: %v", err)
	}
	if err := c.Connect(harness.Context(t)); err != nil {
		t.Errorf("Connect while it runs: %v", err)
	}
	if !c.Connected() {
		t.Error("not connected after Connect")
	}
	cancel() // like Stop, without waiting
	stopClient(t, c)
	if c.Connected() {
		t.Error("connected after Stop")
	}
	for name, call := range map[string]func(context.Context) error{
		"WaitConnected": c.WaitConnected, "Reconnect": c.Reconnect, "Connect": c.Connect,
	} {
		if err := call(t.Context()); !errors.Is(err, config.ErrEnded) {
			t.Errorf("%s after Stop: %v", name, err)
		}
	}
	if err := c.Start(t.Context()); !errors.Is(err, engineclient.ErrStarted) {
		t.Errorf("Start after Stop: %v", err)
	}
}

func TestClientStopsBeforeStart(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := newClient(t, clientOf(p), discard)
	stopClient(t, c)
	stopClient(t, c)
	if err := c.Start(t.Context()); !errors.Is(err, engineclient.ErrStarted) {
		t.Errorf("Start after Stop: %v", err)
	}
	if err := c.Connect(t.Context()); !errors.Is(err, config.ErrEnded) {
		t.Errorf("Connect after Stop: %v", err)
	}
}

// TestClientStopWaitsForTheHandler also checks that no call follows, and that undelivered
// events are counted.
func TestClientStopWaitsForTheHandler(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	const batches = 20
	for i := range uint64(batches) {
		enginetest.Remove(t, p.Drop, i)
	}
	inside, calls, out := make(chan struct{}), 0, make(chan struct{})
	cfg := clientOf(p)
	cfg.Buffer = 5
	c := newClient(t, cfg, engineclient.HandlerFunc(func(ctx context.Context, _ *engineclient.Event) error {
		calls++
		close(inside)
		<-ctx.Done()
		<-out
		return ctx.Err()
	}))
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-inside
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == cfg.Buffer })
	stopped := make(chan error, 2)
	for range 2 {
		go func() { stopped <- c.Stop() }()
	}
	select {
	case <-stopped:
		t.Error("Stop returned while the handler was called")
	case <-time.After(50 * time.Millisecond):
	}
	close(out)
	for range 2 {
		if err := <-stopped; err != nil {
			t.Errorf("Stop: %v", err)
		}
	}
	s := c.Stats()
	if calls != 1 || s.Handled != 1 || s.HandlerErrors != 1 || s.Waiting != 0 {
		t.Errorf("%d calls, stats %+v", calls, s)
	}
	if s.Removed != s.Handled+s.Discarded {
		t.Errorf("%d events read, %d handled and %d discarded", s.Removed, s.Handled, s.Discarded)
	}
}

func TestClientSlowHandlerLosesNothing(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	got, hold := newLines(), make(chan struct{})
	cfg := clientOf(p)
	cfg.Buffer = 1
	c := connectClient(t, p, cfg, engineclient.HandlerFunc(func(ctx context.Context, e *engineclient.Event) error {
		<-hold
		return got.HandleEvent(ctx, e)
	}))
	const batches = 200
	var want []string
	for i := range uint64(batches) {
		enginetest.Remove(t, p.Publish, i)
		want = append(want, fmt.Sprintf("0/%d removed [%d]", i, i))
	}
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == 1 })
	if s := c.Stats(); s.Handled != 0 || s.Batches > 3 {
		t.Errorf("read ahead of the handler: %+v", s)
	}
	close(hold)
	got.want(t, want...)
	got.wantNone(t)
}

func TestClientHandlerFails(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	var log harness.Log
	got := newLines()
	cfg := clientOf(p)
	cfg.Logger = log.Logger()
	c := connectClient(t, p, cfg, engineclient.HandlerFunc(func(ctx context.Context, e *engineclient.Event) error {
		switch e.BlockHashes[0] {
		case 1:
			return errors.New("no room")
		case 2:
			panic("at sea")
		case 3:
			var nobody *engineclient.Event
			nobody.Seq++ // the runtime panics
		}
		return got.HandleEvent(ctx, e)
	}))
	for i := range uint64(5) {
		enginetest.Remove(t, p.Publish, i)
	}
	got.want(t, "0/0 removed [0]", "0/4 removed [4]")
	stopClient(t, c)
	if s := c.Stats(); s.Handled != 5 || s.HandlerErrors != 1 || s.HandlerPanics != 2 || s.HandledSeq != 4 {
		t.Errorf("stats %+v", s)
	}
	log.Want(t, `level=ERROR msg="handler failed" worker=w rank=0 seq=1 kind=removed error="no room"`)
	if n := strings.Count(log.String(), "handler failed"); n != 3 {
		t.Errorf("%d failures are logged, want 3:\n%s", n, log.String())
	}
}
