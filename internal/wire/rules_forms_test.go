package wire_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestMediaInAnyCase draws the case of every medium's letters.
func TestMediaInAnyCase(t *testing.T) {
	media := map[string]kvblock.Tier{
		"GPU": kvblock.TierDevice, "DEVICE": kvblock.TierDevice,
		"CPU": kvblock.TierHostPinned, "CPU_PINNED": kvblock.TierHostPinned, "CPU_TIER1": kvblock.TierHostPinned,
		"CPU_TIER2": kvblock.TierDisk, "DISK": kvblock.TierDisk, "NVME": kvblock.TierDisk, "STORAGE": kvblock.TierDisk, "FS": kvblock.TierDisk, "OBJ": kvblock.TierDisk,
		"EXTERNAL": kvblock.TierExternal, "NETWORK": kvblock.TierExternal, "REMOTE": kvblock.TierExternal, "SHARED": kvblock.TierExternal,
		"SHARED_STORAGE": kvblock.TierExternal,
	}
	names := slices.Sorted(maps.Keys(media))
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(names).Draw(t, "medium")
		cased := []byte(name)
		for k := range cased {
			if rapid.Bool().Draw(t, "lower") {
				cased[k] = strings.ToLower(name)[k]
			}
		}
		if got, ok := wire.TierOf(string(cased)); got != media[name] || !ok {
			t.Errorf("TierOf(%q) = %d, %v, want %d", cased, got, ok, media[name])
		}
		odd := string(cased) + rapid.SampledFrom([]string{" ", "_", "S", "1", "\x00"}).Draw(t, "more")
		if _, ok := media[strings.ToUpper(odd)]; !ok {
			if _, ok := wire.TierOf(odd); ok {
				t.Errorf("TierOf(%q) returns a tier", odd)
			}
		}
	})
}

// TestEveryAttentionKind checks which kinds are main attention, for each medium, in both
// forms, and that the kind overrides the group.
func TestEveryAttentionKind(t *testing.T) {
	main := map[string]bool{"full_attention": true, "mla_attention": true, "sink_full_attention": true,
		"sliding_window": false, "sliding_window_mla": false, "mamba": false, "chunked_local_attention": false,
		"encoder_only_attention": false, "cross_attention": false, "unheard_of": false, "FULL_ATTENTION": false}
	for kind, counts := range main {
		for _, medium := range []any{nil, "GPU", "cpu", "DISK", "external"} {
			skips := medium == "DISK" || medium == "external"
			for _, group := range []any{nil, 0, 7} {
				for _, ev := range []any{
					[]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, medium, nil, nil, group, kind, nil},
					stored(obj{"medium": medium, "group_idx": group, "kv_cache_spec_kind": kind}, 1),
					removed(obj{"medium": medium, "group_idx": group, "kv_cache_spec_kind": kind}, 1),
				} {
					events, n := admit(t, ev)
					if want := counts || skips; (len(events) == 1) != want || (n[wire.ReasonNonMainAttentionGroup] == 0) != want {
						t.Errorf("%v: %d events, counts %v; want them to count: %v", ev, len(events), n, want)
					}
				}
			}
		}
	}
}

// TestLocality checks that events not known to be local are ignored.
func TestLocality(t *testing.T) {
	for locality, local := range map[any]bool{nil: true, "": true, "LOCAL": true, "local": true, "Local": true,
		"REMOTE": false, "remote": false, "Remote": false, "SHARED": false} {
		events, counts := admit(t, stored(obj{"locality": locality}, 1), removed(obj{"locality": locality}, 1), obj{"type": "AllBlocksCleared", "locality": locality})
		want := 3
		if !local {
			want = 0
		}
		if len(events) != want || counts[wire.ReasonNonLocalLocality] != uint64(3-want) {
			t.Errorf("%v: %d events, counts %v", locality, len(events), counts)
		}
	}
}

