package wire_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// stored is a store of one-token blocks with further fields.
func stored(fields obj, hashes ...any) obj {
	tokens := make([]any, len(hashes))
	for k := range tokens {
		tokens[k] = k
	}
	ev := obj{"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": 1}
	for k, v := range fields {
		ev[k] = v
	}
	return ev
}

func removed(fields obj, hashes ...any) obj {
	ev := obj{"type": "BlockRemoved", "block_hashes": hashes}
	for k, v := range fields {
		ev[k] = v
	}
	return ev
}

// counted returns Counts with one event for each reason.
func counted(reasons ...wire.Reason) wire.Counts {
	var c wire.Counts
	for _, r := range reasons {
		c[r]++
	}
	return c
}

// TestAdmit passes events to new Rules, and compares the raw ids of the admitted events, and
// the counts of the others. Dropped events have raw ids, ignored events do not.
func TestAdmit(t *testing.T) {
	good := stored(nil, 1)
	longest := strings.Repeat("n", 1024)
	many := make([]any, 0, 200)
	for k := range 200 {
		many = append(many, k+1)
	}
	for _, c := range []struct {
		name   string
		events []any
		ids    []uint64
		counts wire.Counts
	}{
		{"good", []any{good, removed(nil, 1), obj{"type": "AllBlocksCleared"}}, []uint64{1, 2, 3}, wire.Counts{}},
		{"unknown tag", []any{obj{"type": "New"}, good}, []uint64{1}, counted(wire.ReasonUnknownTag)},
		{"unknown medium", []any{stored(obj{"medium": "TAPE"}, 1), good}, []uint64{1}, counted(wire.ReasonUnknownMedium)},
		{"unknown medium of a remove", []any{removed(obj{"medium": "TAPE"}, 1), good}, []uint64{1}, counted(wire.ReasonUnknownMedium)},
		{"remote", []any{stored(obj{"locality": "REMOTE"}, 1), removed(obj{"locality": "REMOTE"}, 1), good}, []uint64{1},
			counted(wire.ReasonNonLocalLocality, wire.ReasonNonLocalLocality)},
		{"local", []any{stored(obj{"locality": "LOCAL"}, 1)}, []uint64{1}, wire.Counts{}},
		{"ownership", []any{stored(obj{"ownership": "theirs"}, 1), stored(obj{"ownership": "kvcr"}, 1)}, []uint64{1},
			counted(wire.ReasonUnsupportedOwnership)},
		{"sliding window", []any{stored(obj{"kv_cache_spec_kind": "sliding_window"}, 1), good}, []uint64{1},
			counted(wire.ReasonNonMainAttentionGroup)},
		{"unknown kind", []any{stored(obj{"kv_cache_spec_kind": "new"}, 1)}, nil, counted(wire.ReasonNonMainAttentionGroup)},
		{"main attention", []any{
			stored(obj{"kv_cache_spec_kind": "full_attention"}, 1),
			stored(obj{"kv_cache_spec_kind": "mla_attention"}, 1),
			stored(obj{"kv_cache_spec_kind": "sink_full_attention"}, 1),
		}, []uint64{1, 2, 3}, wire.Counts{}},
		{"group never seen", []any{removed(obj{"group_idx": 0}, 1), removed(obj{"group_idx": 1}, 1)}, []uint64{1},
			counted(wire.ReasonNonMainAttentionGroup)},
		{"group learned", []any{
			stored(obj{"kv_cache_spec_kind": "sliding_window", "group_idx": 0}, 1),
			stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 1}, 1),
			removed(obj{"group_idx": 0}, 1),
			removed(obj{"group_idx": 1}, 1),
			stored(obj{"group_idx": 1}, 2),
		}, []uint64{1, 2, 3}, counted(wire.ReasonNonMainAttentionGroup, wire.ReasonNonMainAttentionGroup)},
		{"group never seen, beside the main group", []any{
			stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 3}, 1),
			removed(obj{"group_idx": 0}, 1),
			stored(obj{"group_idx": 0}, 2),
			removed(obj{"group_idx": 3}, 1),
		}, []uint64{1, 2}, counted(wire.ReasonNonMainAttentionGroup, wire.ReasonNonMainAttentionGroup)},
		{"group never seen, beside another one", []any{
			stored(obj{"kv_cache_spec_kind": "mamba", "group_idx": 1}, 1),
			removed(obj{"group_idx": 0}, 1),
		}, []uint64{1}, counted(wire.ReasonNonMainAttentionGroup)},
		{"the main group has another kind since", []any{
			stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 3}, 1),
			stored(obj{"kv_cache_spec_kind": "mamba", "group_idx": 3}, 1),
			removed(obj{"group_idx": 0}, 1),
		}, []uint64{1, 2}, counted(wire.ReasonNonMainAttentionGroup)},
		{"the event's kind overrides the kind of the group", []any{
			stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 1}, 1),
			stored(obj{"kv_cache_spec_kind": "mamba", "group_idx": 1}, 1),
			removed(obj{"group_idx": 1}, 1),
		}, []uint64{1}, counted(wire.ReasonNonMainAttentionGroup, wire.ReasonNonMainAttentionGroup)},
		{"disk and external skip the group rule", []any{
			stored(obj{"kv_cache_spec_kind": "mamba", "medium": "DISK"}, 1),
			removed(obj{"group_idx": 7, "medium": "external"}, 1),
			removed(obj{"group_idx": 7, "medium": "CPU"}, 1),
		}, []uint64{1, 2}, counted(wire.ReasonNonMainAttentionGroup)},
		{"bad event", []any{7, good, []any{}}, []uint64{2}, counted(wire.ReasonBadEventShape, wire.ReasonBadTag)},
		{"bad and ignored events between", []any{good, obj{"type": "New"}, []any{"BlockStored"}, good, obj{}, good}, []uint64{1, 3, 5},
			counted(wire.ReasonUnknownTag, wire.ReasonMissingField, wire.ReasonBadTag)},
		{"block size", []any{good, stored(obj{"block_size": 2}, 1), good}, []uint64{1, 3}, counted(wire.ReasonBlockSizeMismatch)},
		{"tokens but no block size", []any{stored(obj{"block_size": 0}, 1), good}, []uint64{2}, counted(wire.ReasonBlockSizeMismatch)},
		{"ignored store teaches no block size", []any{stored(obj{"medium": "TAPE", "block_size": 2}, 1), good}, []uint64{1},
			counted(wire.ReasonUnknownMedium)},
		{"hash only", []any{good, stored(obj{"block_size": 0, "token_ids": []any{}}, 1, 2)}, []uint64{1, 2}, wire.Counts{}},
		{"hash only repeats", []any{stored(obj{"block_size": 0, "token_ids": []any{}}, 1, 1), good}, []uint64{2},
			counted(wire.ReasonRepeatedHash)},
		{"tokens short of one block", []any{stored(obj{"token_ids": []any{1, 2}}, 1, 2, 3), good}, []uint64{1, 2},
			counted(wire.ReasonTokensShort)},
		{"tokens short of all blocks", []any{stored(obj{"token_ids": []any{1}, "block_size": 2}, 1)}, nil, counted(wire.ReasonTokensShort)},
		{"hash only with a block size", []any{stored(obj{"token_ids": []any{}}, 1), good}, []uint64{1, 2}, wire.Counts{}},
		{"hash only with another block size", []any{good, stored(obj{"token_ids": []any{}, "block_size": 16}, 1)}, []uint64{1, 2}, wire.Counts{}},
		{"tokens of half a block in excess", []any{stored(obj{"token_ids": []any{1, 2, 3}, "block_size": 2}, 1)}, []uint64{1}, wire.Counts{}},
		{"tokens of a block in excess: it is unknown which is named", []any{stored(obj{"token_ids": []any{1, 2, 3}}, 1)}, []uint64{1},
			counted(wire.ReasonUnknownContent)},
		{"no blocks", []any{stored(nil)}, []uint64{1}, wire.Counts{}},
		{"hash repeats", []any{stored(nil, 1, 2, 1), good}, []uint64{2}, counted(wire.ReasonRepeatedHash)},
		{"hash repeats among many", []any{stored(nil, append([]any{200}, many...)...), stored(nil, many...)}, []uint64{2},
			counted(wire.ReasonRepeatedHash)},
		{"hash is the parent", []any{stored(obj{"parent_block_hash": 2}, 1, 2), good}, []uint64{2}, counted(wire.ReasonRepeatedHash)},
		{"names of 1,024 bytes", []any{stored(obj{"lora_name": longest}, 1), stored(obj{"cache_salt": longest}, 1),
			stored(obj{"extra_keys": []any{[]any{"dynamo-cache-salt:" + longest}}}, 1)}, []uint64{1, 2, 3}, wire.Counts{}},
		{"LoRA name too long", []any{stored(obj{"lora_name": longest + "x"}, 1), good}, []uint64{2}, counted(wire.ReasonNameTooLong)},
		{"salt too long", []any{stored(obj{"cache_salt": longest + "x"}, 1), good}, []uint64{2}, counted(wire.ReasonNameTooLong, wire.ReasonUnknownContent)},
		{"salt among extra keys too long", []any{stored(obj{"extra_keys": []any{[]any{"dynamo-cache-salt:" + longest + "x"}}}, 1), good},
			[]uint64{2}, counted(wire.ReasonNameTooLong, wire.ReasonUnknownContent)},
		{"salt too long of a hash-only store", []any{stored(obj{"block_size": 0, "token_ids": []any{}, "cache_salt": longest + "x"}, 1), good},
			[]uint64{2}, counted(wire.ReasonNameTooLong, wire.ReasonUnknownContent)},
		{"salt too long that does not count", []any{
			stored(obj{"cache_salt": "s", "extra_keys": []any{[]any{"dynamo-cache-salt:" + longest + "x"}}}, 1)}, []uint64{1}, wire.Counts{}},
		{"salt too long of a remove, which goes nowhere", []any{removed(obj{"cache_salt": longest + "x"}, 1)}, []uint64{1}, wire.Counts{}},
		{"block size is not learned from a store whose name is too long", []any{stored(obj{"lora_name": longest + "x", "block_size": 2}, 1), good},
			[]uint64{2}, counted(wire.ReasonNameTooLong)},
		{"parent 0", []any{stored(obj{"parent_block_hash": 0}, 1)}, []uint64{1}, wire.Counts{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			events, counts := admit(t, c.events...)
			var ids []uint64
			for _, ev := range events {
				ids = append(ids, ev.RawID)
			}
			if diff := cmp.Diff(c.ids, ids); diff != "" {
				t.Errorf("raw ids differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.counts, counts); diff != "" {
				t.Errorf("counts differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAdmittedStores compares the admitted part of a store.
func TestAdmittedStores(t *testing.T) {
	hashes := func(lora, salt string, tokens ...uint32) []uint64 {
		return kvblock.AppendTokensHashes(nil, tokens, 2, kvblock.Seed(lora, salt), false, nil)
	}
	eagle := func(tokens ...uint32) []uint64 {
		return kvblock.AppendTokensHashes(nil, tokens, 2, kvblock.Seed("", ""), true, nil)
	}
	type left struct {
		BlockHashes, TokensHashes []uint64
		Tokens                    []uint32
		Tier                      kvblock.Tier
		CacheSalt                 string
	}
	for _, c := range []struct {
		name   string
		fields obj
		want   left
	}{
		{"plain", nil, left{[]uint64{1, 2}, hashes("", "", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, ""}},
		{"short", obj{"token_ids": []any{1, 2, 3}}, left{[]uint64{1}, hashes("", "", 1, 2), []uint32{1, 2}, kvblock.TierDevice, ""}},
		{"excess", obj{"token_ids": []any{1, 2, 3, 4, 5}},
			left{[]uint64{1, 2}, hashes("", "", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, ""}},
		{"host", obj{"medium": "cpu_pinned"},
			left{[]uint64{1, 2}, hashes("", "", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierHostPinned, ""}},
		{"lora", obj{"lora_id": 1, "lora_name": "a"},
			left{[]uint64{1, 2}, hashes("a", "", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, ""}},
		{"lora id alone", obj{"lora_id": 1}, left{[]uint64{1, 2}, nil, []uint32{1, 2, 3, 4}, kvblock.TierDevice, ""}},
		{"salt", obj{"cache_salt": "s"},
			left{[]uint64{1, 2}, hashes("", "s", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, "s"}},
		{"salt among extra keys", obj{"extra_keys": []any{[]any{"dynamo-cache-salt:s"}, nil}},
			left{[]uint64{1, 2}, hashes("", "s", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, "s"}},
		{"cache_salt overrides a salt in extra_keys", obj{"cache_salt": "t", "extra_keys": []any{[]any{"dynamo-cache-salt:s"}}},
			left{[]uint64{1, 2}, hashes("", "t", 1, 2, 3, 4), []uint32{1, 2, 3, 4}, kvblock.TierDevice, "t"}},
		{"opaque", obj{"token_ids": []any{1, "x", 3, 4}}, left{[]uint64{1, 2}, nil, nil, kvblock.TierDevice, ""}},
		{"eagle", obj{"token_ids": []any{[]any{1, 2}, []any{2, 3}, []any{3, 4}, []any{4, 5}}},
			left{[]uint64{1, 2}, eagle(1, 2, 3, 4, 5), []uint32{1, 2, 3, 4, 5}, kvblock.TierDevice, ""}},
		{"eagle short", obj{"token_ids": []any{[]any{1, 2}, []any{2, 3}, []any{3, 4}}},
			left{[]uint64{1}, eagle(1, 2, 3), []uint32{1, 2, 3}, kvblock.TierDevice, ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ev := obj{"type": "BlockStored", "block_hashes": []any{1, 2}, "token_ids": []any{1, 2, 3, 4}, "block_size": 2}
			for k, v := range c.fields {
				ev[k] = v
			}
			events, _ := admit(t, ev)
			if len(events) != 1 {
				t.Fatalf("%d events, want 1", len(events))
			}
			got := events[0]
			if diff := cmp.Diff(c.want, left{got.BlockHashes, got.TokensHashes, got.Tokens, got.Tier, got.CacheSalt}); diff != "" {
				t.Errorf("store differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestGroupsArePerRank checks that ranks learn groups separately, and that a restart resets
// groups but not raw ids.
func TestGroupsArePerRank(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	admitted := func(rank uint32, ev obj) (id uint64) {
		b := decodeOf(t, ev)
		r.Admit(b, rank, &counts)
		if len(b.Events) == 0 {
			return 0
		}
		return b.Events[0].RawID
	}
	teach := stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 3}, 1)
	ask := removed(obj{"group_idx": 3}, 1)
	var got []uint64
	got = append(got, admitted(0, teach), admitted(0, ask), admitted(1, ask), admitted(0, ask))
	r.SkipRaw(10)
	r.Reset(1) // the rank of another engine
	got = append(got, admitted(0, ask))
	r.Reset(0)
	got = append(got, admitted(0, ask), admitted(0, teach), admitted(0, ask))
	if diff := cmp.Diff([]uint64{1, 2, 0, 3, 14, 0, 15, 16}, got); diff != "" {
		t.Errorf("raw ids differ (-want +got):\n%s", diff)
	}
}

// TestUnknownGroupOfLateJoin reads a hybrid engine, of which nothing was read before, in two ranks: group 3 is the main
// group, and group 0 is not, which no store has said yet.
func TestUnknownGroupOfLateJoin(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	r.TrackChanges()
	removes := func(r *wire.Rules, rank uint32) bool {
		b := decodeOf(t, removed(obj{"group_idx": 0}, 1))
		r.Admit(b, rank, &counts)
		if b.GroupsOmitted == (len(b.Events) == 1) {
			t.Errorf("rank %d: GroupsOmitted is %v for %d events", rank, b.GroupsOmitted, len(b.Events))
		}
		return len(b.Events) == 1
	}
	if !removes(r, 0) {
		t.Error("group 0 is not the main group although no other is known")
	}
	r.Admit(decodeOf(t, stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 3}, 1)), 0, &counts)
	if removes(r, 0) {
		t.Error("group 0 is the main group although group 3 is")
	}
	if !removes(r, 1) {
		t.Error("group 0 of rank 1 is not the main group, since rank 0 has another")
	}
	restored := wire.NewRules(&size)
	restored.Restore(r.Changes())
	if removes(restored, 0) || !removes(restored, 1) {
		t.Error("group 0 after Restore: want the main group of rank 1 only")
	}
	restored.Reset(0)
	if !removes(restored, 0) {
		t.Error("group 0 is not the main group after Reset")
	}
	r.Close()
}

// TestGroupsAreBounded checks that memory is bounded for any number of groups.
func TestGroupsAreBounded(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	r := wire.NewRules(&size)
	for k := range 10_000 {
		r.Admit(decodeOf(t, stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": k}, 1)), 0, &counts)
	}
	b := decodeOf(t, removed(obj{"group_idx": 9999}, 1))
	r.Admit(b, 0, &counts)
	if len(b.Events) != 0 {
		t.Error("group 9999 was remembered")
	}
	b = decodeOf(t, removed(obj{"group_idx": 10}, 1))
	r.Admit(b, 0, &counts)
	if len(b.Events) != 1 {
		t.Error("group 10 was forgotten")
	}
}

// TestRawIDsNeverFall checks that raw ids saturate.
func TestRawIDsNeverFall(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
		got    []uint64
	)
	r := wire.NewRules(&size)
	admit := func() {
		b := decodeOf(t, removed(nil, 1), []any{}, removed(nil, 2))
		r.Admit(b, 0, &counts)
		for _, ev := range b.Events {
			got = append(got, ev.RawID)
		}
	}
	admit()
	r.SkipRaw(wire.MaxRawID - 6)
	admit()
	r.SkipRaw(math.MaxUint64)
	admit()
	want := []uint64{1, 3, wire.MaxRawID - 2, wire.MaxRawID, wire.MaxRawID, wire.MaxRawID}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("raw ids differ (-want +got):\n%s", diff)
	}
}

// TestBlockSizeIsSharedByTheWorkersSources checks that a block size that was learned from one
// source applies to the other sources.
func TestBlockSizeIsSharedByTheWorkersSources(t *testing.T) {
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	first, second := wire.NewRules(&size), wire.NewRules(&size)
	first.Admit(decodeOf(t, stored(nil, 1)), 0, &counts)
	if size.Tokens != 1 {
		t.Fatalf("block size %d, want 1", size.Tokens)
	}
	b := decodeOf(t, stored(obj{"block_size": 2, "token_ids": []any{1, 2}}, 1))
	second.Admit(b, 0, &counts)
	if len(b.Events) != 0 || counts[wire.ReasonBlockSizeMismatch] != 1 {
		t.Errorf("%d events, counts %v; want the store dropped", len(b.Events), counts)
	}
}

// TestRepeatedHashes compares repeatFinder with a map, for lists of all sizes.
func TestRepeatedHashes(t *testing.T) {
	var (
		size = wire.BlockSize{Tokens: 1}
		d    wire.Decoder
		e    wire.Encoder
	)
	r := wire.NewRules(&size)
	rapid.Check(t, func(t *rapid.T) {
		hashes := rapid.SliceOfN(rapid.Uint64Range(0, 5000), 0, 300).Draw(t, "hashes")
		seen := make(map[uint64]bool)
		repeats := false
		for _, h := range hashes {
			repeats = repeats || seen[h]
			seen[h] = true
		}
		payload := e.AppendBatch(nil, &wire.Batch{Events: []wire.Event{{
			Kind: wire.KindStored, BlockHashes: hashes, Tokens: make([]uint32, len(hashes)), BlockSize: 1,
		}}})
		b, err := d.Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		var counts wire.Counts
		r.Admit(b, 0, &counts)
		if got := counts[wire.ReasonRepeatedHash] == 1; got != repeats {
			t.Errorf("repeats %v, want %v", got, repeats)
		}
	})
}

func TestTierOf(t *testing.T) {
	for tier, media := range map[kvblock.Tier][]string{
		kvblock.TierDevice:     {"", "GPU", "gpu", "Device"},
		kvblock.TierHostPinned: {"CPU", "cpu", "CPU_PINNED", "cpu_tier1"},
		kvblock.TierDisk:       {"CPU_TIER2", "disk", "NVMe", "STORAGE", "FS", "obj"},
		kvblock.TierExternal:   {"EXTERNAL", "network", "Remote", "SHARED", "shared_storage"},
		0:                      {"TAPE", "GPU ", "SHARED_STORAGES", "gpü"},
	} {
		for _, medium := range media {
			got, ok := wire.TierOf(medium)
			if got != tier || ok != (tier != 0) {
				t.Errorf("TierOf(%q) = %d, %v, want %d", medium, got, ok, tier)
			}
		}
	}
}

func TestReasonNames(t *testing.T) {
	names := make(map[string]bool)
	for r := range wire.Reason(wire.NumReasons) {
		if r.String() == "" || names[r.String()] {
			t.Errorf("reason %d has name %q", r, r)
		}
		names[r.String()] = true
	}
	for e := wire.ErrTruncated; e <= wire.ErrDepth; e++ {
		if e.Name() == "" || names[e.Name()] || e.Error() != fmt.Sprintf("decode batch: %s", e.Name()) {
			t.Errorf("error %d has name %q", uint8(e), e.Name())
		}
		names[e.Name()] = true
	}
}
