package match_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

func TestQueryOfARequest(t *testing.T) {
	var q match.Query
	for range 2 { // the second time with reused memory
		q.Set(&kvcastv1.MatchPrefixRequest{
			Model: "m", Limit: 3, Workers: []string{"a", "b"}, MaxWaitNano: 5, After: &kvcastv1.Position{Seq: 9},
			Prompts: []*kvcastv1.Prompt{
				{TokenIds: []uint32{1, 2}, LoraName: "l", CacheSalt: "s", Eagle: true, BlockSize: 2},
				{TokensHashes: []uint64{3}},
				{BlockHashes: []uint64{4}, BlockSize: 16},
			},
		})
		if violations := q.Check(); violations != nil {
			t.Fatal(violations)
		}
		want := index.Query{Model: "m", Limit: 3, MaxLookups: match.MaxLookups, Prompts: []index.Prompt{
			{TokenIDs: []uint32{1, 2}, LoRA: "l", Salt: "s", Eagle: true, BlockSize: 2},
			{TokensHashes: []uint64{3}},
			{BlockHashes: []uint64{4}, BlockSize: 16},
		}}
		if diff := cmp.Diff(want, q.Query, cmpopts.IgnoreFields(index.Query{}, "Worker")); diff != "" {
			t.Errorf("query (-want +got):\n%s", diff)
		}
		if !q.Worker("a") || !q.Worker("b") || q.Worker("c") {
			t.Error("got other workers than a and b")
		}
		if q.MaxWait() != 5 || q.After.GetSeq() != 9 || q.Bytes < 16<<10 {
			t.Errorf("got a wait of %v for %v, and %d bytes", q.MaxWait(), q.After, q.Bytes)
		}
		q.Clear()
		if q.Worker != nil || q.After != nil || q.Prompts[0].TokenIDs != nil {
			t.Errorf("after Clear: got %+v", q)
		}
		q.Set(&kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{1}}}})
		if q.Worker != nil || q.MaxWait() != time.Second {
			t.Errorf("of a small request: got workers %v and a wait of %v", q.Worker != nil, q.MaxWait())
		}
	}
}

func TestInvalidRequests(t *testing.T) {
	tokens := func(n int) *kvcastv1.Prompt { return &kvcastv1.Prompt{TokenIds: make([]uint32, n)} }
	request := func(prompts ...*kvcastv1.Prompt) *kvcastv1.MatchPrefixRequest {
		return &kvcastv1.MatchPrefixRequest{Prompts: prompts}
	}
	many := make([]*kvcastv1.Prompt, 65)
	for i := range many {
		many[i] = tokens(1)
	}
	for _, tt := range []struct {
		req  *kvcastv1.MatchPrefixRequest
		want string // FIELD: DESCRIPTION; empty: the request is valid
	}{
		{request(), "prompts: 0 prompts are not allowed: want 1 to 64"},
		{request(many[:64]...), ""},
		{request(many...), "prompts: more than 64 prompts are not allowed: want 1 to 64"},
		{request(tokens(1), tokens(0)), "prompts[1].token_ids: is empty: want token_ids, tokens_hashes or block_hashes"},
		{request(nil), "prompts[0].token_ids: is empty: want token_ids, tokens_hashes or block_hashes"},
		{request(tokens(1 << 18)), ""},
		{request(tokens(1<<18 + 1)), "prompts[0].token_ids: 262145 elements are too many: at most 262144 are allowed"},
		{request(&kvcastv1.Prompt{TokensHashes: make([]uint64, 1<<16)}), ""},
		{request(&kvcastv1.Prompt{TokensHashes: make([]uint64, 1<<16+1)}), "prompts[0].tokens_hashes: 65537 elements are too many: at most 65536 are allowed"},
		{request(&kvcastv1.Prompt{BlockHashes: make([]uint64, 1<<16+1)}), "prompts[0].block_hashes: 65537 elements are too many: at most 65536 are allowed"},
		{
			request(&kvcastv1.Prompt{TokenIds: []uint32{1}, BlockHashes: []uint64{1}}),
			"prompts[0].block_hashes: is given with token_ids: want one of token_ids, tokens_hashes and block_hashes",
		},
		{
			request(&kvcastv1.Prompt{TokensHashes: []uint64{1}, BlockHashes: []uint64{1}}),
			"prompts[0].block_hashes: is given with tokens_hashes: want one of token_ids, tokens_hashes and block_hashes",
		},
		{request(&kvcastv1.Prompt{TokensHashes: []uint64{1}, LoraName: "l"}), "prompts[0].lora_name: is not allowed with tokens_hashes, which already depend on it"},
		{request(&kvcastv1.Prompt{BlockHashes: []uint64{1}, CacheSalt: "s"}), "prompts[0].cache_salt: is not allowed with block_hashes, which already depend on it"},
		{request(&kvcastv1.Prompt{TokensHashes: []uint64{1}, Eagle: true}), "prompts[0].eagle: is not allowed with tokens_hashes, which already depend on it"},
		{&kvcastv1.MatchPrefixRequest{Prompts: many[:1], Workers: make([]string, 10_001)}, "workers: 10001 names are too many: at most 10000 are allowed"},
		{&kvcastv1.MatchPrefixRequest{Prompts: many[:1], MaxWaitNano: 10_000_000_000}, ""},
		{&kvcastv1.MatchPrefixRequest{Prompts: many[:1], MaxWaitNano: 10_000_000_001}, "max_wait_nano: 10000000001 is not allowed: want at most 10000000000 (10s)"},
		{
			&kvcastv1.MatchPrefixRequest{Workers: make([]string, 10_001), Prompts: []*kvcastv1.Prompt{{}}},
			"workers: 10001 names are too many: at most 10000 are allowed; prompts[0].token_ids: is empty: want token_ids, tokens_hashes or block_hashes",
		},
	} {
		var got []string
		var q match.Query
		q.Set(tt.req)
		for _, v := range q.Check() {
			got = append(got, v.GetField()+": "+v.GetDescription())
		}
		if text := strings.Join(got, "; "); text != tt.want {
			t.Errorf("got  %q\nwant %q", text, tt.want)
		}
	}
}
