package client_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// followedView returns a View of a server's stream, and a function that waits until it has all entries.
func followedView(t *testing.T, h *fixture, c *client.Client) (*client.View, func(interface{ Fatal(...any) })) {
	t.Helper()
	view, ended := client.NewView(), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- view.Follow(c.Subscribe(ctx, client.Config{})) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("follow: %v", err)
		}
	})
	return view, func(t interface{ Fatal(...any) }) {
		for range view.Changes(ctx) {
			if s := view.Status(); s.Ready && s.Position.Seq == h.Journal.Bounds().Newest {
				return
			}
		}
		t.Fatal("the subscription has ended")
	}
}

// TestServerAndViewMatchAsEnginesHold changes engines at random, and compares the answers of MatchPrefix, of
// MatchPrefixes and of a View with the blocks that the engines hold.
func TestServerAndViewMatchAsEnginesHold(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	c := client.FromConn(h.Dial(t))
	view, awaitView := followedView(t, h, c)
	matcher := c.NewMatcher()
	defer matcher.Close()
	prompts, total := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		w := &world{h: h, workers: make(map[string]*worldWorker)}
		defer func() {
			for name := range w.workers {
				w.removeWorker(name)
			}
		}()
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			w.step(t)
			if rapid.IntRange(0, 2).Draw(t, "check") > 0 {
				continue
			}
			req := client.MatchRequest{
				Limit:   rapid.IntRange(0, 3).Draw(t, "limit"),
				Workers: rapid.SampledFrom([][]string{nil, nil, nil, {"a"}, {"b", "a"}, {"absent"}}).Draw(t, "workers"),
				After:   client.Position{Epoch: h.Journal.Bounds().Epoch, Seq: h.Journal.Bounds().Newest},
			}
			model := rapid.SampledFrom([]string{"", "", "m", "n", "absent"}).Draw(t, "model")
			for range rapid.IntRange(1, 3).Draw(t, "prompts") {
				req.Prompts = append(req.Prompts, drawPrompt(t, model))
			}
			got, err := c.MatchPrefix(context.Background(), req)
			if err != nil {
				t.Fatal(err)
			}
			streamed, err := matcher.Match(context.Background(), req)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, streamed); diff != "" {
				t.Fatalf("MatchPrefixes (-MatchPrefix +MatchPrefixes):\n%s", diff)
			}
			if got.Position != req.After {
				t.Errorf("got position %v, want %v", got.Position, req.After)
			}
			awaitView(t)
			for i, p := range req.Prompts {
				want := w.match(p, req.Workers, req.Limit)
				if diff := cmp.Diff(want, got.Matches[i], cmpopts.EquateEmpty()); diff != "" {
					t.Fatalf("%+v: MatchPrefix (-engines +server):\n%s", p, diff)
				}
				prompts++
				total += len(want)
				all := w.match(p, nil, 0)
				if diff := cmp.Diff(all, view.Match(p), cmpopts.EquateEmpty()); diff != "" {
					t.Fatalf("%+v: View.Match (-engines +view):\n%s", p, diff)
				}
			}
		}
	})
	if total == 0 && prompts > 500 { // a few may be of engines that hold nothing
		t.Errorf("none of %d prompts matches", prompts)
	}
}

// TestMatchesNameTheGroupThatEndsAPrefix has prompts of six blocks, of which the main group has two, a window two, or both all.
func TestMatchesNameTheGroupThatEndsAPrefix(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	c := client.FromConn(h.Dial(t))
	view, awaitView := followedView(t, h, c)
	groups := &kvcastv1.Groups{Unit: 4, Groups: []*kvcastv1.AttentionGroup{
		{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 4, Main: true},
		{Index: 3, Kind: kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW, BlockSize: 4, Window: 9},
	}}
	prompt, lane := []uint64{1, 2, 3, 4, 5, 6}, h.Pipeline.AddWorker(feed.Worker{Name: "w", Model: "m", BlockSize: 4})
	for rank, tt := range []struct {
		main, window int
		want         client.OptionalGroup
	}{
		{main: 4, window: 6, want: client.OptionalGroup{Index: 0, Set: true}},
		{main: 6, window: 4, want: client.OptionalGroup{Index: 3, Set: true}},
		{main: 6, window: 6},
	} {
		stored := wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 4}
		main, window := stored, stored
		main.BlockHashes, main.TokensHashes = prompt[:tt.main], prompt[:tt.main]
		window.BlockHashes, window.GroupIdx, window.Group = prompt[:tt.window], 3, 4
		lane.Batch(&feed.Batch{Rank: uint32(rank), Groups: groups, Events: []wire.Event{main, window}})
		p := client.Prompt{BlockHashes: prompt}
		got, err := c.MatchPrefix(t.Context(), client.MatchRequest{Prompts: []client.Prompt{p}})
		if err != nil {
			t.Fatal(err)
		}
		awaitView(t)
		for from, matches := range map[string][]client.Match{"MatchPrefix": got.Matches[0], "View.Match": view.Match(p)} {
			i := slices.IndexFunc(matches, func(m client.Match) bool { return m.Rank == uint32(rank) })
			if i < 0 {
				t.Fatalf("%s, rank %d: no match", from, rank)
			}
			want := client.Match{}.TierEndedBy
			want[kvcastv1.Tier_TIER_DEVICE] = tt.want
			if diff := cmp.Diff(want, matches[i].TierEndedBy); diff != "" {
				t.Errorf("%s, rank %d (-want +got):\n%s", from, rank, diff)
			}
		}
	}
}

