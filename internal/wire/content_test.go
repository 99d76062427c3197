package wire_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

func TestMMHash(t *testing.T) {
	const hexDigest = "0123456789ABCDEFaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	if got, want := wire.MMHash([]byte(hexDigest)), uint64(0x0123456789abcdef); got != want {
		t.Errorf("MMHash of 64 hex digits = %x, want %x", got, want)
	}
	// XXH3-64 of no bytes, from the specification.
	if got, want := wire.MMHash(nil), uint64(0x2d06800538d394c2); got != want {
		t.Errorf("MMHash of nothing = %x, want %x", got, want)
	}
	almost := hexDigest[:63] + "g"
	if wire.MMHash([]byte(almost)) == 0x0123456789abcdef {
		t.Error("MMHash treats 64 other characters as hex digits")
	}
}

// TestMultimodalStores checks that all forms of a multimodal input yield the same tokens
// hashes, block by block.
func TestMultimodalStores(t *testing.T) {
	const id = "00000000000000ffaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	tokens := []any{1, 2, 3, 4}
	plain := kvblock.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, kvblock.Seed("", ""), false, nil)
	mixed := kvblock.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, kvblock.Seed("", ""), false, [][]uint64{nil, {0xff}})
	salted := kvblock.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, kvblock.Seed("", "s"), false, [][]uint64{nil, {0xff}})
	for _, c := range []struct {
		name   string
		fields obj
		want   []uint64
	}{
		{"none", nil, plain},
		{"nils", obj{"extra_keys": []any{nil, nil}}, plain},
		{"pair", obj{"extra_keys": []any{nil, []any{[]any{id, -3}}}}, mixed},
		{"tagged", obj{"extra_keys": []any{nil, []any{obj{"type": "mm", "hash": id, "block_offset": 0}}}}, mixed},
		{"mm_keys", obj{"mm_keys": []any{[]any{}, []any{obj{"type": "mm_key", "hash": id, "start_offset": 0}}}}, mixed},
		{"block_mm_infos", obj{"block_mm_infos": []any{nil, obj{"mm_objects": []any{obj{"mm_hash": 0xff, "offsets": []any{}}}}}}, mixed},
		{"identifier in block_mm_infos", obj{"block_mm_infos": []any{nil, obj{"mm_objects": []any{obj{"mm_hash": id}}}}}, mixed},
		{"in both extra_keys and mm_keys", obj{"extra_keys": []any{nil, []any{[]any{id, 0}}}, "mm_keys": []any{nil, []any{obj{"type": "mm_key", "hash": id}}}}, mixed},
		{"salt and image", obj{"extra_keys": []any{[]any{"dynamo-cache-salt:s"}, []any{[]any{id, 0}}}}, salted},
		{"salt and mm infos", obj{"extra_keys": []any{[]any{"dynamo-cache-salt:s"}, nil}, "block_mm_infos": []any{nil, obj{"mm_objects": []any{obj{"mm_hash": 0xff}}}}}, salted},
		{"fewer than blocks", obj{"extra_keys": []any{nil}}, plain},
		{"more than blocks", obj{"extra_keys": []any{nil, nil, []any{[]any{id, 0}}}}, plain},
	} {
		t.Run(c.name, func(t *testing.T) {
			ev := obj{"type": "BlockStored", "block_hashes": []any{1, 2}, "token_ids": tokens, "block_size": 2}
			for k, v := range c.fields {
				ev[k] = v
			}
			got, _ := admit(t, ev)
			if len(got) != 1 {
				t.Fatalf("%d events, want 1", len(got))
			}
			if diff := cmp.Diff(c.want, got[0].TokensHashes, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("tokens hashes differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestBlockDigest compares digests with the output of the generator's reference code,
// https://prng.di.unimi.it/splitmix64.c.
func TestBlockDigest(t *testing.T) {
	for hash, want := range map[uint64]uint64{0: 0xe220a8397b1dcdaf, 1234567: 6457827717110365317} {
		if got := kvblock.Digest(hash); got != want {
			t.Errorf("of %d: %#x, want %#x", hash, got, want)
		}
	}
	if got := kvblock.GroupDigest(1, 1234567); got != 0xb929b6d904142b8a {
		t.Errorf("group 1: got %#x", got)
	}
}
