package server_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// matchOf returns a request for a prompt of tokens hashes.
func matchOf(hashes ...uint64) *kvcastv1.MatchPrefixRequest {
	return &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokensHashes: hashes}}}
}

// matchStream is a MatchPrefixes stream.
type matchStream struct {
	kvcastv1.RouterEventService_MatchPrefixesClient
	t *testing.T
}

// matchPrefixes opens a stream, which ends with the test.
func (h *fixture) matchPrefixes() *matchStream {
	h.t.Helper()
	stream, err := h.client.MatchPrefixes(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	return &matchStream{stream, h.t.(*testing.T)}
}

func (s *matchStream) send(id uint64, req *kvcastv1.MatchPrefixRequest) {
	s.t.Helper()
	if err := s.Send(&kvcastv1.MatchPrefixesRequest{Id: id, Request: req}); err != nil {
		s.t.Fatal(err)
	}
}

// match sends a request and returns the answer.
func (s *matchStream) match(req *kvcastv1.MatchPrefixRequest) *kvcastv1.MatchPrefixResponse {
	s.t.Helper()
	s.send(7, req)
	m, err := s.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
	if m.GetId() != 7 {
		s.t.Errorf("got id %d, want 7", m.GetId())
	}
	return m.GetResponse()
}

// match sends a request with MatchPrefix and with MatchPrefixes, checks that the answers are equal, and returns one.
func (h *fixture) match(req *kvcastv1.MatchPrefixRequest) *kvcastv1.MatchPrefixResponse {
	h.t.Helper()
	unary, err := h.client.MatchPrefix(h.t.Context(), req)
	if err != nil {
		h.t.Fatal(err)
	}
	streamed := h.matchPrefixes().match(req)
	if diff := cmp.Diff(unary, streamed, protocmp.Transform(), protocmp.IgnoreFields(&kvcastv1.PrefixMatch{}, "down_nano")); diff != "" {
		h.t.Errorf("MatchPrefixes (-MatchPrefix +MatchPrefixes):\n%s", diff)
	}
	return unary
}

// metric returns the value of a metric of the server.
func (h *fixture) metric(name string, labels ...string) float64 {
	h.t.Helper()
	return harness.Gather(h.t, h.registry).Value(h.t, name, labels...)
}

// matchBytes returns the memory of the match requests in progress.
func (h *fixture) matchBytes() float64 {
	h.t.Helper()
	return h.metric("kvcast_budget_used", "resource", "match_bytes")
}

func TestMatchPrefixAnswersPromptsInEachForm(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	base, lora, salted := client.TokensHashes(tokens, 2, "", ""), client.TokensHashes(tokens, 2, "l", ""), client.TokensHashes(tokens, 2, "", "s")
	eagle := kvblock.AppendTokensHashes(nil, tokens, 2, kvblock.Seed("", ""), true, nil)
	chain := func(tier kvblock.Tier, tokensHashes []uint64, blocks ...uint64) wire.Event {
		return wire.Event{Kind: wire.KindStored, Tier: tier, BlockHashes: blocks, TokensHashes: tokensHashes[:len(blocks)], BlockSize: 2}
	}
	for _, w := range []struct {
		name   string
		model  string
		events []wire.Event
	}{
		{"base", "m", []wire.Event{chain(kvblock.TierDevice, base, 1, 2), chain(kvblock.TierDisk, base, 1, 2, 3)}},
		{"lora", "m", []wire.Event{chain(kvblock.TierDevice, lora, 11)}},
		{"salt", "m", []wire.Event{chain(kvblock.TierDevice, salted, 21)}},
		{"eagle", "m", []wire.Event{chain(kvblock.TierDevice, eagle, 31, 32, 33)}},
		{"other", "n", []wire.Event{chain(kvblock.TierDevice, base, 1)}},
		{"four", "m", []wire.Event{{
			Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{41, 42}, TokensHashes: client.TokensHashes(tokens, 4, "", ""), BlockSize: 4,
		}}},
	} {
		h.batch(h.Pipeline.AddWorker(feed.Worker{Name: w.name, Model: w.model, Endpoint: w.name + ":80"}), w.events...)
	}
	for _, tt := range []struct {
		name   string
		prompt *kvcastv1.Prompt
		change func(*kvcastv1.MatchPrefixRequest)
		want   string // WORKER BLOCKS/TOKENS, comma-separated
	}{
		{"token ids", &kvcastv1.Prompt{TokenIds: tokens}, nil, "base 3/6, four 2/8"},
		{"part of a block", &kvcastv1.Prompt{TokenIds: tokens[:7]}, nil, "base 3/6, four 1/4"},
		{"a block size", &kvcastv1.Prompt{TokenIds: tokens, BlockSize: 4}, nil, "four 2/8"},
		{"LoRA", &kvcastv1.Prompt{TokenIds: tokens, LoraName: "l"}, nil, "lora 1/2"},
		{"a salt", &kvcastv1.Prompt{TokenIds: tokens, CacheSalt: "s"}, nil, "salt 1/2"},
		{"EAGLE", &kvcastv1.Prompt{TokenIds: tokens, Eagle: true}, nil, "eagle 3/6"},
		{"tokens hashes", &kvcastv1.Prompt{TokensHashes: base[:2]}, nil, "base 2/4"},
		{"block hashes", &kvcastv1.Prompt{BlockHashes: []uint64{11, 12}}, nil, "lora 1/2"},
		{"block hashes of another block size", &kvcastv1.Prompt{BlockHashes: []uint64{11}, BlockSize: 16}, nil, ""},
		{"a model", &kvcastv1.Prompt{TokenIds: tokens}, func(r *kvcastv1.MatchPrefixRequest) { r.Model = "n" }, "other 1/2"},
		{"an unknown model", &kvcastv1.Prompt{TokenIds: tokens}, func(r *kvcastv1.MatchPrefixRequest) { r.Model = "absent" }, ""},
		{"all models", &kvcastv1.Prompt{TokenIds: tokens}, func(r *kvcastv1.MatchPrefixRequest) { r.Model = "" }, "base 3/6, four 2/8, other 1/2"},
		{"workers", &kvcastv1.Prompt{TokenIds: tokens}, func(r *kvcastv1.MatchPrefixRequest) { r.Workers = []string{"four", "absent"} }, "four 2/8"},
		{"a limit", &kvcastv1.Prompt{TokenIds: tokens}, func(r *kvcastv1.MatchPrefixRequest) { r.Limit = 1 }, "base 3/6"},
		{"another prompt", &kvcastv1.Prompt{TokenIds: []uint32{9, 9}}, nil, ""},
	} {
		req := &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{tt.prompt, tt.prompt}}
		if tt.change != nil {
			tt.change(req)
		}
		answer := h.match(req)
		if p, b := answer.GetPosition(), h.Journal.Bounds(); p.GetEpoch() != b.Epoch || p.GetSeq() != b.Newest {
			t.Errorf("%s: got position %v, want %d of %s", tt.name, p, b.Newest, b.Epoch)
		}
		if n := len(answer.GetPrompts()); n != 2 {
			t.Fatalf("%s: got the matches of %d prompts, want 2", tt.name, n)
		}
		for _, p := range answer.GetPrompts() {
			var got []string
			for _, m := range p.GetMatches() {
				got = append(got, fmt.Sprintf("%s %d/%d", m.GetWorker(), m.GetBlocks(), m.GetTokens()))
			}
			if text := strings.Join(got, ", "); text != tt.want {
				t.Errorf("%s: got %q, want %q", tt.name, text, tt.want)
			}
		}
	}
	want := &kvcastv1.PrefixMatch{
		Worker: "base", Endpoint: "base:80", Blocks: 3, Tokens: 6, Trust: kvcastv1.Trust_TRUST_EXACT, Model: "m",
		Tiers: []*kvcastv1.TierPrefix{
			{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 2, Tokens: 4}, {Tier: kvcastv1.Tier_TIER_DISK, Blocks: 3, Tokens: 6},
		},
	}
	answer := h.match(&kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: tokens}}})
	if diff := cmp.Diff(want, answer.GetPrompts()[0].GetMatches()[0], protocmp.Transform()); diff != "" {
		t.Errorf("match (-want +got):\n%s", diff)
	}
}

