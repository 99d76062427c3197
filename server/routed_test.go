package server_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// promptTokens returns the tokens of so many blocks of 16, and a few more.
func promptTokens(blocks int) []uint32 {
	tokens := make([]uint32, 16*blocks+3)
	for i := range tokens {
		tokens[i] = uint32(1000 + i)
	}
	return tokens
}

// matches returns the matches of a prompt of tokens.
func (h *reporting) matches(tokens []uint32, limit uint32) []*kvcastv1.PrefixMatch {
	h.t.Helper()
	res, err := h.client.MatchPrefix(h.t.Context(), &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: tokens}}, Limit: limit})
	if err != nil {
		h.t.Fatal(err)
	}
	return res.GetPrompts()[0].GetMatches()
}

func routedTo(worker string, tokens []uint32) *kvcastv1.RoutedPrompt {
	return &kvcastv1.RoutedPrompt{Worker: worker, Prompt: &kvcastv1.Prompt{TokenIds: tokens}, TtlNano: 60e9}
}

func (h *reporting) noteRouted(wantIgnored uint32, all ...*kvcastv1.RoutedPrompt) {
	h.t.Helper()
	res, err := h.client.NoteRouted(h.t.Context(), &kvcastv1.NoteRoutedRequest{Routed: all})
	if err != nil || res.GetIgnored() != wantIgnored {
		h.t.Fatalf("ignored %d of %d, error %v; want %d", res.GetIgnored(), len(all), err, wantIgnored)
	}
}

// TestRoutedPromptIsExpected routes a prompt to a rank, which stores it then, first in part.
func TestRoutedPromptIsExpected(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	tokens := promptTokens(3)
	hashes := kvblock.AppendTokensHashes(nil, tokens, 16, kvblock.Seed("", ""), false, nil)
	if got := h.matches(tokens, 0); len(got) != 0 {
		t.Fatalf("got %v before the prompt was routed", got)
	}
	h.noteRouted(0, routedTo("w", tokens))
	want := &kvcastv1.PrefixMatch{Worker: "w", Model: "m", ExpectedBlocks: 3, ExpectedTokens: 48, Trust: kvcastv1.Trust_TRUST_EXACT}
	check := func(what string, tokens []uint32, want ...*kvcastv1.PrefixMatch) {
		t.Helper()
		for _, limit := range []uint32{0, 1} {
			if diff := cmp.Diff(want, h.matches(tokens, limit), protocmp.Transform(), protocmp.IgnoreFields(&kvcastv1.PrefixMatch{}, "endpoint")); diff != "" {
				t.Errorf("%s, limit %d (-want +got):\n%s", what, limit, diff)
			}
		}
	}
	check("routed", tokens, want)
	want.ExpectedBlocks, want.ExpectedTokens = 2, 32
	check("a shorter prompt", tokens[:40], want)
	first := storedBlock(7)
	first.TokensHashes = hashes[:1]
	h.batch(h.lane, first)
	held := &kvcastv1.PrefixMatch{
		Worker: "w", Model: "m", Blocks: 1, Tokens: 16, ExpectedBlocks: 3, ExpectedTokens: 48, Trust: kvcastv1.Trust_TRUST_EXACT,
		Tiers: []*kvcastv1.TierPrefix{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 1, Tokens: 16}},
	}
	check("stored in part", tokens, held)
	rest := storedBlock(8)
	rest.BlockHashes, rest.TokensHashes, rest.Parent, rest.HasParent = []uint64{8, 9}, hashes[1:], 7, true
	h.batch(h.lane, rest)
	held.Blocks, held.Tokens, held.ExpectedBlocks, held.ExpectedTokens = 3, 48, 0, 0
	held.Tiers[0].Blocks, held.Tiers[0].Tokens = 3, 48
	check("stored", tokens, held)
	// What is expected is in no snapshot, and adds no entry.
	if got := h.match(matchOf(1)).GetPosition().GetSeq(); got != h.position.GetSeq()+2 {
		t.Errorf("%d entries, want those of the two stores", got-h.position.GetSeq())
	}
}

