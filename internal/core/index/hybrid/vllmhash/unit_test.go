package vllmhash_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
)

// TestFindUnitFindsTheUnit makes a store of an engine, of all blocks or some, and finds the engine's unit.
func TestFindUnitFindsTheUnit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawPrompt(t)
		store := vllmhash.Store{Tokens: v.Tokens, BlockSize: v.Unit * rapid.IntRange(1, 6).Draw(t, "units"), Content: v.content()}
		all, err := mustHasher(t, v.algorithm(), v.seed(), v.Unit).Append(nil, v.Tokens, v.content(), new(vllmhash.Buffer))
		if err != nil {
			t.Fatal(err)
		}
		dense := rapid.Bool().Draw(t, "dense")
		for end := store.BlockSize; end <= len(v.Tokens); end += store.BlockSize {
			if dense || rapid.Bool().Draw(t, "kept") {
				store.Hashes = append(store.Hashes, all[end/v.Unit-1])
			}
		}
		if len(store.Hashes) == 0 {
			return
		}
		if got, err := vllmhash.FindUnit(v.algorithm(), v.seed(), store); err != nil || got != v.Unit {
			t.Fatalf("got unit %d, %v, want %d", got, err, v.Unit)
		}
		store.Hashes[rapid.IntRange(0, len(store.Hashes)-1).Draw(t, "wrong")]++
		if got, err := vllmhash.FindUnit(v.algorithm(), v.seed(), store); !errors.Is(err, vllmhash.ErrNoUnit) {
			t.Fatalf("with a wrong hash: got unit %d, %v, want %v", got, err, vllmhash.ErrNoUnit)
		}
	})
}

func TestFindUnitRefusesWhatIsNoStore(t *testing.T) {
	for _, s := range []vllmhash.Store{
		{},
		{Tokens: make([]uint32, 16), BlockSize: 16},
		{Tokens: make([]uint32, 16), Hashes: []uint64{1}},
		{Tokens: make([]uint32, 16), BlockSize: -16, Hashes: []uint64{1}},
		{Tokens: make([]uint32, 15), BlockSize: 16, Hashes: []uint64{1}},
		{Tokens: make([]uint32, 31), BlockSize: 16, Hashes: []uint64{1, 2}},
	} {
		if got, err := vllmhash.FindUnit(vllmhash.SHA256, vllmhash.DefaultSeed, s); err == nil || errors.Is(err, vllmhash.ErrNoUnit) {
			t.Errorf("%+v: got unit %d, %v, want an error", s, got, err)
		}
	}
	if _, err := vllmhash.FindUnit(9, "", vllmhash.Store{Tokens: make([]uint32, 16), BlockSize: 16, Hashes: []uint64{1}}); err == nil {
		t.Error("an unknown algorithm: got no error")
	}
}

// TestLargeBlocksHaveSmallerUnits finds the unit of blocks that are larger than MaxUnit.
func TestLargeBlocksHaveSmallerUnits(t *testing.T) {
	tokens := make([]uint32, 3*vllmhash.MaxUnit)
	all, err := mustHasher(t, vllmhash.SHA256, vllmhash.DefaultSeed, vllmhash.MaxUnit).Append(nil, tokens, vllmhash.Content{}, new(vllmhash.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	store := vllmhash.Store{Tokens: tokens, BlockSize: len(tokens), Hashes: all[2:]}
	if got, err := vllmhash.FindUnit(vllmhash.SHA256, vllmhash.DefaultSeed, store); err != nil || got != vllmhash.MaxUnit {
		t.Errorf("got unit %d, %v, want %d", got, err, vllmhash.MaxUnit)
	}
}

func FuzzFindUnit(f *testing.F) {
	f.Add(uint8(0), "vllm-none-hash", []byte("0123456789abcdef0123456789abcdef"), 4, 2, "adapter", "/adapter", "salt")
	f.Add(uint8(1), "", []byte{}, 0, 0, "", "", "")
	f.Fuzz(func(t *testing.T, algorithm uint8, seed string, tokens []byte, blockSize, hashes int, name, path, salt string) {
		s := vllmhash.Store{BlockSize: blockSize, Content: vllmhash.Content{LoRAName: name, LoRAPath: path, CacheSalt: salt}}
		for ; len(tokens) >= 4; tokens = tokens[4:] {
			s.Tokens = append(s.Tokens, binary.LittleEndian.Uint32(tokens))
		}
		s.Hashes = make([]uint64, min(max(hashes, 0), len(s.Tokens)+1))
		if unit, err := vllmhash.FindUnit(vllmhash.Algorithm(algorithm), seed, s); err == nil && (unit < 1 || blockSize%unit != 0) {
			t.Errorf("got unit %d of blocks of %d tokens", unit, blockSize)
		}
	})
}
