package wire_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestTrustTable walks the table of what is left out or not understood: for each reason there are events that cause it, and
// the tiers whose blocks may differ then. A reason without events fails.
func TestTrustTable(t *testing.T) {
	const (
		none           = kvblock.Tiers(0)
		noGap          = kvcastv1.Gap_REASON_UNSPECIFIED
		skipped        = kvcastv1.Gap_REASON_EVENTS_SKIPPED
		otherSize      = kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH
		unknownContent = kvcastv1.Gap_REASON_UNKNOWN_CONTENT
		connector      = kvcastv1.Gap_REASON_CONNECTOR_TIER
	)
	tier := func(tiers ...kvblock.Tier) (set kvblock.Tiers) {
		for _, t := range tiers {
			set |= 1 << t
		}
		return set
	}
	host, device := obj{"medium": "CPU"}, tier(kvblock.TierDevice)
	with := func(fields ...obj) obj {
		all := obj{}
		for _, f := range fields {
			for k, v := range f {
				all[k] = v
			}
		}
		return all
	}
	good := stored(nil, 100)
	type tableRow struct {
		name   string
		events []any
		tiers  kvblock.Tiers
		gap    kvcastv1.Gap_Reason
	}
	table := map[wire.Reason][]tableRow{
		wire.ReasonUnknownTag: {
			{"array", []any{[]any{"TierBlocksCleared", "CPU"}}, kvblock.AllTiers, skipped},
			{"map", []any{obj{"type": "BlockTransferred", "block_hashes": []any{1}}}, kvblock.AllTiers, skipped},
			{"before a clear", []any{[]any{"X"}, obj{"type": "AllBlocksCleared"}}, none, skipped},
			{"before a clear of host memory", []any{[]any{"X"}, obj{"type": "AllBlocksCleared", "medium": "CPU"}},
				tier(kvblock.TierDevice, kvblock.TierDisk, kvblock.TierExternal), skipped},
			{"after a clear", []any{obj{"type": "AllBlocksCleared"}, []any{"X"}}, kvblock.AllTiers, skipped},
		},
		wire.ReasonUnknownMedium: {
			{"store", []any{stored(obj{"medium": "TAPE"}, 1)}, kvblock.LowerTiers, skipped},
			{"remove", []any{removed(obj{"medium": "TAPE"}, 1)}, kvblock.LowerTiers, skipped},
			{"clear", []any{obj{"type": "AllBlocksCleared", "medium": "TAPE"}}, kvblock.LowerTiers, skipped},
		},
		wire.ReasonNonLocalLocality: {{"store", []any{stored(obj{"locality": "REMOTE"}, 1)}, none, noGap}},
		wire.ReasonUnsupportedOwnership: {
			{"store", []any{stored(obj{"ownership": "x"}, 1)}, device, skipped},
			{"remove in host memory", []any{removed(with(host, obj{"ownership": "x"}), 1)}, tier(kvblock.TierHostPinned), skipped},
			{"clear", []any{obj{"type": "AllBlocksCleared", "ownership": "x"}}, kvblock.AllTiers, skipped},
		},
		wire.ReasonNonMainAttentionGroup: {{"store", []any{stored(obj{"kv_cache_spec_kind": "mamba"}, 1)}, none, noGap}},
		wire.ReasonBadEventShape:         {{"number", []any{5}, kvblock.AllTiers, skipped}},
		wire.ReasonBadTag:                {{"number", []any{[]any{5}}, kvblock.AllTiers, skipped}},
		wire.ReasonMissingField: {
			{"remove", []any{obj{"type": "BlockRemoved"}}, kvblock.AllTiers, skipped},
			{"store", []any{obj{"type": "BlockStored", "block_hashes": []any{1}}}, kvblock.AllTiers, skipped},
		},
		wire.ReasonBadType: {
			{"remove", []any{removed(nil, "x")}, kvblock.AllTiers, skipped},
			{"store", []any{stored(obj{"block_size": -1}, 1)}, kvblock.AllTiers, skipped},
		},
		wire.ReasonBadUTF8: {{"medium", []any{stored(obj{"medium": raw("\xa1\xff")}, 1)}, kvblock.AllTiers, skipped}},
		wire.ReasonBlockSizeMismatch: {
			{"device", []any{good, stored(obj{"block_size": 2, "token_ids": []any{1, 2}}, 1)}, device, otherSize},
			{"host memory", []any{sized(2, nil, 1), sized(3, host, 2)}, tier(kvblock.TierHostPinned), otherSize},
		},
		wire.ReasonChunks: {
			{"host memory", []any{sized(2, nil, 1), sized(4, host, 2)}, tier(kvblock.TierHostPinned), connector},
			{"before the blocks of the device", []any{sized(3, host, 2), sized(2, nil, 1)}, kvblock.LowerTiers, connector},
		},
		wire.ReasonTokensShort:  {{"store", []any{stored(obj{"token_ids": []any{1}}, 1, 2)}, device, skipped}},
		wire.ReasonRepeatedHash: {{"store", []any{stored(host, 1, 1)}, tier(kvblock.TierHostPinned), skipped}},
		wire.ReasonNameTooLong:  {{"adapter", []any{stored(obj{"lora_name": strings.Repeat("x", 1025)}, 1)}, device, skipped}},
		wire.ReasonUnknownContent: {
			{"adapter without a name", []any{stored(obj{"lora_id": 1}, 1)}, device, unknownContent},
			{"placeholders", []any{stored(obj{"token_ids": []any{"x"}}, 1)}, device, unknownContent},
			{"unknown extra key", []any{stored(with(host, obj{"extra_keys": []any{nil, []any{"x"}}}), 1, 2)}, tier(kvblock.TierHostPinned), unknownContent},
			{"tokens of more blocks", []any{stored(obj{"token_ids": []any{1, 2, 3}}, 1, 2)}, device, unknownContent},
			{"two salts of a block", []any{stored(obj{"cache_salt": "s"}, 1), stored(obj{"cache_salt": "t"}, 1)}, device, unknownContent},
		},
	}
	mooncake := func(kind string, fields obj) obj {
		return with(obj{"event_type": kind, "object_key": "9af1_0_k", "seq_hashes": []any{}, "medium": "cpu"}, fields)
	}
	legacy := obj{"type": "BlockRemoved", "block_hashes": []any{}, "medium": "disk"}
	table[wire.ReasonObjectKey] = append(table[wire.ReasonObjectKey], []tableRow{
		{"store", []any{mooncake("stored", nil)}, tier(kvblock.TierHostPinned), skipped},
		{"remove with the keys of vLLM", []any{mooncake("removed", legacy)}, tier(kvblock.TierDisk), skipped},
		{"a key of another type", []any{mooncake("stored", obj{"object_key": 5})}, tier(kvblock.TierHostPinned), skipped},
		{"no medium", []any{mooncake("stored", obj{"medium": nil})}, kvblock.AllTiers, skipped},
		{"before a clear", []any{mooncake("stored", nil), obj{"event_type": "cleared"}}, none, skipped},
	}...)
	grouped := obj{"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
	table[wire.ReasonPartialBlock] = append(table[wire.ReasonPartialBlock], tableRow{"store", []any{stored(with(grouped, obj{"block_size": 4, "token_ids": []any{1, 2, 3, 4}}), 1), stored(with(grouped, obj{"block_size": 2, "token_ids": []any{1, 2}}), 2)}, none, noGap})
	// vLLM 0.16 and earlier have salts and no extra keys in their events.
	withoutKeys := []any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, "CPU", nil}
	table[wire.ReasonNoExtraKeys] = append(table[wire.ReasonNoExtraKeys],
		tableRow{"host memory", []any{withoutKeys}, tier(kvblock.TierHostPinned), skipped},
		tableRow{"device", []any{withoutKeys[:6]}, device, skipped})
	// vLLM's connectors: for Mooncake, and for files or objects.
	storage := with(host, obj{"medium": "STORAGE"})
	table[wire.ReasonNoRemoves] = append(table[wire.ReasonNoRemoves], []tableRow{
		{"Mooncake", []any{stored(with(host, obj{"medium": "cpu"}), 1)}, tier(kvblock.TierHostPinned), connector},
		{"files", []any{stored(storage, 1)}, tier(kvblock.TierDisk), connector},
		{"files, by hashes alone", []any{stored(with(storage, obj{"token_ids": []any{}, "block_size": 0}), 1)}, tier(kvblock.TierDisk), connector},
	}...)
	for reason := wire.ReasonNone + 1; reason < wire.NumReasons; reason++ {
		if len(table[reason]) == 0 {
			t.Errorf("%s: no events cause it", reason)
		}
		for _, c := range table[reason] {
			var (
				size   wire.BlockSize
				counts wire.Counts
				want   wire.Doubts
			)
			want[reason] = c.tiers
			b := decodeOf(t, c.events...)
			rules := wire.NewRules(&size)
			rules.IsVLLM = true
			rules.Admit(b, 0, &counts)
			if counts[reason] == 0 || reason.Gap() != c.gap {
				t.Errorf("%s, %s: counted %d times, gap %d; want gap %d", reason, c.name, counts[reason], reason.Gap(), c.gap)
			}
			if b.Doubts != want {
				t.Errorf("%s, %s: doubts %v, want %v", reason, c.name, b.Doubts, want)
			}
		}
	}
}

