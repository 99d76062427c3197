package engineclient_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestClientReplayFrom(t *testing.T) {
	t.Parallel()
	removed := func(first, last uint64) (all []string) {
		for seq := first; seq <= last; seq++ {
			all = append(all, fmt.Sprintf("0/%d removed [%d]", seq, seq))
		}
		return all
	}
	join := func(parts ...[]string) (all []string) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	skip := func(seqs ...uint64) func(uint64) bool {
		return func(seq uint64) bool {
			for _, s := range seqs {
				if s == seq {
					return true
				}
			}
			return false
		}
	}
	tests := []struct {
		name   string
		config simulator.PublisherConfig
		faults simulator.ReplayFaults
		forget []uint64
		from   uint64
		want   []string
		// timeout is the replay timeout, for engines that omit the end marker.
		timeout time.Duration
	}{
		{name: "all", from: 0, want: removed(0, 9)},
		{name: "from the middle", from: 4, want: removed(4, 9)},
		{name: "the last", from: 9, want: removed(9, 9)},
		{name: "beyond the last", from: 10},
		{name: "far beyond the last", from: math.MaxUint64},
		{
			name: "plain replay form", config: simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{ReplayForm: simulator.ReplayPlain}},
			from: 8, want: removed(8, 9),
		},
		{
			name: "evicted batches", config: simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{ReplayLimit: 3}},
			from: 2, want: join([]string{"0/6 gap replay_forgotten from 2, 5 missed"}, removed(7, 9)),
		},
		{
			name: "holes in the replay buffer", forget: []uint64{3, 4, 7},
			want: join(removed(0, 2), []string{"0/4 gap replay_incomplete from 3, 2 missed"}, removed(5, 6),
				[]string{"0/7 gap replay_incomplete from 7, 1 missed"}, removed(8, 9)),
		},
		{
			name:   "a hole in one answer",
			faults: simulator.ReplayFaults{Skip: skip(3, 4), Requests: 1}, want: removed(0, 9),
		},
		{
			name:   "the first batch is missing in one answer",
			faults: simulator.ReplayFaults{Skip: skip(0), Requests: 1}, want: removed(0, 9),
		},
		{
			name:   "a hole in every answer",
			faults: simulator.ReplayFaults{Skip: skip(3)},
			want:   join(removed(0, 2), []string{"0/3 gap replay_incomplete from 3, 1 missed"}, removed(4, 9)),
		},
		{
			name:   "no end marker in one answer",
			faults: simulator.ReplayFaults{NoEnd: true, Requests: 1}, want: removed(0, 9), timeout: 2 * time.Second,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := enginetest.NewSimulated(t, tt.config)
			for i := range uint64(10) {
				enginetest.Remove(t, p.Drop, i)
			}
			if err := errors.Join(p.RemoveFromReplay(tt.forget...), p.SetReplayFaults(tt.faults)); err != nil {
				t.Fatal(err)
			}
			cfg := clientOf(p)
			if tt.timeout > 0 {
				cfg.ReplayTimeout = tt.timeout
			}
			own := newLines()
			c := newClient(t, cfg, own)
			got := newLines()
			if err := c.ReplayFrom(harness.Context(t), tt.from, got); err != nil {
				t.Fatal(err)
			}
			got.want(t, tt.want...)
			got.wantNone(t)
			own.wantNone(t)
			if s := c.Stats(); s.ReplayFromDone != 1 || s.ReplayFromFailed != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// TestClientReplayFromOfMany lets the engine's socket drop replies that are read slowly,
// including end markers.
func TestClientReplayFromOfMany(t *testing.T) {
	t.Parallel()
	const batches = 5000
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	for i := range uint64(batches) {
		enginetest.Remove(t, p.Drop, i)
	}
	dropped := false
	err := p.SetReplayFaults(simulator.ReplayFaults{
		Skip: func(seq uint64) bool {
			dropped = dropped || seq > 2500
			return seq > 2500
		},
		Requests: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, clientOf(p), discard)
	next := uint64(0)
	err = c.ReplayFrom(harness.Context(t), 0, engineclient.HandlerFunc(func(_ context.Context, e *engineclient.Event) error {
		if e.Seq != next || e.Kind != engineclient.EventRemoved {
			return fmt.Errorf("got %s, want batch %d", eventLine(e), next)
		}
		next++
		return nil
	}))
	if err != nil || next != batches {
		t.Errorf("%d batches, %v", next, err)
	}
}

func TestClientReplayFromBesideTheReading(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	own := newLines()
	c := connectClient(t, p, clientOf(p), own)
	var want []string
	for i := range uint64(5) {
		enginetest.Remove(t, p.Publish, i)
		want = append(want, fmt.Sprintf("0/%d removed [%d]", i, i))
	}
	own.want(t, want...)
	for range 2 {
		got := newLines()
		if err := c.ReplayFrom(harness.Context(t), 2, got); err != nil {
			t.Fatal(err)
		}
		got.want(t, want[2:]...)
		got.wantNone(t)
	}
	stopClient(t, c)
	got := newLines()
	if err := c.ReplayFrom(harness.Context(t), 4, got); err != nil {
		t.Fatalf("after Stop: %v", err)
	}
	got.want(t, want[4:]...)
	own.wantNone(t)
}

func TestClientReplayFromFails(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	enginetest.Remove(t, p.Drop, 1)
	enginetest.Remove(t, p.Drop, 2)
	mute := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	if err := mute.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}); err != nil {
		t.Fatal(err)
	}
	errFull := errors.New("full")
	tests := []struct {
		name    string
		change  func(*engineclient.Config)
		handler engineclient.Handler
		want    string
		is      error
	}{
		{
			name:   "no replay socket",
			change: func(c *engineclient.Config) { c.Replay = "" }, want: "replay from 0", is: engineclient.ErrNoReplay,
		},
		{
			name:   "no listener",
			change: func(c *engineclient.Config) { c.Replay = "tcp://127.0.0.1:1" }, want: "nothing listens there",
		},
		{
			name: "silent replay socket",
			change: func(c *engineclient.Config) {
				c.Replay, c.ReplayTimeout = mute.ReplayEndpoint(), 50*time.Millisecond
			},
			want: "no answer for 50ms",
		},
		{
			name:    "the handler fails",
			handler: engineclient.HandlerFunc(func(context.Context, *engineclient.Event) error { return errFull }),
			want:    "handle replayed batch 0: full", is: errFull,
		},
		{
			name:    "the handler panics",
			handler: engineclient.HandlerFunc(func(context.Context, *engineclient.Event) error { panic(errFull) }),
			want:    "handle replayed batch 0: handler panicked: full", is: errFull,
		},
		{
			name: "the context ends",
			handler: engineclient.HandlerFunc(func(ctx context.Context, _ *engineclient.Event) error {
				ctx.Value(cancelKey{}).(context.CancelFunc)()
				return nil
			}),
			want: "replay from", is: context.Canceled,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := clientOf(p)
			if tt.change != nil {
				tt.change(&cfg)
			}
			if tt.handler == nil {
				tt.handler = discard
			}
			c := newClient(t, cfg, discard)
			ctx, cancel := context.WithCancel(harness.Context(t))
			defer cancel()
			err := c.ReplayFrom(context.WithValue(ctx, cancelKey{}, cancel), 0, tt.handler)
			if err == nil || !strings.Contains(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
			s := c.Stats()
			if d := cmp.Diff(uint64(0), s.ReplayFromDone); d != "" {
				t.Errorf("done (-want +got):\n%s", d)
			}
		})
	}
}

type cancelKey struct{}
