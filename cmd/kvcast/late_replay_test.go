package main_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// chainedBlock returns a store of the nth block of a prompt whose tokens are their numbers, two to a block.
func chainedBlock(n uint64) wire.Event {
	return wire.Event{
		Kind: wire.KindStored, BlockHashes: []uint64{n + 1}, Parent: n, HasParent: n > 0,
		Tokens: []uint32{uint32(2 * n), uint32(2*n + 1)}, BlockSize: 2,
	}
}

// awaitRank waits until the worker's rank 0 has a status and an answer to a prompt of 100 blocks.
func awaitRank(t *testing.T, s *process, trust kvcastv1.Trust, blocks uint32) {
	t.Helper()
	prompt := &kvcastv1.Prompt{}
	for token := range uint32(200) {
		prompt.TokenIds = append(prompt.TokenIds, token)
	}
	client := s.Client()
	var last string
	defer func() {
		if t.Failed() {
			t.Logf("last: %s", last)
		}
	}()
	harness.WaitFor(t, func() bool {
		got, err := client.MatchPrefix(t.Context(), &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{prompt}})
		if err != nil {
			t.Fatal(err)
		}
		last = got.String()
		matches := got.GetPrompts()[0].GetMatches()
		return len(matches) == 1 && matches[0].GetTrust() == trust && matches[0].GetBlocks() == blocks
	})
}

// TestSlowReplaySocketLosesNothing ends kvcast, and starts it again while the engine answers no replay at first.
func TestSlowReplaySocketLosesNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	args := []string{"--journal", "file:" + t.TempDir(), "--worker", "name=w,model=m,connect=" + p.Endpoint() + ",replay=" + p.ReplayEndpoint()}
	s := serve(t, args...)
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	for n := range uint64(5) {
		publish(t, p, chainedBlock(n))
	}
	awaitRank(t, s, kvcastv1.Trust_TRUST_EXACT, 5)
	s.End()
	for n := range uint64(12) {
		publish(t, p, chainedBlock(5+n))
	}
	if err := p.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true, Requests: 2}); err != nil {
		t.Fatal(err)
	}
	s = serve(t, args...)
	awaitRank(t, s, kvcastv1.Trust_TRUST_EXACT, 17)
	s.AwaitSample(`kvcast_ingest_missed_batches_total{worker="w"} 0`)
}

// TestLateReplayRepairsALateJoin lets the replay socket answer after kvcast has begun to read without it.
func TestLateReplayRepairsALateJoin(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	for n := range uint64(3) {
		publish(t, p, chainedBlock(n))
	}
	if err := p.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}); err != nil {
		t.Fatal(err)
	}
	s := serve(t, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	publish(t, p, chainedBlock(3))
	s.AwaitSample(`kvcast_ingest_gaps_total{worker="w"} 0`)
	client := s.Client()
	harness.WaitFor(t, func() bool {
		got, err := client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		ranks := got.GetWorkers()[0].GetRanks()
		return len(ranks) == 1 && ranks[0].GetTrust() == kvcastv1.Trust_TRUST_DEGRADED &&
			len(ranks[0].GetReasons()) == 1 && ranks[0].GetReasons()[0] == kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE
	})
	if err := p.SetReplayFaults(simulator.ReplayFaults{}); err != nil {
		t.Fatal(err)
	}
	awaitRank(t, s, kvcastv1.Trust_TRUST_EXACT, 4)
}