// TestWhatIsUnderstoodLeavesNoDoubt checks that usual events do not degrade a rank.
func TestWhatIsUnderstoodLeavesNoDoubt(t *testing.T) {
	for name, ev := range map[string]any{
		"store":                   stored(nil, 1, 2),
		"remove of unknown block": removed(nil, 9),
		"salt":                    stored(obj{"extra_keys": []any{[]any{"s"}}}, 1),
		"image":                   stored(obj{"extra_keys": []any{[]any{[]any{"id", 0}}}}, 1),
		"embeddings":              stored(obj{"extra_keys": []any{nil, []any{[]byte{1}}}}, 1, 2),
		"hash only":               stored(obj{"token_ids": []any{}, "medium": "CPU"}, 1),
		"store of no block":       stored(nil),
		"key beside a hash":       obj{"event_type": "stored", "object_key": "42", "seq_hashes": []any{42}, "medium": "CPU"},
		"bad key beside a hash":   obj{"event_type": "stored", "object_key": 42, "seq_hashes": []any{42}, "medium": "CPU"},
		"clear":                   obj{"type": "AllBlocksCleared"},
		"host memory":             stored(obj{"medium": "CPU"}, 1),
		"KVCR":                    stored(obj{"medium": "STORAGE", "ownership": "kvcr"}, 1),
	} {
		var (
			size   wire.BlockSize
			counts wire.Counts
		)
		b := decodeOf(t, ev)
		rules := wire.NewRules(&size)
		rules.IsVLLM = true
		rules.Admit(b, 0, &counts)
		if b.Doubts != (wire.Doubts{}) || counts != (wire.Counts{}) {
			t.Errorf("%s: doubts %v, counts %v", name, b.Doubts, counts)
		}
	}
}