// TestMatchPrefixAnswersWithTrust covers each trust, and each reason that a router can act on.
func TestMatchPrefixAnswersWithTrust(t *testing.T) {
	t.Parallel()
	sources := map[string][]*kvcastv1.SourceStatus{
		"down": {{DpRank: 0, DownNano: uint64(time.Minute)}, {DpRank: 0, DownNano: uint64(time.Hour)}, {DpRank: 1, DownNano: 1}},
		"gap":  {{DpRank: 0}, {DpRank: 1, DownNano: 1}},
	}
	h := overTCP(t, server.Config{Sources: func() map[string][]*kvcastv1.SourceStatus { return sources }}, journal.Config{})
	const exact, upperBound, degraded = kvcastv1.Trust_TRUST_EXACT, kvcastv1.Trust_TRUST_UPPER_BOUND, kvcastv1.Trust_TRUST_DEGRADED
	stored := wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1}, TokensHashes: []uint64{1}, BlockSize: 16}
	want := []struct {
		worker  string
		trust   kvcastv1.Trust
		reasons []kvcastv1.DegradedReason
	}{
		{"conflict", degraded, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT}},
		{"down", degraded, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN}},
		{"exact", exact, nil},
		{"gap", degraded, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_GAP}},
		{"hybrid", upperBound, nil},
		{"late", degraded, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE}},
		{"restart", degraded, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_POSSIBLE_RESTART}},
	}
	gaps := map[string]feed.GapReason{
		"conflict": feed.GapAmbiguousPublisher, "gap": feed.GapReplayForgotten, "late": feed.GapJoinedLate, "restart": feed.GapPossibleRestart,
	}
	for _, w := range want {
		lane := h.Pipeline.AddWorker(feed.Worker{Name: w.worker, Model: "m"})
		if why, ok := gaps[w.worker]; ok {
			lane.Gap(feed.Gap{Reason: why})
		}
		lane.Batch(&feed.Batch{EngineTime: 1, IngestTime: 1, Events: []wire.Event{stored}, GroupsOmitted: w.worker == "hybrid"})
	}
	matches := h.match(matchOf(1)).GetPrompts()[0].GetMatches()
	list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range want {
		m, r := matches[i], list.GetWorkers()[i].GetRanks()[0]
		if m.GetWorker() != w.worker || m.GetTrust() != w.trust || !slices.Equal(m.GetReasons(), w.reasons) {
			t.Errorf("got %s: %v %v, want %v", m.GetWorker(), m.GetTrust(), m.GetReasons(), w)
		}
		if r.GetTrust() != w.trust || !slices.Equal(r.GetReasons(), w.reasons) {
			t.Errorf("ListWorkers, %s: got %v %v, want %v", w.worker, r.GetTrust(), r.GetReasons(), w)
		}
		for _, down := range []uint64{m.GetDownNano(), r.GetDownNano()} {
			if (w.worker == "down") != (down >= uint64(time.Hour)) {
				t.Errorf("%s: down for %v", w.worker, time.Duration(down))
			}
		}
	}
}