// TestSharedStorage has stores in files and objects, of a worker that loads from pools and of one that does not.
func TestSharedStorage(t *testing.T) {
	store := func(medium, locality string) any { return stored(obj{"medium": medium, "locality": locality}, 1) }
	remove := removed(obj{"medium": "STORAGE", "locality": "REMOTE"}, 1)
	for name, c := range map[string]struct {
		hasPools bool
		event    any
		want     kvblock.Tier // 0: ignored
	}{
		"of an owner":                      {true, stored(obj{"medium": "STORAGE", "locality": "REMOTE", "ownership": "kvcr"}, 1), 0},
		"of this machine":                  {true, store("STORAGE", "LOCAL"), kvblock.TierDisk},
		"of another":                       {true, store("STORAGE", "Remote"), kvblock.TierExternal},
		"of another, without pools":        {false, store("STORAGE", "REMOTE"), 0},
		"of anything else":                 {true, store("STORAGE", "SHARED"), 0},
		"a remove":                         {true, remove, 0},
		"memory of another machine":        {true, store("CPU", "REMOTE"), 0},
		"device memory of another machine": {true, store("GPU", "REMOTE"), 0},
	} {
		rules := wire.NewRules(new(wire.BlockSize))
		rules.HasPools, rules.IsVLLM = c.hasPools, true
		got := decodeOf(t, c.event)
		rules.Admit(got, 0, new(wire.Counts))
		switch {
		case c.want == 0 && len(got.Events) > 0, c.want != 0 && (len(got.Events) != 1 || got.Events[0].Tier != c.want):
			t.Errorf("%s: got %+v, want tier %d", name, got.Events, c.want)
		case name == "of another, without pools" && !got.Doubts[wire.ReasonNoRemoves].Has(kvblock.TierExternal):
			t.Errorf("%s: doubts %v, want one of external memory: the engine may load the block", name, got.Doubts)
		case c.want != 0 && !got.Doubts[wire.ReasonNoRemoves].Has(c.want):
			t.Errorf("%s: doubts %v, want that there are no removes", name, got.Doubts)
		}
		rules = wire.NewRules(new(wire.BlockSize)) // of another engine, which may remove it
		rules.HasPools = true
		other := decodeOf(t, c.event)
		rules.Admit(other, 0, new(wire.Counts))
		if c.want == kvblock.TierExternal && len(other.Events) > 0 {
			t.Errorf("%s, of another engine: got %+v, want none", name, other.Events)
		}
	}
}

// TestStoresAreCutToWholeBlocks checks, for plain and for EAGLE tokens, how many blocks of a
// store of three are admitted, and their hashes.
func TestStoresAreCutToWholeBlocks(t *testing.T) {
	for _, eagle := range []bool{false, true} {
		for n := range 11 {
			tokens := make([]any, 0, n)
			flat := make([]uint32, 0, n+1)
			for k := range n {
				flat = append(flat, uint32(k))
				if tokens = append(tokens, any(k)); eagle {
					tokens[k] = []any{k, k + 1}
				}
			}
			if n == 0 {
				continue // hash-only
			}
			blocks := min(n/3, 3)
			if eagle {
				flat = append(flat, uint32(n)) // n pairs are n+1 tokens
			}
			events, counts := admit(t, stored(obj{"block_size": 3, "token_ids": tokens}, 1, 2, 3))
			if got := counts[wire.ReasonTokensShort] == 1; got != (blocks < 3) {
				t.Errorf("eagle %v, %d tokens: counts %v", eagle, n, counts)
			}
			if blocks == 0 {
				if len(events) != 0 {
					t.Errorf("eagle %v, %d tokens: %d events", eagle, n, len(events))
				}
				continue
			}
			want := kvblock.AppendTokensHashes(nil, flat, 3, kvblock.Seed("", ""), eagle, nil)[:blocks]
			if diff := cmp.Diff(want, events[0].TokensHashes); diff != "" || len(events[0].BlockHashes) != blocks {
				t.Errorf("eagle %v, %d tokens: %d blocks, want %d; tokens hashes differ (-want +got):\n%s", eagle, n, len(events[0].BlockHashes), blocks, diff)
			}
		}
	}
}

