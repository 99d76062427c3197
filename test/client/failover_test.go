package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server"
)

// TestCallsFindServer sends calls while the first of two servers cannot be reached.
func TestCallsFindServer(t *testing.T) {
	t.Parallel()
	s := start(t, server.Config{}, journal.Config{})
	s.batch("w", storing(0, 1, 2))
	c := dial(t, "127.0.0.1:1,"+s.Target)
	req := client.MatchRequest{Prompts: []client.Prompt{{Model: "m", TokensHashes: []uint64{1, 2}, BlockSize: 16}}}
	m := c.NewMatcher()
	defer m.Close()
	for name, match := range map[string]func(context.Context, client.MatchRequest) (client.MatchResult, error){
		"call": dial(t, "127.0.0.1:1,"+s.Target).MatchPrefix, "stream": m.Match,
	} {
		if got, err := match(t.Context(), req); err != nil || len(got.Matches[0]) != 1 || got.Matches[0][0].Blocks != 2 {
			t.Errorf("%s: got %+v, error %v, want 2 blocks", name, got, err)
		}
	}
	var failure *client.Error
	if _, err := dial(t, "127.0.0.1:1,127.0.0.1:1").MatchPrefix(t.Context(), req); !errors.As(err, &failure) || failure.Code != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}

// TestServersWithOwnJournals fails over between servers that read the same engines without a common journal.
func TestServersWithOwnJournals(t *testing.T) {
	t.Parallel()
	var target string
	var instances []*fixture
	for range 3 {
		s := start(t, server.Config{}, journal.Config{})
		s.batch("w", storing(0, 1, 2))
		instances, target = append(instances, s), target+s.Target+","
	}
	f := follow(t, strings.TrimSuffix(target, ","), quick())
	for i, s := range instances {
		s.batch("w", storing(2, 3))
		f.reach(s)
		if _, snapshots := f.counts(); snapshots != i+1 {
			t.Errorf("%d snapshots after server %d, want one for each", snapshots, i)
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestStreamsSpreadOverTheAddressesOfAName resolves a name to two servers.
func TestStreamsSpreadOverTheAddressesOfAName(t *testing.T) {
	t.Parallel()
	names := manual.NewBuilderWithScheme("name")
	var state resolver.State
	epochs := make(map[string]bool)
	for range 2 {
		s := start(t, server.Config{}, journal.Config{})
		state.Addresses = append(state.Addresses, resolver.Address{Addr: s.Target})
		epochs[s.Journal.Bounds().Epoch] = true
	}
	names.InitialState(state)
	c := dial(t, "name:///kvcast", grpc.WithResolvers(names))
	for attempt := 0; len(epochs) > 0; attempt++ {
		if attempt == 100 {
			t.Fatalf("no stream of %d went to a server", attempt)
		}
		for u, err := range c.Subscribe(t.Context(), quick()) {
			if err != nil {
				t.Fatal(err)
			}
			delete(epochs, u.Message.GetAccepted().GetEpoch())
			break
		}
	}
}