func TestUnknownTagIsNamed(t *testing.T) {
	long := strings.Repeat("T", 100)
	for tag, want := range map[string]string{"TierBlocksCleared": "TierBlocksCleared", long: long[:64]} {
		if b := decodeOf(t, []any{tag, 5}, []any{"Second"}); b.UnknownTag != want {
			t.Errorf("%s: named %q", tag, b.UnknownTag)
		}
	}
}

// TestClearsOfATier checks the tier of clears, and that only salts of that tier are forgotten.
func TestClearsOfATier(t *testing.T) {
	for _, c := range []struct {
		name         string
		event        any
		clearsDevice bool
		tier         kvblock.Tier
		salt         string // of a child afterwards, whose parent is in device and host memory
	}{
		{"all", obj{"type": "AllBlocksCleared"}, false, 0, ""},
		{"device by default", obj{"type": "AllBlocksCleared"}, true, kvblock.TierDevice, "s"},
		{"of a medium", obj{"type": "AllBlocksCleared", "medium": "CPU"}, true, kvblock.TierHostPinned, "s"},
		{"of a medium in an array", []any{"AllBlocksCleared", "GPU"}, false, kvblock.TierDevice, "s"},
		{"with another field in an array", []any{"AllBlocksCleared", "kvcr"}, true, kvblock.TierDevice, "s"},
	} {
		var (
			size   wire.BlockSize
			counts wire.Counts
		)
		r := wire.NewRules(&size)
		r.ClearsDevice = c.clearsDevice
		r.Admit(decodeOf(t, stored(obj{"cache_salt": "s"}, 1), stored(obj{"cache_salt": "s", "medium": "CPU"}, 1)), 0, &counts)
		clear := decodeOf(t, c.event)
		r.Admit(clear, 0, &counts)
		child := decodeOf(t, stored(obj{"parent_block_hash": 1}, 2))
		r.Admit(child, 0, &counts)
		if len(clear.Events) != 1 || clear.Events[0].Tier != c.tier || child.Events[0].CacheSalt != c.salt {
			t.Errorf("%s: %+v, salt %q; want tier %d, %q", c.name, clear.Events, child.Events[0].CacheSalt, c.tier, c.salt)
		}
	}
}