// TestExtraKeys checks which extra keys are cache salts, and of which blocks the content is known. vLLM sends a salt as a
// bare string in the first block of a prompt, after the adapter's name and multimodal inputs.
func TestExtraKeys(t *testing.T) {
	const (
		all       = 3
		ambiguous = true
	)
	id := [][]uint64{{wire.MMHash([]byte("id"))}}
	for _, c := range []struct {
		name      string
		keys      any
		fields    obj
		salt      string
		mm        [][]uint64
		known     int
		ambiguous bool
	}{
		{"none", nil, nil, "", nil, all, false},
		{"nils", []any{nil, nil, nil}, nil, "", nil, all, false},
		{"empty lists", []any{[]any{}, []any{nil}}, nil, "", nil, all, false},

		{"bare", []any{[]any{"s"}, nil, nil}, nil, "s", nil, all, false},
		{"bare, empty", []any{[]any{""}}, nil, "", nil, all, false},
		{"bare after the adapter", []any{[]any{"a", "s"}, []any{"a"}, []any{"a"}}, obj{"lora_name": "a"}, "s", nil, all, false},
		{"bare, equal to the adapter", []any{[]any{"a", "a"}, []any{"a"}}, obj{"lora_name": "a"}, "a", nil, all, false},
		{"the adapter alone", []any{[]any{"a"}, []any{"a"}, []any{"a"}}, obj{"lora_name": "a"}, "", nil, all, false},
		{"bare after an image", []any{[]any{[]any{"id", 3}, "s"}}, nil, "s", id, all, false},
		{"bare before an image", []any{[]any{"s", []any{"id", 3}}}, nil, "s", id, all, false},
		{"bare with the field", []any{[]any{"s"}}, obj{"cache_salt": "s"}, "s", nil, all, false},
		{"bare that differs from the field", []any{[]any{"t"}}, obj{"cache_salt": "s"}, "s", nil, 0, ambiguous},
		{"bare of parent 0", []any{[]any{"s"}}, obj{"parent_block_hash": 0}, "s", nil, all, false},
		{"two bare", []any{[]any{"s", "t"}}, nil, "", nil, 0, ambiguous},
		{"bare beside a marked one", []any{[]any{"x", "dynamo-cache-salt:s"}}, nil, "s", nil, 0, ambiguous},
		{"bare of a second block", []any{nil, []any{"s"}}, nil, "", nil, 1, ambiguous},
		{"bare of a third block", []any{[]any{"s"}, nil, []any{"t"}}, nil, "s", nil, 2, ambiguous},
		{"bare of a child", []any{[]any{"s"}}, obj{"parent_block_hash": 9}, "", nil, 0, ambiguous},
		{"another adapter", []any{[]any{"b"}, []any{"b"}}, obj{"lora_name": "a"}, "b", nil, 1, ambiguous},
		{"bare of no UTF-8", []any{[]any{raw("\xa2\xff\xfe")}}, nil, "\xff\xfe", nil, all, false},

		{"the adapter's id", []any{[]any{7}, []any{7}, []any{7}}, obj{"lora_id": 7, "lora_name": "a"}, "", nil, all, false},
		{"another number", []any{nil, []any{8}}, obj{"lora_id": 7, "lora_name": "a"}, "", nil, 1, ambiguous},
		{"a number", []any{nil, []any{8}}, nil, "", nil, 1, ambiguous},
		{"a boolean", []any{nil, []any{true}}, nil, "", nil, 1, ambiguous},
		{"a pair without offset", []any{nil, nil, []any{[]any{"id", "x"}}}, nil, "", nil, 2, ambiguous},
		{"a block that is no list", []any{nil, "s"}, nil, "", nil, 1, ambiguous},

		{"embeddings", []any{nil, []any{[]byte{1}}}, nil, "", nil, 1, false},
		{"embeddings after a salt", []any{[]any{"s", []byte{1}}}, nil, "s", nil, 0, false},
		{"embeddings before a salt", []any{[]any{[]byte{1}, "dynamo-cache-salt:s"}}, nil, "s", nil, 0, false},
		{"embeddings and an unknown key", []any{[]any{[]byte{1}, true}}, nil, "", nil, 0, ambiguous},

		{"marked", []any{[]any{"dynamo-cache-salt:s"}}, nil, "s", nil, all, false},
		{"marked after an image", []any{[]any{[]any{"id", 3}, "dynamo-cache-salt:s"}}, nil, "s", id, all, false},
		{"marked in a later block", []any{nil, []any{"dynamo-cache-salt:s"}}, nil, "s", nil, all, false},
		{"marked in a child", []any{[]any{"dynamo-cache-salt:s"}}, obj{"parent_block_hash": 9}, "s", nil, all, false},
		{"marked twice: the first counts", []any{[]any{"dynamo-cache-salt:s", "dynamo-cache-salt:t"}, []any{"dynamo-cache-salt:u"}}, nil, "s", nil, all, false},
		{"marked, empty", []any{[]any{"dynamo-cache-salt:", "dynamo-cache-salt:t"}}, nil, "t", nil, all, false},
		{"marked twice in one", []any{[]any{"dynamo-cache-salt:dynamo-cache-salt:s"}}, nil, "dynamo-cache-salt:s", nil, all, false},
		{"marked, no UTF-8", []any{[]any{raw("\xb4dynamo-cache-salt:\xff\xfe")}}, nil, "\xff\xfe", nil, all, false},
		{"a marked identifier", []any{[]any{[]any{"dynamo-cache-salt:s", 0}}}, nil, "", [][]uint64{{wire.MMHash([]byte("dynamo-cache-salt:s"))}}, all, false},
		{"marked, equal to the adapter", []any{[]any{"a", "dynamo-cache-salt:a"}}, obj{"lora_name": "a"}, "a", nil, all, false},
		{"an adapter whose name is marked", []any{[]any{"dynamo-cache-salt:a"}}, obj{"lora_name": "dynamo-cache-salt:a"}, "", nil, all, false},
		{"an adapter whose name is marked, and a salt", []any{[]any{"dynamo-cache-salt:a", "dynamo-cache-salt:a"}}, obj{"lora_name": "dynamo-cache-salt:a"}, "a", nil, all, false},

		{"typed", typedSalt("s"), nil, "s", nil, all, false},
		{"typed, marked", typedSalt("dynamo-cache-salt:s"), nil, "s", nil, all, false},
		{"typed, empty", typedSalt(""), nil, "", nil, all, false},
		{"typed, no string", typedSalt(5), nil, "", nil, 0, ambiguous},
		{"typed, no salt", []any{[]any{obj{"type": "cache_salt"}}}, nil, "", nil, 0, ambiguous},
		{"of another type", []any{[]any{obj{"type": "legacy", "salt": "s"}}}, nil, "", nil, 0, ambiguous},
		{"all types", []any{[]any{obj{"type": "lora", "name": "a"}, obj{"type": "mm", "hash": "id", "modality": "image", "block_offset": 0},
			obj{"type": "cache_salt", "salt": "s"}}}, obj{"lora_name": "a"}, "s", id, all, false},
		{"typed, another adapter", []any{nil, []any{obj{"type": "lora", "name": "b"}}}, obj{"lora_name": "a"}, "", nil, 1, ambiguous},
		{"typed embeddings", []any{[]any{obj{"type": "cache_salt", "salt": "s"}}, []any{obj{"type": "prompt_embeds", "hash": []byte{1}}}}, nil, "s", nil, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			fields := obj{"extra_keys": c.keys}
			for k, v := range c.fields {
				fields[k] = v
			}
			events, counts := admit(t, stored(fields, 1, 2, 3))
			if len(events) != 1 || events[0].CacheSalt != c.salt || len(events[0].BlockHashes) != all {
				t.Fatalf("got %+v, want salt %q", events, c.salt)
			}
			lora, _ := c.fields["lora_name"].(string)
			want := kvblock.AppendTokensHashes(nil, events[0].Tokens[:c.known], 1, kvblock.Seed(lora, c.salt), false, c.mm)
			if diff := cmp.Diff(want, events[0].TokensHashes, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("tokens hashes differ (-want +got):\n%s", diff)
			}
			if got := counts[wire.ReasonUnknownContent] > 0; got != c.ambiguous {
				t.Errorf("counted as unknown content: %v, want %v", got, c.ambiguous)
			}
		})
	}
}

