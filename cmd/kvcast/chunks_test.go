package main_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// TestChunksOfAConnectorMatchWhole has an engine with blocks of 4 tokens, of which the first is on the device, and a connector with two chunks of 16
// tokens in host memory, as LMCache's connector stores them. A server that has restarted with the journal has the same answers.
func TestChunksOfAConnectorMatchWhole(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for name, first := range map[string]bool{"device first": false, "chunk first": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testChunks(t, first)
		})
	}
}

// testChunks stores the first chunk before the size of the worker's blocks is known, too, if chunkFirst is set.
func testChunks(t *testing.T, chunkFirst bool) {
	t.Helper()
	p := publisherOf(t, simulator.SocketConfig{})
	tokens := make([]uint32, 32)
	for i := range tokens {
		tokens[i] = uint32(100 + i)
	}
	events := []wire.Event{
		{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: tokens[:4], BlockSize: 4, Medium: "GPU"},
		{Kind: wire.KindStored, BlockHashes: []uint64{1001}, Tokens: tokens[:16], BlockSize: 16, Medium: "CPU"},
		{Kind: wire.KindStored, BlockHashes: []uint64{1002}, Tokens: tokens[16:], BlockSize: 16, Medium: "CPU", Parent: 1001, HasParent: true},
	}
	if chunkFirst {
		events = append(events[1:2:2], events...)
	}
	args := []string{"--journal", "file:" + t.TempDir(), "--worker", "name=w,model=m,connect=" + p.Endpoint() + ",replay=" + p.ReplayEndpoint()}
	s := serve(t, args...)
	for _, e := range events {
		if _, err := p.Publish(e); err != nil {
			t.Fatal(err)
		}
	}
	check := func(s *process) {
		t.Helper()
		for length, want := range map[int][2]uint32{3: {0, 0}, 4: {4, 0}, 15: {4, 0}, 16: {16, 16}, 31: {16, 16}, 32: {32, 32}} {
			got := [2]uint32{}
			harness.WaitFor(t, func() bool {
				res, err := s.Client().MatchPrefix(t.Context(), &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{{TokenIds: tokens[:length]}}})
				if err != nil {
					t.Fatal(err)
				}
				got = [2]uint32{}
				for _, m := range res.GetPrompts()[0].GetMatches() {
					got[0] = m.GetTokens()
					for _, tier := range m.GetTiers() {
						if tier.GetTier() == kvcastv1.Tier_TIER_HOST_PINNED {
							got[1] = tier.GetTokens()
						}
					}
				}
				return got == want
			})
		}
		list, err := s.Client().ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := fmt.Sprint(list.GetWorkers()[0].GetRanks()[0].GetTierReasons()), "chunk_tokens:16"; !strings.Contains(got, want) {
			t.Errorf("the reasons of the tiers are %s, want %s", got, want)
		}
	}
	check(s)
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	check(serve(t, args...))
}
