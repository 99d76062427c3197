package vllmhash_test

import (
	"crypto/sha256"
	"encoding/binary"
	"math/big"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
)

// tuple is a Python tuple of nil, uint32, string, []byte and tuples.
type tuple []any

// pickled encodes a value with Python's pickle, protocol 5, as one frame. No object occurs twice.
func pickled(v any) []byte {
	body := append(pickledValue(v), '.')
	return slices.Concat([]byte{0x80, 5, 0x95}, binary.LittleEndian.AppendUint64(nil, uint64(len(body))), body)
}

func pickledValue(v any) (b []byte) {
	const memoize = 0x94
	switch v := v.(type) {
	case nil:
		return []byte("N")
	case uint32:
		return pickledInt(v)
	case string:
		if len(v) > 255 {
			return slices.Concat([]byte("X"), binary.LittleEndian.AppendUint32(nil, uint32(len(v))), []byte(v), []byte{memoize})
		}
		return slices.Concat([]byte{0x8c, byte(len(v))}, []byte(v), []byte{memoize})
	case []byte:
		return slices.Concat([]byte{'C', byte(len(v))}, v, []byte{memoize})
	case tuple:
		for _, x := range v {
			b = append(b, pickledValue(x)...)
		}
		if len(v) > 3 {
			return slices.Concat([]byte("("), b, []byte{'t', memoize})
		}
		return append(b, []byte{')', 0x85, 0x86, 0x87}[len(v)], memoize)
	}
	panic("no such value")
}

// pickledInt encodes an integer: one or two bytes without sign, four bytes with sign, or as many as it has with sign.
func pickledInt(v uint32) []byte {
	little := binary.LittleEndian.AppendUint32(nil, v)
	switch size := (big.NewInt(int64(v)).BitLen() + 7) / 8; {
	case size <= 1:
		return append([]byte("K"), little[0])
	case size == 2:
		return append([]byte("M"), little[:2]...)
	case int32(v) >= 0:
		return append([]byte("J"), little...)
	default:
		return append(append([]byte{0x8a, 5}, little...), 0)
	}
}

// cbor encodes a value in canonical CBOR.
func cbor(v any) []byte {
	head := func(major byte, n int) []byte {
		big := binary.BigEndian.AppendUint32(nil, uint32(n))
		switch {
		case n <= 23:
			return []byte{major*32 + byte(n)}
		case n <= 0xff:
			return []byte{major*32 + 24, big[3]}
		case n <= 0xffff:
			return append([]byte{major*32 + 25}, big[2:]...)
		}
		return append([]byte{major*32 + 26}, big...)
	}
	switch v := v.(type) {
	case uint32:
		return head(0, int(v))
	case []byte:
		return append(head(2, len(v)), v...)
	case string:
		return append(head(3, len(v)), v...)
	case tuple:
		b := head(4, len(v))
		for _, x := range v {
			b = append(b, cbor(x)...)
		}
		return b
	}
	return []byte{0xf6}
}

// reference computes the hashes of a prompt from their definition.
func reference(v *vector) (hashes []uint64) {
	encode := pickled
	if v.algorithm() == vllmhash.SHA256CBOR {
		encode = cbor
	}
	parent := sha256.Sum256(encode(v.seed()))
	for i := 0; i+v.Unit <= len(v.Tokens); i += v.Unit {
		var tokens, keys tuple
		for _, t := range v.Tokens[i : i+v.Unit] {
			tokens = append(tokens, t)
		}
		if v.LoRAName != "" {
			keys = append(keys, tuple{"lora", v.LoRAName, v.LoRAPath})
		}
		if v.CacheSalt != "" && i == 0 {
			keys = append(keys, tuple{"cache_salt", v.CacheSalt})
		}
		var extra any
		if len(keys) > 0 {
			extra = keys
		}
		parent = sha256.Sum256(encode(tuple{slices.Clone(parent[:]), tokens, extra}))
		hashes = append(hashes, binary.BigEndian.Uint64(parent[24:]))
	}
	return hashes
}

// drawPrompt draws a prompt of some engine, without its hashes.
func drawPrompt(t *rapid.T) *vector {
	v := &vector{
		Algorithm: rapid.SampledFrom([]string{"sha256", "sha256_cbor"}).Draw(t, "algorithm"),
		Unit:      rapid.IntRange(1, 40).Draw(t, "unit"),
		Tokens: rapid.SliceOfN(rapid.OneOf(rapid.Uint32Max(300), rapid.Uint32Range(65_000, 66_000), rapid.Uint32()), 0, 200).
			Draw(t, "tokens"),
		CacheSalt: rapid.StringN(0, 300, 1000).Draw(t, "salt"),
	}
	if rapid.Bool().Draw(t, "seeded") {
		seed := rapid.StringN(0, 20, -1).Draw(t, "seed")
		v.Seed = &seed
	}
	if v.LoRAName = rapid.StringN(0, 20, -1).Draw(t, "name"); v.LoRAName != "" {
		v.LoRAPath = rapid.StringN(1, 300, 1000).Draw(t, "path")
	}
	return v
}

// TestHashesAreThoseOfTheDefinition compares the hashes with those of independent encoders.
func TestHashesAreThoseOfTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawPrompt(t)
		got, err := mustHasher(t, v.algorithm(), v.seed(), v.Unit).Append(nil, v.Tokens, v.content(), new(vllmhash.Buffer))
		if err != nil {
			t.Fatal(err)
		}
		if want := reference(v); !cmp.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	})
}

// TestTheReferenceIsVLLMs checks the independent encoders with vLLM's own hashes.
func TestTheReferenceIsVLLMs(t *testing.T) {
	for i, v := range readVectors(t) {
		if got := reference(&v); !slices.Equal(got, v.Hashes) {
			t.Errorf("vector %d: got %v, want %v", i, got, v.Hashes)
		}
	}
}
