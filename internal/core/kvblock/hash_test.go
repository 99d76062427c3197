package kvblock_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
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
			seed := kvblock.Seed(c.LoRAName, c.CacheSalt)
			got := kvblock.AppendTokensHashes(nil, c.Tokens, c.BlockSize, seed, c.Eagle, mm)
			if diff := cmp.Diff(numbers(c.Tokens64), got); diff != "" {
				t.Errorf("tokens hashes differ (-want +got):\n%s", diff)
			}
			var chain []uint64
			for k, h := range got {
				switch {
				case k > 0:
					h = kvblock.SequenceHash(chain[k-1], h)
				case c.Parent != nil:
					h = kvblock.SequenceHash(uint64(*c.Parent), h)
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
		want := kvblock.HashCopied(tokens, nil, seed)
		got := kvblock.AppendTokensHashes(nil, tokens, len(tokens), seed, false, nil)
		if diff := cmp.Diff([]uint64{want}, got); diff != "" {
			t.Errorf("hashes differ (-portable +got):\n%s", diff)
		}
	})
}

func TestTokensHashesOfNoBlockSize(t *testing.T) {
	for _, size := range []int{0, -1} {
		if got := kvblock.AppendTokensHashes(nil, []uint32{1, 2}, size, 0, false, nil); got != nil {
			t.Errorf("block size %d: %v, want none", size, got)
		}
	}
}