// TestRoutedPromptIsExpectedForATime has the shortest time, and the usual one.
func TestRoutedPromptIsExpectedForATime(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	short, usual := routedTo("w", promptTokens(1)), routedTo("w", promptTokens(2))
	short.TtlNano, usual.TtlNano = 1, 0
	h.noteRouted(0, short)
	if got := h.matches(promptTokens(1), 0); len(got) != 0 {
		t.Errorf("got %v after the time", got)
	}
	h.noteRouted(0, usual)
	for len(h.matches(promptTokens(2), 0)) > 0 { // 2 s
	}
}

// TestRoutedPromptsComeWithMatches sends routed prompts over a stream, with a request, and alone.
func TestRoutedPromptsComeWithMatches(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	stream, err := h.client.MatchPrefixes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(req *kvcastv1.MatchPrefixesRequest) *kvcastv1.MatchPrefixesResponse {
		t.Helper()
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		res, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	request := &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: promptTokens(4)}}}
	res := ask(&kvcastv1.MatchPrefixesRequest{Id: 1, Request: request, Routed: []*kvcastv1.RoutedPrompt{routedTo("w", promptTokens(2))}})
	if got := res.GetResponse().GetPrompts()[0].GetMatches(); len(got) != 1 || got[0].GetExpectedBlocks() != 2 {
		t.Errorf("with a request: got %v", got)
	}
	if res = ask(&kvcastv1.MatchPrefixesRequest{Id: 2, Routed: []*kvcastv1.RoutedPrompt{routedTo("w", promptTokens(3)), routedTo("x", promptTokens(3))}}); res.GetId() != 2 || res.GetResponse() != nil {
		t.Errorf("alone: got %v", res)
	}
	if got := h.matches(promptTokens(4), 0); len(got) != 1 || got[0].GetExpectedBlocks() != 3 {
		t.Errorf("after it: got %v", got)
	}
	if err := stream.Send(&kvcastv1.MatchPrefixesRequest{Routed: []*kvcastv1.RoutedPrompt{{Worker: "w"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "routed[0].prompt.token_ids: is empty") {
		t.Errorf("an empty prompt: got %v", err)
	}
}

func TestRoutedPromptsThatAreIgnored(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	ofRank := routedTo("w", promptTokens(1))
	ofRank.DpRank = 9
	ofSize := routedTo("w", promptTokens(1))
	ofSize.Prompt.BlockSize = 32
	h.noteRouted(4, routedTo("x", promptTokens(1)), ofRank, ofSize, routedTo("w", make([]uint32, 15)), routedTo("w", promptTokens(1)))
	// A rank is expected to store 65,536 blocks at most, with 9 more for each prompt. An equal prompt adds none.
	hashes := make([]uint64, 1<<16-1-2*9)
	most := &kvcastv1.RoutedPrompt{Worker: "w", Prompt: &kvcastv1.Prompt{TokensHashes: hashes}, TtlNano: 60e9}
	h.noteRouted(0, most)
	h.noteRouted(0, most)
	h.noteRouted(1, routedTo("w", promptTokens(2)), routedTo("w", promptTokens(1)))
	for name, want := range map[string]float64{
		"kvcast_index_expected_blocks": 1<<16 - 2*9, "kvcast_server_routed_prompts_total": 9, "kvcast_server_routed_prompts_ignored_total": 5,
	} {
		if got := h.metric(name); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

func TestRoutedPromptsThatAreInvalid(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	late, byHash, salted := routedTo("w", promptTokens(1)), routedTo("w", nil), routedTo("w", nil)
	late.TtlNano = 60e9 + 1
	byHash.Prompt.BlockHashes = []uint64{1}
	salted.Prompt.TokensHashes, salted.Prompt.CacheSalt = []uint64{1}, "s"
	for want, all := range map[string][]*kvcastv1.RoutedPrompt{
		"routed: 0 prompts are not allowed: want 1 to 64": nil,
		"routed: more than 64 prompts are not allowed":    slices.Repeat([]*kvcastv1.RoutedPrompt{routedTo("w", promptTokens(1))}, 70),
		"routed[1].worker: is missing":                    {routedTo("w", promptTokens(1)), routedTo("", promptTokens(1))},
		"routed[0].ttl_nano: 60000000001 is not allowed":  {late},
		"routed[0].prompt.block_hashes: are not allowed":  {byHash},
		"routed[0].prompt.cache_salt: is not allowed":     {salted},
	} {
		if _, err := h.client.NoteRouted(t.Context(), &kvcastv1.NoteRoutedRequest{Routed: all}); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
