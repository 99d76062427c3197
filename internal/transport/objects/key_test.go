package objects

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	t.Parallel()
	const (
		digest = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
		last   = 0x8899aabbccddeeff
		first  = 0x0011223344556677
	)
	for _, c := range []struct {
		key       string
		namespace string
		shard     string
		group     uint32
		hash      uint64
		attention bool
	}{
		{"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@" + digest, "m", "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0", 0, last, true},
		{"team@Qwen3@store_tp:4@store_pp:1@store_format:heads@tp_rank:3@pcp0@dcp0@pp_rank:1@group:12@8899aabbccddeeff", "team@Qwen3@store_tp:4@store_pp:1@store_format:heads", "@tp_rank:3@pcp0@dcp0@pp_rank:1@group:12", 12, last, true},
		{digest + "_0_k", "", "_0_k", 0, first, true},
		{"my_model_" + digest + "_3_1_v", "my_model", "_3_1_v", 0, first, true},
		{digest + "__k", "", "__k", 0, first, true},
		{digest + "_dcp1_cp0_2_k", "", "_dcp1_cp0_2_k", 0, first, true},
		{digest + "_0_draft_k", "", "_0_draft_k", 0, first, false},
		{digest + "_0_temporal", "", "_0_temporal", 0, first, false},
		{digest + "_0", "", "_0", 0, first, false},
	} {
		got, ok := parse([]byte(c.key))
		if !ok || string(got.namespace) != c.namespace || string(got.shard) != c.shard || got.group != c.group || got.hash != c.hash || got.isAttention() != c.attention {
			t.Errorf("%s: %q %q group %d hash %x, attention %v, %v; want %+v", c.key, got.namespace, got.shard, got.group, got.hash, got.isAttention(), ok, c)
		}
	}
	for _, key := range []string{
		"", "@", "other objects/1", "sglang_mooncake_store_warmup_key00112233445566778899aabbccddeeff", digest, digest[:62] + "_0_k", strings.ToUpper(digest) + "_0_k",
		"m@tp_rank:0@pcp0@dcp0@pp_rank:0@" + digest, "m@pcp0@dcp0@group:0@" + digest, "@tp_rank:0@group:0@" + digest,
		"m@tp_rank:0@group:0@0011", "m@tp_rank:0@group:0@" + digest[:15], "m@tp_rank:0@group:0@" + digest[:17], "m@tp_rank:0@group:x@" + digest,
		"m@tp_rank:0@group:4294967296@" + digest, "m@tp_rank:0@group:0@" + strings.Repeat("0", 130), "m@group:0@tp_rank:0@" + digest,
	} {
		if got, ok := parse([]byte(key)); ok {
			t.Errorf("%q is of block %x", key, got.hash)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@8899aabbccddeeff")
	f.Add(strings.Repeat("0", 64) + "_0_k")
	f.Fuzz(func(t *testing.T, text string) {
		k, ok := parse([]byte(text))
		if ok {
			k.isAttention()
		}
		if ok && (!strings.HasPrefix(text, string(k.namespace)) || !strings.Contains(text, string(k.shard))) {
			t.Fatalf("%q: namespace %q, shard %q", text, k.namespace, k.shard)
		}
	})
}
