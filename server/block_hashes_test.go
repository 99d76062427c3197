package server_test

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// TestMatchesHaveBlockHashes has a worker with two dp ranks and several tiers, by a call and over a stream.
func TestMatchesHaveBlockHashes(t *testing.T) {
	t.Parallel()
	h := start(t, harness.InstanceConfig{BlockHashes: true})
	lane := h.Pipeline.AddWorker(feed.Worker{
		Name: "e", Model: "m", Endpoint: "10.0.0.1:8000", Labels: map[string]string{"kvcast.io/fetch": "25000"}, BlockSize: 16, Ranks: []uint32{8, 9},
	})
	store := func(rank uint32, tier kvblock.Tier, hashes ...uint64) {
		e := wire.Event{Kind: wire.KindStored, Tier: tier, BlockHashes: hashes, TokensHashes: []uint64{1, 2, 3}[:len(hashes)], BlockSize: 16}
		h.batches++
		lane.Batch(&feed.Batch{Rank: rank, EngineTime: h.batches, IngestTime: h.batches, Events: []wire.Event{e}})
	}
	store(8, kvblock.TierDevice, 11, 12, 13)
	store(9, kvblock.TierDevice, 21, 22)
	store(9, kvblock.TierHostPinned, 21)
	h.addWorker() // without a label
	h.batch(h.lane, storedBlock(1))
	req := &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{{TokensHashes: []uint64{1, 2, 3, 4}}}, MaxBlockHashes: 2}
	check := func(res *kvcastv1.MatchPrefixResponse, want ...[]uint64) {
		t.Helper()
		matches := res.GetPrompts()[0].GetMatches()
		if len(matches) != 3 {
			t.Fatalf("got %v", matches)
		}
		for i, endpoint := range []string{"tcp://10.0.0.1:25000", "tcp://10.0.0.1:25001", ""} {
			m := matches[i]
			if want == nil && (m.GetFetchEndpoint() != "" || len(m.GetBlockHashes()) > 0) ||
				want != nil && (m.GetFetchEndpoint() != endpoint || !slices.Equal(m.GetBlockHashes(), want[i])) {
				t.Errorf("match %d: got %v, want %v from %q", i, m, want, endpoint)
			}
		}
	}
	check(h.match(req), []uint64{11, 12}, []uint64{21, 22}, []uint64{1})
	stream, err := h.client.MatchPrefixes(t.Context())
	if err == nil {
		err = stream.Send(&kvcastv1.MatchPrefixesRequest{Request: req})
	}
	if err != nil {
		t.Fatal(err)
	}
	res, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	check(res.GetResponse(), []uint64{11, 12}, []uint64{21, 22}, []uint64{1})
	req.MaxBlockHashes = 0
	check(h.match(req))
	req.MaxBlockHashes = 65_536
	check(h.match(req), []uint64{11, 12, 13}, []uint64{21, 22}, []uint64{1})
}

func TestBlockHashesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		keep bool
		most uint32
		want string
	}{
		{false, 1, "max_block_hashes: 1 is not allowed: this server does not keep block hashes"},
		{true, 65_537, "max_block_hashes: 65537 is not allowed: want at most 65536"},
	} {
		h := start(t, harness.InstanceConfig{Server: server.Config{}, BlockHashes: tt.keep})
		req := matchOf(1)
		req.MaxBlockHashes = tt.most
		if _, err := h.client.MatchPrefix(t.Context(), req); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
}