// TestSourcesDownAreReadAgain changes the status of a source.
func TestSourcesDownAreReadAgain(t *testing.T) {
	t.Parallel()
	down := make(chan uint64, 1)
	current := uint64(0)
	h := overTCP(t, server.Config{Sources: func() map[string][]*kvcastv1.SourceStatus {
		select {
		case current = <-down:
		default:
		}
		return map[string][]*kvcastv1.SourceStatus{"w": {{DownNano: current}}}
	}}, journal.Config{})
	h.addWorker()
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1}, TokensHashes: []uint64{1}, BlockSize: 16})
	stream := h.matchPrefixes()
	for _, want := range []uint64{5, 0, 5} {
		down <- want
		for (stream.match(matchOf(1)).GetPrompts()[0].GetMatches()[0].GetDownNano() > 0) != (want > 0) {
		}
	}
}

func TestMatchPrefixWaitsForAPosition(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	stored := func(n uint64) wire.Event {
		return wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{n}, TokensHashes: []uint64{n}, BlockSize: 16}
	}
	for seq := uint64(2); seq < 5; seq++ {
		before, answered := h.matchBytes(), make(chan *kvcastv1.MatchPrefixResponse)
		req := matchOf(seq)
		req.After, req.MaxWaitNano = &kvcastv1.Position{Epoch: h.Journal.Bounds().Epoch, Seq: seq}, uint64(10*time.Second)
		go func() {
			answer, err := h.client.MatchPrefix(t.Context(), req)
			if err != nil {
				t.Error(err)
			}
			answered <- answer
		}()
		for h.matchBytes() == before { // the call has not arrived yet
		}
		h.batch(h.lane, stored(seq))
		answer := <-answered
		if answer.GetPosition().GetSeq() < seq || len(answer.GetPrompts()[0].GetMatches()) != 1 {
			t.Errorf("after %d: got %v", seq, answer)
		}
		if n := len(h.match(req).GetPrompts()[0].GetMatches()); n != 1 {
			t.Errorf("after %d, which is applied: got %d matches", seq, n)
		}
	}
}

