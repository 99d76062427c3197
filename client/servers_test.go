package client_test

import (
	"context"
	"errors"
	"math"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
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

// TestUnknownTiersAreLeftOut has tiers that this version does not know beside the device's, in the order of a later version.
func TestUnknownTiersAreLeftOut(t *testing.T) {
	t.Parallel()
	s := play(t, script{})
	s.match = &kvcastv1.MatchPrefixResponse{Prompts: []*kvcastv1.PromptMatches{{Matches: []*kvcastv1.PrefixMatch{{Worker: "w", Blocks: 9}}}}}
	for _, tier := range []kvcastv1.Tier{math.MinInt32, -1, 5, math.MaxInt32, kvcastv1.Tier_TIER_DEVICE} {
		m := s.match.GetPrompts()[0].GetMatches()[0]
		m.Tiers = append(m.Tiers, &kvcastv1.TierPrefix{Tier: tier, Blocks: 7, EndedByGroup: proto.Uint32(0)})
	}
	got, err := s.client.MatchPrefix(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{TokensHashes: []uint64{1}}}})
	if err != nil {
		t.Fatal(err)
	}
	want := client.Match{Worker: "w", Blocks: 9}
	want.TierBlocks[kvcastv1.Tier_TIER_DEVICE] = 7
	want.TierEndedBy[kvcastv1.Tier_TIER_DEVICE] = client.OptionalGroup{Index: 0, Set: true}
	if diff := cmp.Diff([][]client.Match{{want}}, got.Matches); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestInvalidTargetInList(t *testing.T) {
	t.Parallel()
	if _, err := client.New("127.0.0.1:1,", grpc.WithTransportCredentials(insecure.NewCredentials())); err == nil {
		t.Error("no error")
	}
}