// TestMultimodalForms checks further forms than TestMultimodalStores.
func TestMultimodalForms(t *testing.T) {
	const digest = "00000000000000ffaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	for _, c := range []struct {
		name   string
		fields obj
		mm     [][]uint64
	}{
		{"typed", obj{"extra_keys": []any{nil, []any{obj{"type": "mm", "modality": "image", "hash": digest, "block_offset": -3}}}}, [][]uint64{nil, {0xff}}},
		{"infos as arrays", obj{"block_mm_infos": []any{nil, []any{[]any{[]any{0xff, []any{[]any{0, 2}}}, []any{7, []any{}}}}}}, [][]uint64{nil, {7, 0xff}}},
		{"infos of negative numbers", obj{"block_mm_infos": []any{obj{"mm_objects": []any{obj{"mm_hash": -1}}}}}, [][]uint64{{math.MaxUint64}}},
		{"empty infos", obj{"block_mm_infos": []any{[]any{}, obj{"mm_objects": []any{}}}}, nil},
		{"infos go before the others", obj{"block_mm_infos": []any{obj{"mm_objects": []any{obj{"mm_hash": 1}}}}, "mm_keys": []any{[]any{obj{"type": "mm_key", "hash": "x"}}}},
			[][]uint64{{1}}},
		{"empty identifiers are none", obj{"extra_keys": []any{[]any{[]any{"", 0}, []any{"x", 1}}}}, [][]uint64{{wire.MMHash([]byte("x"))}}},
		{"several, in any order", obj{"extra_keys": []any{[]any{[]any{"b", 9}, []any{"a", -9}}, []any{[]any{"a", 0}}}},
			[][]uint64{{wire.MMHash([]byte("a")), wire.MMHash([]byte("b"))}, {wire.MMHash([]byte("a"))}}},
		{"keys with a uuid", obj{"mm_keys": []any{[]any{obj{"type": "mm_key", "hash": digest, "start_offset": 0, "uuid": "u"}}, []any{}}}, [][]uint64{{0xff}}},
		{"keys by identifier", obj{"mm_keys": []any{[]any{}, []any{obj{"hash": "my-image", "type": "mm_key"}}}}, [][]uint64{nil, {wire.MMHash([]byte("my-image"))}}},
		{"63 and 65 digits", obj{"extra_keys": []any{[]any{[]any{digest[:63], 0}}, []any{[]any{digest + "0", 0}}}},
			[][]uint64{{wire.MMHash([]byte(digest[:63]))}, {wire.MMHash([]byte(digest + "0"))}}},
		{"no byte is UTF-8", obj{"extra_keys": raw("\x91\x91\x92\xa1\xff\xff")}, [][]uint64{{wire.MMHash([]byte("\xff"))}}},
		{"objects twice", obj{"block_mm_infos": raw("\x91\x82\xaamm_objects\x91\x81\xa7mm_hash\x01\xaamm_objects\xa1x")}, [][]uint64{{1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			events, _ := admit(t, stored(c.fields, 1, 2))
			want := kvblock.AppendTokensHashes(nil, []uint32{0, 1}, 1, kvblock.Seed("", ""), false, c.mm)
			if len(events) != 1 {
				t.Fatalf("%d events, want 1", len(events))
			}
			if diff := cmp.Diff(want, events[0].TokensHashes, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("tokens hashes differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestBlockSizeIsLearned checks from which store the worker's block size is learned.
func TestBlockSizeIsLearned(t *testing.T) {
	for _, c := range []struct {
		name  string
		first obj
		want  uint32
	}{
		{"a store", stored(obj{"block_size": 2}, 1), 2},
		{"a store whose tokens run short", stored(obj{"block_size": 4}, 1), 4},
		{"a remote store", stored(obj{"block_size": 2, "locality": "REMOTE"}, 1), 0},
		{"another group's", stored(obj{"block_size": 2, "group_idx": 1}, 1), 0},
		{"hash-only", stored(obj{"block_size": 0, "token_ids": []any{}}, 1), 0},
		{"tokens, but size 0", stored(obj{"block_size": 0}, 1), 0},
		{"opaque tokens", stored(obj{"block_size": 2, "token_ids": []any{"x", 1}}, 1), 2},
		{"a remove", removed(nil, 1), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				size   wire.BlockSize
				counts wire.Counts
			)
			r := wire.NewRules(&size)
			r.Admit(decodeOf(t, c.first), 0, &counts)
			if size.Tokens != c.want {
				t.Errorf("block size %d, want %d", size.Tokens, c.want)
			}
		})
	}
}

// TestHashOnlyStoresHaveNoContents checks that hash-only stores are admitted for any block
// size of the worker, without tokens hashes, and that their hashes must not repeat.
func TestHashOnlyStoresHaveNoContents(t *testing.T) {
	only := obj{"block_size": 0, "token_ids": []any{}}
	with := func(more obj) obj {
		ev := maps.Clone(only)
		maps.Copy(ev, more)
		return ev
	}
	events, counts := admit(t, stored(nil, 1), stored(only, 2, 3), stored(with(obj{"parent_block_hash": 3}), 4), stored(with(obj{"lora_name": "a"}), 5),
		stored(with(obj{"parent_block_hash": 6}), 6), stored(only, 7, 8, 7), stored(only))
	var got []string
	for _, ev := range events[1:] {
		got = append(got, fmt.Sprint(ev.BlockHashes, len(ev.TokensHashes)))
	}
	if diff := cmp.Diff([]string{"[2 3] 0", "[4] 0", "[5] 0", "[] 0"}, got); diff != "" || counts[wire.ReasonRepeatedHash] != 2 {
		t.Errorf("counts %v; stores differ (-want +got):\n%s", counts, diff)
	}
}
