package match_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

// reference returns the response as a message, for a comparison with the encoded response.
func reference(r *match.Response) *kvcastv1.MatchPrefixResponse {
	out := &kvcastv1.MatchPrefixResponse{Position: &kvcastv1.Position{Epoch: r.Epoch, Seq: r.Seq}}
	for _, matches := range r.Matches.Prompts {
		prompt := &kvcastv1.PromptMatches{}
		for _, m := range matches {
			p := &kvcastv1.PrefixMatch{
				Worker: m.Worker, Endpoint: m.Endpoint, DpRank: m.Rank,
				Blocks: uint32(m.Blocks), Tokens: uint32(m.Blocks) * m.BlockSize, Trust: m.Trust(), Reasons: m.Reasons.List(),
				ExpectedBlocks: m.Expected, ExpectedTokens: m.Expected * m.BlockSize,
			}
			if r.WithHashes && len(m.Labels) > 0 {
				p.FetchEndpoint = fmt.Sprintf("tcp://h:%d", 5+m.RankIndex)
			}
			for tier, blocks := range m.TierBlocks {
				if blocks > 0 {
					p.Tiers = append(p.Tiers, &kvcastv1.TierPrefix{
						Tier: kvcastv1.Tier(tier + 1), Blocks: uint32(blocks), Tokens: uint32(blocks) * m.BlockSize,
					})
				}
			}
			if r.WithModel {
				p.Model = m.Model
			}
			if r.Standing != nil {
				of, reasons := r.Standing(m.Worker, m.Rank), m.Reasons
				p.DownNano, p.AgeNano = of.Down, of.Age
				if of.Down > 0 {
					reasons |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN
				}
				if of.Stale {
					reasons |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_STALE
				}
				if of.Overpredicted {
					reasons |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED
				}
				if of.Down > 0 || of.Stale || of.Overpredicted {
					p.Trust, p.Reasons = kvcastv1.Trust_TRUST_DEGRADED, reasons.List()
				}
			}
			prompt.Matches = append(prompt.Matches, p)
		}
		out.Prompts = append(out.Prompts, prompt)
	}
	return out
}

// TestResponseNamesTheGroupThatEndsAPrefix has a window that holds four blocks of six, and then a main group that does.
func TestResponseNamesTheGroupThatEndsAPrefix(t *testing.T) {
	for _, tt := range []struct {
		main, window []uint64
		want         uint32
	}{
		{[]uint64{1, 2, 3, 4, 5, 6}, []uint64{1, 2, 3, 4}, 1},
		{[]uint64{1, 2, 3, 4}, []uint64{1, 2, 3, 4, 5, 6}, 0},
	} {
		x := index.New()
		x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{
			{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}}},
			{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Groups{Groups: &kvcastv1.Groups{Unit: 4, Groups: []*kvcastv1.AttentionGroup{
				{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 4, Main: true},
				{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW, BlockSize: 4, Window: 9},
			}}}},
			{DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
				BlockHashes: tt.main, BlockSize: 4, TokensHashes: tt.main,
			}}},
			{DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_GroupStored{GroupStored: &kvcastv1.GroupStored{Group: 1, BlockHashes: tt.window}}},
		}})
		r := match.Response{Epoch: "e", Seq: 1}
		x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{BlockHashes: []uint64{1, 2, 3, 4, 5, 6}}}}, &r.Matches)
		size := r.Size()
		encoded := r.Append(nil)
		got := new(kvcastv1.MatchPrefixResponse)
		if err := proto.Unmarshal(encoded, got); err != nil || len(encoded) != size {
			t.Fatalf("%d bytes, want the size, %d: %v", len(encoded), size, err)
		}
		want := []*kvcastv1.TierPrefix{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 4, Tokens: 16, EndedByGroup: proto.Uint32(tt.want)}}
		if diff := cmp.Diff(want, got.GetPrompts()[0].GetMatches()[0].GetTiers(), protocmp.Transform()); diff != "" {
			t.Errorf("tiers (-want +got):\n%s", diff)
		}
	}
}

