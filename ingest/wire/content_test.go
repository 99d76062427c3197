package wire_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
)

// decimal is a uint64 encoded in JSON as a string.
type decimal uint64

func (d *decimal) UnmarshalJSON(b []byte) error {
	n, err := strconv.ParseUint(strings.Trim(string(b), `"`), 10, 64)
	*d = decimal(n)
	return err
}

func numbers(list []decimal) []uint64 {
	var n []uint64
	for _, d := range list {
		n = append(n, uint64(d))
	}
	return n
}

func TestHashVectors(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "hash_vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []struct {
			Name      string
			Tokens    []uint32
			BlockSize int         `json:"block_size"`
			LoRAName  string      `json:"lora_name"`
			CacheSalt string      `json:"cache_salt"`
			Eagle     bool        `json:"is_eagle"`
			MMHashes  [][]decimal `json:"mm_hashes"`
			Parent    *decimal    `json:"parent_sequence_hash"`
			Tokens64  []decimal   `json:"tokens_hashes"`
			Sequence  []decimal   `json:"sequence_hashes"`
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Cases) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			var mm [][]uint64
			for _, block := range c.MMHashes {
				mm = append(mm, numbers(block))
			}
			seed := wire.BlockSeed(c.LoRAName, c.CacheSalt)
			got := wire.AppendTokensHashes(nil, c.Tokens, c.BlockSize, seed, c.Eagle, mm)
			if diff := cmp.Diff(numbers(c.Tokens64), got); diff != "" {
				t.Errorf("tokens hashes differ (-want +got):\n%s", diff)
			}
			var chain []uint64
			for k, h := range got {
				switch {
				case k > 0:
					h = wire.SequenceHash(chain[k-1], h)
				case c.Parent != nil:
					h = wire.SequenceHash(uint64(*c.Parent), h)
				}
				chain = append(chain, h)
			}
			if diff := cmp.Diff(numbers(c.Sequence), chain); diff != "" {
				t.Errorf("sequence hashes differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPortableHashesAgree compares the hashes of copied tokens, as on big-endian machines, with
// the hashes of tokens in place.
func TestPortableHashesAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.SliceOfN(rapid.Uint32(), 1, 600).Draw(t, "tokens")
		seed := rapid.Uint64().Draw(t, "seed")
		want := wire.HashCopied(tokens, nil, seed)
		got := wire.AppendTokensHashes(nil, tokens, len(tokens), seed, false, nil)
		if diff := cmp.Diff([]uint64{want}, got); diff != "" {
			t.Errorf("hashes differ (-portable +got):\n%s", diff)
		}
	})
}

func TestTokensHashesOfNoBlockSize(t *testing.T) {
	for _, size := range []int{0, -1} {
		if got := wire.AppendTokensHashes(nil, []uint32{1, 2}, size, 0, false, nil); got != nil {
			t.Errorf("block size %d: %v, want none", size, got)
		}
	}
}

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
	plain := wire.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, wire.BlockSeed("", ""), false, nil)
	mixed := wire.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, wire.BlockSeed("", ""), false, [][]uint64{nil, {0xff}})
	salted := wire.AppendTokensHashes(nil, []uint32{1, 2, 3, 4}, 2, wire.BlockSeed("", "s"), false, [][]uint64{nil, {0xff}})
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
		if got := wire.BlockDigest(hash); got != want {
			t.Errorf("of %d: %#x, want %#x", hash, got, want)
		}
	}
}
