package client_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server"
)

// servers returns a client for scripted servers, in their order.
func servers(t *testing.T, scripted map[string]*scripted, target string) *client.Client {
	t.Helper()
	c, err := client.New(target, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			s := scripted[addr]
			if s == nil {
				return nil, errors.New("connection refused")
			}
			return s.listener.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestNextServerIsResumedAtPosition ends the streams of three servers in turn.
func TestNextServerIsResumedAtPosition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := play(t, script{earliest(two()), status.Error(codes.Unavailable, "gone")}, script{messages: snapshot(9)})
		b := play(t, script{err: refusal(codes.Unavailable, "SHUTTING_DOWN", time.Minute)})
		a.client = servers(t, map[string]*scripted{"a": a, "b": b}, "passthrough:///a,passthrough:///gone,passthrough:///b")
		o := a.collect(t.Context(), client.Config{Start: client.FromEarliest()}, interrupted(3))
		if o.err != nil || len(a.requests()) != 1 || len(b.requests()) != 1 {
			t.Fatalf("error %v; %d and %d requests, want 1 and 1", o.err, len(a.requests()), len(b.requests()))
		}
		if got := b.requests()[0].GetAfter().GetSeq(); got != 2 {
			t.Errorf("the next server was asked for entries after %d, want 2", got)
		}
		for i, short := range []bool{true, true, false} {
			if got := o.interruptions[i].Wait; short != (got <= 100*time.Millisecond) {
				t.Errorf("wait %d: %v", i, got)
			}
		}
	})
}

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

func TestInvalidTargetInList(t *testing.T) {
	t.Parallel()
	if _, err := client.New("127.0.0.1:1,", grpc.WithTransportCredentials(insecure.NewCredentials())); err == nil {
		t.Error("no error")
	}
}