// TestScopeOfAPeer has two sources of a worker, of which one names neither adapter nor salt.
func TestScopeOfAPeer(t *testing.T) {
	adapter := obj{"lora_name": "a"}
	for _, c := range []struct {
		name  string
		first []any // of the source that names them
		event any   // of the other
		lora  string
		salt  string
	}{
		{"the same block", []any{stored(adapter, 1, 2)}, stored(nil, 1, 2), "a", ""},
		{"a child", []any{stored(adapter, 1, 2)}, stored(obj{"parent_block_hash": 2}, 3), "a", ""},
		{"a child of a salted one", []any{stored(obj{"cache_salt": "s"}, 1)}, stored(obj{"parent_block_hash": 1}, 2), "", "s"},
		{"an adapter and a salt", []any{stored(obj{"lora_name": "a", "cache_salt": "s"}, 1)}, stored(nil, 1), "a", "s"},
		{"another tier", []any{stored(adapter, 1, 2)}, stored(obj{"medium": "DISK"}, 1), "a", ""},
		{"other tokens under the hash", []any{stored(adapter, 1, 2)}, stored(obj{"token_ids": []any{77}}, 1), "", ""},
		{"another block", []any{stored(adapter, 1, 2)}, stored(nil, 3), "", ""},
		{"removed since", []any{stored(adapter, 1), removed(nil, 1)}, stored(nil, 1), "", ""},
		{"removed since, in host memory", []any{stored(adapter, 1), stored(obj{"lora_name": "a", "medium": "CPU"}, 1), removed(nil, 1)}, stored(nil, 1), "a", ""},
		{"cleared since", []any{stored(adapter, 1), obj{"type": "AllBlocksCleared"}}, stored(nil, 1), "", ""},
		{"of the base model", []any{stored(nil, 1)}, stored(nil, 1), "", ""},
		{"with an adapter of its own", []any{stored(adapter, 1)}, stored(obj{"lora_name": "b"}, 1), "b", ""},
	} {
		var (
			size   wire.BlockSize
			counts wire.Counts
		)
		naming, other := wire.NewRules(&size), wire.NewRules(&size)
		naming.AddPeer(other)
		other.AddPeer(naming)
		for _, ev := range c.first {
			naming.Admit(decodeOf(t, ev), 0, &counts)
		}
		b := decodeOf(t, c.event)
		other.Admit(b, 0, &counts)
		want := kvblock.AppendTokensHashes(nil, b.Events[0].Tokens, 1, kvblock.Seed(c.lora, c.salt), false, nil)
		got := b.Events[0]
		if got.LoRAName != c.lora || got.CacheSalt != c.salt || len(got.TokensHashes) != len(want) || got.TokensHashes[0] != want[0] {
			t.Errorf("%s: adapter %q and salt %q, want %q and %q", c.name, got.LoRAName, got.CacheSalt, c.lora, c.salt)
		}
		elsewhere := decodeOf(t, stored(nil, 1))
		if other.Admit(elsewhere, 1, &counts); elsewhere.Events[0].LoRAName != "" {
			t.Errorf("%s: another rank has the adapter", c.name)
		}
	}
}
