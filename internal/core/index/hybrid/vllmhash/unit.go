package vllmhash

import (
	"errors"
	"fmt"
)

// ErrNoUnit is returned by FindUnit if no hash unit yields the hashes of a store: the engine has another algorithm or seed, or its hashes
// contain what Store does not.
var ErrNoUnit = errors.New("find hash unit: no divisor of the block size yields the engine's hashes; configure its algorithm and PYTHONHASHSEED, or do without")

// Store is a store event of an engine, of blocks without a parent.
type Store struct {
	Tokens []uint32
	// BlockSize is the number of tokens in a block, at least 1.
	BlockSize int
	// Hashes are the hashes of the blocks, in order. Groups other than full attention may leave out blocks.
	Hashes  []uint64
	Content Content
}

// FindUnit returns the number of tokens of an engine's hash unit: the divisor of the block size with which the hashes of a
// store are computed. seed is the engine's PYTHONHASHSEED, or DefaultSeed. If there is none, it returns ErrNoUnit.
//
// It computes the hashes of the first block with each divisor. If blocks are left out, it computes those of all tokens with each.
func FindUnit(algorithm Algorithm, seed string, s Store) (int, error) {
	blocks := 0
	if s.BlockSize > 0 {
		blocks = len(s.Tokens) / s.BlockSize
	}
	if len(s.Hashes) == 0 || len(s.Hashes) > blocks {
		return 0, fmt.Errorf("find hash unit: %d hashes of %d whole blocks; want 1 hash to a block at most, and at least 1", len(s.Hashes), blocks)
	}
	if err := s.Content.check(); err != nil {
		return 0, err
	}
	var b Buffer
	for unit := min(s.BlockSize, MaxUnit); unit > 0; unit-- {
		if s.BlockSize%unit != 0 {
			continue
		}
		h, err := New(algorithm, seed, unit)
		if err != nil {
			return 0, err
		}
		if h.verifies(&s, blocks, &b) {
			return unit, nil
		}
	}
	return 0, ErrNoUnit
}

// verifies reports whether the hashes of a store are those of its tokens.
func (h *Hasher) verifies(s *Store, blocks int, b *Buffer) bool {
	u := newUnits(h, s.Content, b)
	hashes := s.Hashes
	for i := range blocks {
		block := s.Tokens[i*s.BlockSize : (i+1)*s.BlockSize]
		var hash uint64
		for ; len(block) > 0; block = block[h.unit:] {
			hash = u.next(block[:h.unit])
		}
		if len(hashes) > 0 && hash == hashes[0] {
			hashes = hashes[1:]
		} else if len(s.Hashes) == blocks {
			return false
		}
	}
	return len(hashes) == 0
}
