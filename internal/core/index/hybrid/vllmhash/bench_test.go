package vllmhash_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
)

// promptOf returns tokens of a vocabulary of 200,000.
func promptOf(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i) * 2_654_435_761 % 200_000
	}
	return tokens
}

func BenchmarkAppend(b *testing.B) {
	for _, bb := range []struct {
		name      string
		algorithm vllmhash.Algorithm
		unit      int
		content   vllmhash.Content
	}{
		{"sha256, unit 16", vllmhash.SHA256, 16, vllmhash.Content{}},
		{"sha256, unit 16, LoRA and salt", vllmhash.SHA256, 16, vllmhash.Content{LoRAName: "adapter", LoRAPath: "/adapters/adapter", CacheSalt: "tenant"}},
		{"sha256, unit 64", vllmhash.SHA256, 64, vllmhash.Content{}},
		{"sha256_cbor, unit 16", vllmhash.SHA256CBOR, 16, vllmhash.Content{}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			h := mustHasher(b, bb.algorithm, vllmhash.DefaultSeed, bb.unit)
			tokens, hashes, buffer := promptOf(16_000), []uint64(nil), vllmhash.Buffer{}
			b.ReportAllocs()
			for b.Loop() {
				hashes, _ = h.Append(hashes[:0], tokens, bb.content, &buffer)
			}
		})
	}
}

func BenchmarkFindUnit(b *testing.B) {
	tokens := promptOf(16_000)
	for _, unit := range []int{16, 1} {
		all, err := mustHasher(b, vllmhash.SHA256, vllmhash.DefaultSeed, unit).Append(nil, tokens, vllmhash.Content{}, new(vllmhash.Buffer))
		if err != nil {
			b.Fatal(err)
		}
		s := vllmhash.Store{Tokens: tokens, BlockSize: 16}
		for i := 16/unit - 1; i < len(all); i += 16 / unit {
			s.Hashes = append(s.Hashes, all[i])
		}
		b.Run(map[int]string{16: "unit 16", 1: "unit 1"}[unit], func(b *testing.B) {
			for b.Loop() {
				if _, err := vllmhash.FindUnit(vllmhash.SHA256, vllmhash.DefaultSeed, s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestAppendDoesNotAllocate(t *testing.T) {
	content := vllmhash.Content{LoRAName: "adapter", LoRAPath: "/adapters/adapter", CacheSalt: "tenant"}
	for _, algorithm := range []vllmhash.Algorithm{vllmhash.SHA256, vllmhash.SHA256CBOR} {
		h := mustHasher(t, algorithm, vllmhash.DefaultSeed, 16)
		tokens, hashes, buffer := promptOf(1600), make([]uint64, 0, 100), vllmhash.Buffer{}
		if n := testing.AllocsPerRun(10, func() { hashes, _ = h.Append(hashes[:0], tokens, content, &buffer) }); n != 0 {
			t.Errorf("algorithm %d: %v allocations, want none", algorithm, n)
		}
	}
}