// TestMatchPrefixesAnswersInOrder sends many requests before it reads an answer.
func TestMatchPrefixesAnswersInOrder(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{1, 2}, BlockSize: 16})
	stream := h.matchPrefixes()
	const requests = 300
	for i := range uint64(requests) {
		stream.send(i*i, matchOf(1, 2, 3)) // ids need not be unique or ascending
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(requests) {
		m, err := stream.Recv()
		if err != nil || m.GetId() != i*i || m.GetResponse().GetPrompts()[0].GetMatches()[0].GetBlocks() != 2 {
			t.Fatalf("answer %d: got %v, error %v", i, m, err)
		}
	}
	if m, err := stream.Recv(); err == nil || err.Error() != "EOF" {
		t.Errorf("after the last answer: got %v, error %v", m, err)
	}
}

func TestMatchesAreCounted(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{1, 2}, BlockSize: 16})
	req := matchOf(1, 2, 3)
	req.Prompts = append(req.Prompts, &kvcastv1.Prompt{TokensHashes: []uint64{9}})
	h.match(req)
	for name, want := range map[string]float64{
		"kvcast_server_matched_prompts_total": 4, "kvcast_server_matches_total": 2, "kvcast_server_match_seconds": 2,
	} {
		if got := h.metric(name); got != want {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	// counted are the tokens and blocks that were queried and matched of a model.
	counted := func(model string) (all [4]float64) {
		for i, name := range []string{"queried_tokens", "queried_blocks", "matched_tokens", "matched_blocks"} {
			all[i] = h.metric("kvcast_server_"+name+"_total", "model", model)
		}
		return all
	}
	if got, want := counted(""), [...]float64{2 * 4 * 16, 2 * 4, 2 * 2 * 16, 2 * 2}; got != want {
		t.Errorf("without a model: got %v, want %v", got, want)
	}
	before := counted("")
	for _, prompt := range []*kvcastv1.Prompt{
		{TokenIds: make([]uint32, 40)}, {TokenIds: make([]uint32, 40), BlockSize: 8}, {BlockHashes: []uint64{1}}, {TokensHashes: []uint64{1, 2, 3}, BlockSize: 16},
	} {
		h.match(&kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{prompt}})
	}
	if got, want := counted("m"), [...]float64{2 * (40 + 40 + 16 + 48), 2 * (2 + 5 + 1 + 3), 2 * (16 + 32), 2 * (1 + 2)}; got != want {
		t.Errorf("model m: got %v, want %v", got, want)
	}
	h.match(&kvcastv1.MatchPrefixRequest{Model: "absent", Prompts: []*kvcastv1.Prompt{{TokenIds: make([]uint32, 40)}}})
	if got := counted(""); got != before {
		t.Errorf("of a model without workers: got %v, want %v", got, before)
	}
}

// TestManyCallsOverOneConnection starts more calls at once than are received at a time, and fewer than are admitted, with more
// data than the connection's window. The headers of a call may precede the requests of all others.
func TestManyCallsOverOneConnection(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{ReceiveTimeout: harness.Timeout}}, journal.Config{})
	req := &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: make([]uint32, 13_000)}}}
	for i := range req.GetPrompts()[0].GetTokenIds() {
		req.Prompts[0].TokenIds[i] = 1 << 20 // three bytes
	}
	const calls = 500
	ended := make(chan error, calls)
	for range calls {
		go func() {
			_, err := h.client.MatchPrefix(t.Context(), req)
			ended <- err
		}()
	}
	for range calls {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}