func TestMatchPrefixReturnsTheServersError(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	c := client.FromConn(h.Dial(t))
	matcher := c.NewMatcher()
	defer matcher.Close()
	for name, match := range map[string]func(context.Context, client.MatchRequest) (client.MatchResult, error){
		"MatchPrefix": c.MatchPrefix, "Matcher": matcher.Match,
	} {
		var refused *client.Error
		_, err := match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{}}})
		if !errors.As(err, &refused) || refused.Code != codes.InvalidArgument || refused.Reason != "INVALID_ARGUMENT" {
			t.Errorf("%s, an empty prompt: got %v", name, err)
		}
		_, err = match(t.Context(), client.MatchRequest{
			Prompts: []client.Prompt{{TokensHashes: []uint64{1}}}, After: client.Position{Seq: 1}, MaxWait: time.Millisecond,
		})
		if !errors.As(err, &refused) || refused.Code != codes.DeadlineExceeded || refused.Reason != client.ReasonPositionNotReached {
			t.Errorf("%s, a position that is not reached: got %v", name, err)
		}
		var invalid *client.ConfigError
		_, err = match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{Model: "m"}, {Model: "n"}}})
		if !errors.As(err, &invalid) || invalid.Field != "Prompts[1].Model" {
			t.Errorf("%s, two models: got %v", name, err)
		}
	}
}

// TestMatcherAnswersConcurrentRequests also sends invalid requests, each of which ends the stream.
func TestMatcherAnswersConcurrentRequests(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	h.batch("w", storing(0, 1, 2, 3, 4, 5, 6, 7, 8))
	matcher := client.FromConn(h.Dial(t)).NewMatcher()
	defer matcher.Close()
	var requests sync.WaitGroup
	for n := range 8 {
		requests.Go(func() {
			for range 200 {
				got, err := matcher.Match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{TokensHashes: []uint64{1, 2, 3, 4, 5, 6, 7, 8}[:n+1]}}})
				if err != nil || len(got.Matches[0]) != 1 || got.Matches[0][0].Blocks != n+1 {
					t.Errorf("got %+v, error %v, want %d blocks", got, err, n+1)
					return
				}
			}
		})
	}
	requests.Wait()
	requests.Go(func() {
		var refused *client.Error
		if _, err := matcher.Match(t.Context(), client.MatchRequest{}); !errors.As(err, &refused) || refused.Code != codes.InvalidArgument {
			t.Errorf("an invalid request: got %v", err)
		}
	})
	requests.Go(func() { // perhaps over the stream that the invalid request ends
		if _, err := matcher.Match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{TokensHashes: []uint64{1}}}}); err != nil {
			t.Errorf("beside an invalid request: %v", err)
		}
	})
	requests.Wait()
}

// TestMatcherOpensAnotherStream lets the server end streams at a maximum age.
func TestMatcherOpensAnotherStream(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := start(t, server.Config{Registerer: reg, Limits: server.Limits{MaxConnectionAge: 50 * time.Millisecond, MaxConnectionAgeGrace: time.Second}}, journal.Config{})
	matcher := client.FromConn(h.Dial(t)).NewMatcher()
	defer matcher.Close()
	for harness.Gather(t, reg).Sum("grpc_server_started_total", "grpc_method", "MatchPrefixes") < 3 {
		if _, err := matcher.Match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{TokensHashes: []uint64{1}}}}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestClosedMatcherEndsRequests(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	matcher := client.FromConn(h.Dial(t)).NewMatcher()
	valid := client.MatchRequest{Prompts: []client.Prompt{{TokensHashes: []uint64{1}}}}
	if _, err := matcher.Match(t.Context(), valid); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waiting := valid
	waiting.After, waiting.MaxWait = client.Position{Seq: 9}, 10*time.Second
	ended := make(chan error, 2)
	go func() {
		_, err := matcher.Match(ctx, waiting)
		ended <- err
	}()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled request: got %v", err)
	}
	for range 2 {
		go func() {
			_, err := matcher.Match(t.Context(), waiting)
			ended <- err
		}()
	}
	matcher.Close()
	matcher.Close()
	for range 2 {
		if err := <-ended; !errors.Is(err, client.ErrMatcherClosed) {
			t.Errorf("a request in flight: got %v", err)
		}
	}
	if _, err := matcher.Match(t.Context(), valid); !errors.Is(err, client.ErrMatcherClosed) {
		t.Errorf("after Close: got %v", err)
	}
}
