// Package vllmhash computes vLLM's own block hashes of a prompt.
//
// In: token ids, the LoRA adapter and the cache salt of a prompt. Out: the 64-bit hashes that vLLM's KV-cache events name its blocks
// by, one for each hash unit. So the blocks of every attention group of an engine can be looked up, though only those of full
// attention are stored without gaps.
//
// A hash names the whole prefix up to the end of its unit: it is the SHA-256 of the hash before it, the unit's tokens, and extra keys,
// in the encoding of Python's pickle or of CBOR. It is the same in all attention groups, tiers and block sizes. The first hash follows
// that of a seed. This is what vLLM 0.32 and 0.33 do by default. Earlier versions had a random seed unless PYTHONHASHSEED was set.
//
// The hashes cannot be computed of prompts with images or embeddings, of engines with an xxhash algorithm, and of
// engines whose hashes cover lookahead tokens. FindUnit checks the hashes of an engine against one of its stores.
package vllmhash

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// Algorithm is how a unit is encoded and hashed: vLLM's prefix-caching-hash-algo.
type Algorithm uint8

// The algorithms. SHA256 is vLLM's default.
const (
	// SHA256 is SHA-256 of the encoding of Python's pickle, protocol 5.
	SHA256 Algorithm = iota
	// SHA256CBOR is SHA-256 of canonical CBOR.
	SHA256CBOR
)

// DefaultSeed is the seed of an engine for which PYTHONHASHSEED is not set.
const DefaultSeed = "vllm-none-hash"

// Bounds of what is hashed. With them, pickle encodes a unit in a single frame.
const (
	// MaxUnit is the greatest number of tokens of a hash unit.
	MaxUnit = 8192
	// MaxNameBytes bounds the seed, the name of an adapter and the cache salt, and MaxPathBytes the path of an adapter, in bytes.
	MaxNameBytes = 1024
	MaxPathBytes = 4096
)

// Content is what a prompt's hashes contain besides tokens. Its strings are valid UTF-8.
type Content struct {
	// LoRAName is the name of the LoRA adapter, and LoRAPath its path as the engine was given it; both are empty without an adapter.
	// The path is not in events; vLLM's /v1/models has it as root. If vLLM refers to equal name and path by one Python object, the
	// hashes of pickle are others than those computed here.
	LoRAName, LoRAPath string
	// CacheSalt is the cache salt; empty if there is none.
	CacheSalt string
}

// Hasher computes hashes of one engine. New makes a Hasher. It does not change, and several goroutines may use it.
type Hasher struct {
	algorithm Algorithm
	unit      int
	root      [sha256.Size]byte // the hash before the first
}

// New returns a Hasher. seed is the engine's PYTHONHASHSEED, or DefaultSeed; unit is the number of tokens of a hash unit, from 1 to
// MaxUnit, which vLLM calls hash block size.
func New(algorithm Algorithm, seed string, unit int) (Hasher, error) {
	switch {
	case algorithm > SHA256CBOR:
		return Hasher{}, fmt.Errorf("compute vLLM's hashes: algorithm %d unknown; want SHA256 or SHA256CBOR", algorithm)
	case unit < 1 || unit > MaxUnit:
		return Hasher{}, fmt.Errorf("compute vLLM's hashes: hash unit of %d tokens; want 1 to %d", unit, MaxUnit)
	}
	if err := checkText("seed", seed, MaxNameBytes); err != nil {
		return Hasher{}, err
	}
	h := Hasher{algorithm: algorithm, unit: unit}
	if algorithm == SHA256CBOR {
		h.root = sha256.Sum256(appendCBORText(nil, seed))
	} else {
		h.root = sha256.Sum256(appendPickledSeed(nil, seed))
	}
	return h, nil
}

// Unit returns the number of tokens of a hash unit.
func (h *Hasher) Unit() int { return h.unit }

// check returns an error if the hashes of a content cannot be computed.
func (c *Content) check() error {
	if c.LoRAName == "" && c.LoRAPath != "" {
		return errors.New("compute vLLM's hashes: a LoRA path without a name")
	}
	if c.LoRAName != "" && c.LoRAPath == "" {
		return fmt.Errorf("compute vLLM's hashes: the path of LoRA adapter %q is unknown; the engine's /v1/models has it", c.LoRAName)
	}
	if err := checkText("LoRA name", c.LoRAName, MaxNameBytes); err != nil {
		return err
	}
	if err := checkText("LoRA path", c.LoRAPath, MaxPathBytes); err != nil {
		return err
	}
	return checkText("cache salt", c.CacheSalt, MaxNameBytes)
}

func checkText(what, text string, maxBytes int) error {
	if len(text) > maxBytes {
		return fmt.Errorf("compute vLLM's hashes: %s of %d bytes; want at most %d", what, len(text), maxBytes)
	}
	if !utf8.ValidString(text) {
		return fmt.Errorf("compute vLLM's hashes: %s is no valid UTF-8", what)
	}
	return nil
}

// Buffer is the memory in which units are encoded, for reuse. The zero value is ready for use, by one goroutine at a time.
type Buffer struct {
	message []byte
	// first and later end the message of the first unit and of all later ones: only the first has the cache salt.
	first, later []byte
}

// Append appends the hash of each whole unit of a prompt to hashes. It allocates only to grow hashes and b.
func (h *Hasher) Append(hashes []uint64, tokens []uint32, c Content, b *Buffer) ([]uint64, error) {
	if err := c.check(); err != nil {
		return hashes, err
	}
	u := newUnits(h, c, b)
	for ; len(tokens) >= h.unit; tokens = tokens[h.unit:] {
		hashes = append(hashes, u.next(tokens[:h.unit]))
	}
	return hashes, nil
}

// units computes the hashes of a prompt unit by unit.
type units struct {
	*Buffer
	algorithm Algorithm
	parent    [sha256.Size]byte
	end       []byte // of the next message
}

// newUnits begins a prompt.
func newUnits(h *Hasher, c Content, b *Buffer) units {
	u := units{Buffer: b, algorithm: h.algorithm, parent: h.root}
	b.first = u.appendEnd(b.first[:0], c)
	c.CacheSalt = ""
	b.later = u.appendEnd(b.later[:0], c)
	u.end = b.first
	return u
}

func (u *units) appendEnd(b []byte, c Content) []byte {
	if u.algorithm == SHA256CBOR {
		return appendCBOREnd(b, c)
	}
	return appendPickledEnd(b, c)
}

// next returns the hash of the next unit.
func (u *units) next(tokens []uint32) uint64 {
	if u.algorithm == SHA256CBOR {
		u.message = append(appendCBORUnit(u.message[:0], &u.parent, tokens), u.end...)
	} else {
		u.message = finishPickle(append(appendPickledUnit(u.message[:0], &u.parent, tokens), u.end...))
	}
	u.end = u.later
	u.parent = sha256.Sum256(u.message)
	return binary.BigEndian.Uint64(u.parent[sha256.Size-8:])
}