// TestResponseHasPools has workers of two pools, one of which has a gap and is down.
func TestResponseHasPools(t *testing.T) {
	x := index.New()
	apply := func(name string, added *kvcastv1.WorkerAdded, events ...*kvcastv1.RouterEvent) {
		added.Model, added.Ranks = "m", []uint32{0}
		events = append([]*kvcastv1.RouterEvent{{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: added}}}, events...)
		x.ApplyEntry(&kvcastv1.Entry{Seq: x.Seq() + 1, Worker: name, Model: "m", Events: events})
	}
	stored := func(hashes ...uint64) *kvcastv1.RouterEvent {
		return &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_EXTERNAL, Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
			BlockHashes: hashes, BlockSize: 4, TokensHashes: hashes,
		}}}
	}
	apply("p", &kvcastv1.WorkerAdded{Pool: true}, stored(1, 2), &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_INCOMPLETE}}})
	apply("q", &kvcastv1.WorkerAdded{Pool: true}, stored(1))
	apply("a", &kvcastv1.WorkerAdded{BlockSize: 4, Pools: []string{"p", "q"}}, stored(1))
	apply("b", &kvcastv1.WorkerAdded{BlockSize: 4, Pools: []string{"q"}})
	r := match.Response{Epoch: "e", Seq: 1, Standing: func(worker string, _ uint32) match.Standing {
		return match.Standing{Stale: worker == "p"}
	}}
	x.Match(&index.Query{Model: "m", Pools: true, Prompts: []index.Prompt{{TokensHashes: []uint64{1, 2, 3}, BlockSize: 4}, {TokensHashes: []uint64{1}}}}, &r.Matches)
	size := r.Size()
	encoded := r.Append(nil)
	got := new(kvcastv1.MatchPrefixResponse)
	if err := proto.Unmarshal(encoded, got); err != nil || len(encoded) != size {
		t.Fatalf("%d bytes, want the size, %d: %v", len(encoded), size, err)
	}
	const exact, degraded = kvcastv1.Trust_TRUST_EXACT, kvcastv1.Trust_TRUST_DEGRADED
	reasons := []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_GAP, kvcastv1.DegradedReason_DEGRADED_REASON_STALE}
	prefixes := func(tokens uint32) []*kvcastv1.PrefixMatch {
		q := &kvcastv1.PoolPrefix{Pool: "q", Tokens: 4, Blocks: 1, Trust: exact}
		return []*kvcastv1.PrefixMatch{
			{Worker: "a", Blocks: 1, Tokens: 4, Trust: exact, Tiers: []*kvcastv1.TierPrefix{{Tier: kvcastv1.Tier_TIER_EXTERNAL, Blocks: 1, Tokens: 4}},
				Pools: []*kvcastv1.PoolPrefix{{Pool: "p", Tokens: tokens, Blocks: tokens / 4, Trust: degraded, Reasons: reasons}, q}},
			{Worker: "b", Trust: exact, Pools: []*kvcastv1.PoolPrefix{q}},
		}
	}
	want := []*kvcastv1.PromptMatches{{Matches: prefixes(8)}, {Matches: prefixes(4)}}
	if diff := cmp.Diff(want, got.GetPrompts(), protocmp.Transform()); diff != "" {
		t.Errorf("prompts (-want +got):\n%s", diff)
	}
}

// TestResponseEqualsGeneratedCode also reuses the memory of a response.
func TestResponseEqualsGeneratedCode(t *testing.T) {
	testclass.WithoutRace(t)
	var r match.Response
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{"", "w", "vllm-0", string(make([]byte, 300))})
		count := rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 1<<20))
		one := rapid.Custom(func(t *rapid.T) index.Match {
			m := index.Match{
				Worker: name.Draw(t, "worker"), Model: name.Draw(t, "model"), Endpoint: name.Draw(t, "endpoint"), Rank: rapid.Uint32().Draw(t, "rank"),
				Blocks: count.Draw(t, "blocks"), BlockSize: rapid.SampledFrom([]uint32{0, 1, 16, 1 << 31}).Draw(t, "block size"),
				Reasons: index.Reasons(rapid.Uint32Range(0, 127).Draw(t, "reasons")) << 1, GroupsOmitted: rapid.Bool().Draw(t, "groups"),
				Expected: rapid.SampledFrom([]uint32{0, 1, 1 << 31}).Draw(t, "expected"), RankIndex: rapid.Uint32Range(0, 1000).Draw(t, "rank index"),
			}
			if rapid.Bool().Draw(t, "fetch") {
				m.Labels = map[string]string{match.FetchLabel: "tcp://h:5"}
			}
			for tier := range m.TierBlocks {
				m.TierBlocks[tier] = count.Draw(t, "tier")
			}
			return m
		})
		r.Epoch, r.Seq = name.Draw(t, "epoch"), rapid.Uint64().Draw(t, "seq")
		r.Matches.Prompts = rapid.SliceOfN(rapid.SliceOfN(one, 0, 4), 1, 4).Draw(t, "prompts")
		r.WithModel, r.WithHashes = rapid.Bool().Draw(t, "with model"), rapid.Bool().Draw(t, "with hashes")
		if r.Standing = nil; rapid.Bool().Draw(t, "some are not up to date") {
			r.Standing = func(_ string, rank uint32) match.Standing {
				return match.Standing{Down: uint64(rank%3) << (rank % 60), Age: uint64(rank%5) << (rank % 50), Stale: rank%2 == 0, Overpredicted: rank%7 == 0}
			}
		}
		size := r.Size()
		encoded := r.Append(nil)
		if len(encoded) != size {
			t.Errorf("got %d bytes, want the size, %d", len(encoded), size)
		}
		want, got := reference(&r), new(kvcastv1.MatchPrefixResponse)
		if err := proto.Unmarshal(encoded, got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("response (-want +got):\n%s", diff)
		}
		id := rapid.Uint64().Draw(t, "id")
		head := match.AppendID(nil, id, size)
		if len(head) > match.MaxIDSize {
			t.Errorf("got %d bytes before the response, want at most %d", len(head), match.MaxIDSize)
		}
		streamed := new(kvcastv1.MatchPrefixesResponse)
		if err := proto.Unmarshal(append(head, encoded...), streamed); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&kvcastv1.MatchPrefixesResponse{Id: id, Response: want}, streamed, protocmp.Transform()); diff != "" {
			t.Errorf("streamed response (-want +got):\n%s", diff)
		}
	})
}

// BenchmarkResponse encodes an answer with eight matches, as a request with a limit has.
func BenchmarkResponse(b *testing.B) {
	var r match.Response
	r.Epoch, r.Seq = "0123456789abcdef", 1<<30
	var matches []index.Match
	for n := range uint32(8) {
		m := index.Match{Worker: "vllm-0", Endpoint: "10.0.0.1:8000", Rank: n, Blocks: 32, BlockSize: 16}
		m.TierBlocks[0] = 32
		matches = append(matches, m)
	}
	r.Matches.Prompts = [][]index.Match{matches}
	var out []byte
	b.ReportAllocs()
	for b.Loop() {
		r.Size()
		out = r.Append(out[:0])
	}
}
