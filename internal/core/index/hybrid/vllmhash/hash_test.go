package vllmhash_test

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
)

// vector is a prompt, and the hashes that vLLM computed.
type vector struct {
	Algorithm string   `json:"algorithm"`
	Seed      *string  `json:"seed"` // nil: PYTHONHASHSEED is not set
	Unit      int      `json:"unit"`
	Tokens    []uint32 `json:"tokens"`
	LoRAName  string   `json:"lora_name"`
	LoRAPath  string   `json:"lora_path"`
	CacheSalt string   `json:"cache_salt"`
	Hashes    hashes   `json:"hashes"`
}

// hashes are decimal strings in JSON.
type hashes []uint64

func (h *hashes) UnmarshalJSON(b []byte) error {
	return json.Unmarshal([]byte(strings.ReplaceAll(string(b), `"`, "")), (*[]uint64)(h))
}

func (v *vector) seed() string {
	if v.Seed == nil {
		return vllmhash.DefaultSeed
	}
	return *v.Seed
}

func (v *vector) algorithm() vllmhash.Algorithm {
	if v.Algorithm == "sha256_cbor" {
		return vllmhash.SHA256CBOR
	}
	return vllmhash.SHA256
}

func (v *vector) content() vllmhash.Content {
	return vllmhash.Content{LoRAName: v.LoRAName, LoRAPath: v.LoRAPath, CacheSalt: v.CacheSalt}
}

// readVectors reads testdata/vllm.json, whose source says how vLLM's hashes were made.
func readVectors(t testing.TB) []vector {
	t.Helper()
	data, err := os.ReadFile("testdata/vllm.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []vector `json:"cases"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Cases) == 0 {
		t.Fatal("no vectors")
	}
	return file.Cases
}

func mustHasher(t rapid.TB, algorithm vllmhash.Algorithm, seed string, unit int) *vllmhash.Hasher {
	t.Helper()
	h, err := vllmhash.New(algorithm, seed, unit)
	if err != nil {
		t.Fatal(err)
	}
	return &h
}

func TestHashesAreVLLMs(t *testing.T) {
	for i, v := range readVectors(t) {
		h := mustHasher(t, v.algorithm(), v.seed(), v.Unit)
		if h.Unit() != v.Unit {
			t.Fatalf("got unit %d, want %d", h.Unit(), v.Unit)
		}
		got, err := h.Append(nil, v.Tokens, v.content(), new(vllmhash.Buffer))
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != len(v.Tokens)/v.Unit || len(got) > 0 && !cmp.Equal(got, []uint64(v.Hashes)) {
			t.Errorf("vector %d: %s, unit %d, content %+v: got %v, want %v", i, v.Algorithm, v.Unit, v.content(), got, v.Hashes)
		}
	}
}

// TestPrefixesHaveTheSameHashes checks that Append appends, and that more tokens do not change hashes.
func TestPrefixesHaveTheSameHashes(t *testing.T) {
	h := mustHasher(t, vllmhash.SHA256, vllmhash.DefaultSeed, 16)
	tokens := make([]uint32, 100)
	for i := range tokens {
		tokens[i] = uint32(i * i * 100)
	}
	all, err := h.Append([]uint64{7}, tokens, vllmhash.Content{CacheSalt: "s"}, new(vllmhash.Buffer))
	if err != nil || len(all) != 7 || all[0] != 7 {
		t.Fatalf("got %v, %v", all, err)
	}
	for n := range tokens {
		got, err := h.Append(nil, tokens[:n], vllmhash.Content{CacheSalt: "s"}, new(vllmhash.Buffer))
		if err != nil || len(got) != n/16 || n >= 16 && !cmp.Equal(got, all[1:1+n/16]) {
			t.Fatalf("%d tokens: got %v, %v, want the first of %v", n, got, err, all[1:])
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, tt := range []struct {
		algorithm vllmhash.Algorithm
		seed      string
		unit      int
		want      string
	}{
		{2, "0", 16, "algorithm 2 unknown; want SHA256 or SHA256CBOR"},
		{vllmhash.SHA256, "0", 0, "hash unit of 0 tokens; want 1 to 8192"},
		{vllmhash.SHA256, "0", 8193, "hash unit of 8193 tokens; want 1 to 8192"},
		{vllmhash.SHA256, strings.Repeat("x", 1025), 16, "seed of 1025 bytes; want at most 1024"},
		{vllmhash.SHA256, "\xff", 16, "seed is no valid UTF-8"},
	} {
		if _, err := vllmhash.New(tt.algorithm, tt.seed, tt.unit); err == nil || err.Error() != "compute vLLM's hashes: "+tt.want {
			t.Errorf("got error %v, want %s", err, tt.want)
		}
	}
}

func TestAppendRefuses(t *testing.T) {
	h := mustHasher(t, vllmhash.SHA256, vllmhash.DefaultSeed, 16)
	for _, tt := range []struct {
		content vllmhash.Content
		want    string
	}{
		{vllmhash.Content{LoRAPath: "/a"}, "a LoRA path without a name"},
		{vllmhash.Content{LoRAName: "a"}, `the path of LoRA adapter "a" is unknown; the engine's /v1/models has it`},
		{vllmhash.Content{LoRAName: "\xff", LoRAPath: "/a"}, "LoRA name is no valid UTF-8"},
		{vllmhash.Content{LoRAName: strings.Repeat("x", 1025), LoRAPath: "/a"}, "LoRA name of 1025 bytes; want at most 1024"},
		{vllmhash.Content{LoRAName: "a", LoRAPath: strings.Repeat("x", 4097)}, "LoRA path of 4097 bytes; want at most 4096"},
		{vllmhash.Content{CacheSalt: "\xc0"}, "cache salt is no valid UTF-8"},
		{vllmhash.Content{CacheSalt: strings.Repeat("x", 1025)}, "cache salt of 1025 bytes; want at most 1024"},
	} {
		got, err := h.Append([]uint64{1}, make([]uint32, 32), tt.content, new(vllmhash.Buffer))
		if err == nil || err.Error() != "compute vLLM's hashes: "+tt.want || len(got) != 1 {
			t.Errorf("got %v and error %v, want no hashes and %s", got, err, tt.want)
		}
		_, err = vllmhash.FindUnit(vllmhash.SHA256, vllmhash.DefaultSeed, vllmhash.Store{
			Tokens: make([]uint32, 16), BlockSize: 16, Hashes: []uint64{1}, Content: tt.content})
		if err == nil || errors.Is(err, vllmhash.ErrNoUnit) {
			t.Errorf("FindUnit: got error %v, want %s", err, tt.want)
		}
	}
}
