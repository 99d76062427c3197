package radix

import (
	"fmt"
	"slices"
	"testing"
	"unicode/utf8"
)

// unknownHash is a block hash that no rank has.
const unknownHash = 99

// hashes returns the block hashes of a path; unknownHash where no tier holds a block. It reports whether each block has
// one block hash only.
func (m *modelRank) hashes(path string) (hashes []uint64, unique bool) {
	byPath := make(map[string]uint64)
	unique = true
	for h, b := range m.blocks {
		if b.path == "" {
			continue
		}
		if _, ok := byPath[b.path]; ok {
			unique = false
		}
		byPath[b.path] = h
	}
	for i := range path {
		if i > 0 {
			hashes = append(hashes, unknownHash)
			if h, ok := byPath[path[:i]]; ok {
				hashes[len(hashes)-1] = h
			}
		}
	}
	if h, ok := byPath[path]; ok {
		hashes = append(hashes, h)
	}
	return hashes, unique
}

// holds returns how many of some block hashes, from the first, some tiers hold.
func (m *modelRank) holds(tiers uint8, hashes []uint64) int {
	for i, h := range hashes {
		if b := m.blocks[h]; b == nil || b.tiers&tiers == 0 {
			return i
		}
	}
	return len(hashes)
}

// mayHold returns how many blocks a match by block hashes may find: a block hash that is between two others of the same
// path, and that some rank holds in that place, counts as the block that the path has there.
func (m *modelRank) mayHold(pairs []pair, tiers uint8, hashes []uint64) int {
	held := make(map[string]bool)
	for _, b := range m.blocks {
		if b.tiers&tiers != 0 && b.path != "" {
			held[b.path] = true
		}
	}
	for i := range hashes {
		if m.holds(tiers, hashes[i:i+1]) == 0 && !m.isBetween(pairs, i, hashes, held) {
			return i
		}
	}
	return len(hashes)
}

func (m *modelRank) isBetween(pairs []pair, i int, hashes []uint64, held map[string]bool) bool {
	for first := range i + 1 {
		for last := i; last < len(hashes); last++ {
			a, b := m.blocks[hashes[first]], m.blocks[hashes[last]]
			if a == nil || b == nil || a.path == "" || len(b.path) < len(a.path) || b.path[:len(a.path)] != a.path ||
				utf8.RuneCountInString(b.path) != utf8.RuneCountInString(a.path)+last-first {
				continue
			}
			runes := []rune(b.path)
			path := string(runes[:len(runes)-(last-i)])
			if held[path] && slices.ContainsFunc(pairs, func(p pair) bool {
				other := p.model.blocks[hashes[i]]
				return other != nil && other.path == path
			}) {
				return true
			}
		}
	}
	return false
}

// compareMatchHashes returns an error that describes how a match by block hashes differs from the model's. The prefixes
// must be equal if exact is set.
func (p pair) compareMatchHashes(x *Index, pairs []pair, m *Matcher, modelName string, hashes []uint64, exact bool) error {
	x.MatchHashes(modelName, hashes, nil, m)
	var got Match
	for _, f := range m.Found {
		if f.Rank == p.rank {
			if got.Blocks > 0 || f.Blocks == 0 {
				return fmt.Errorf("a rank is found twice or without blocks: %+v", m.Found)
			}
			got = f
		}
	}
	if modelName != "" && modelName != p.model.model {
		if got.Blocks > 0 {
			return fmt.Errorf("found %+v of another model", got)
		}
		return nil
	}
	least, most := p.model.holds(allTiers, hashes), p.model.mayHold(pairs, allTiers, hashes)
	if got.Blocks < least || got.Blocks > most || exact && got.Blocks != least {
		return fmt.Errorf("found %+v with the hashes %v, want %d to %d blocks", got, hashes, least, most)
	}
	for tier, n := range got.TierBlocks {
		least, most := p.model.holds(1<<tier, hashes), p.model.mayHold(pairs, 1<<tier, hashes)
		if n > most || exact && n != least {
			return fmt.Errorf("found %+v with the hashes %v, want %d to %d blocks in tier %d", got, hashes, least, most, tier)
		}
	}
	return nil
}

// TestMatchHashesVisitsRuns extends prefixes by whole runs, up to the last block that the rank holds, or that the hashes
// have in common with it.
func TestMatchHashesVisitsRuns(t *testing.T) {
	const length = 300
	x := New()
	r := x.AddRank("m", nil)
	prompt := newPrompt(0, length)
	storePrompt(x, r, prompt, length)
	for i := range prompt {
		prompt[i] ^= 1 // block hashes
	}
	x.Remove(r, 0, prompt[250:260])
	x.Store(r, 1, Stored{Blocks: prompt[:100]})
	for same := 1; same <= length; same++ {
		hashes := slices.Clone(prompt)
		for i := same; i < length; i++ {
			hashes[i] = unknownHash
		}
		want := min(same, 250)
		var m Matcher
		x.MatchHashes("m", hashes, nil, &m)
		if len(m.Found) != 1 {
			t.Fatalf("found %+v", m.Found)
		}
		if f := m.Found[0]; f.Blocks != want || f.TierBlocks != [NumTiers]int{want, min(want, 100)} {
			t.Errorf("%d common hashes: the first run extends to %+v, want %d blocks", same, f, want)
		}
	}
}

// TestMatchHashesEndsAtAnUnknownHash has unknown hashes between known ones, in one rank and in several.
func TestMatchHashesEndsAtAnUnknownHash(t *testing.T) {
	const length = 40
	prompt := newPrompt(0, length)
	for ranks := 1; ranks <= 3; ranks++ {
		x := New()
		for range ranks {
			storePrompt(x, x.AddRank("m", nil), prompt, length)
		}
		for unknown := range length {
			hashes := make([]uint64, length)
			for i := range prompt {
				hashes[i] = prompt[i] ^ 1
			}
			hashes[unknown] = unknownHash
			var m Matcher
			x.MatchHashes("m", hashes, nil, &m)
			if want := min(unknown, 1) * ranks; len(m.Found) != want {
				t.Errorf("%d ranks, hash %d is unknown: found %+v, want %d", ranks, unknown, m.Found, want)
			}
			for _, f := range m.Found {
				if f.Blocks != unknown {
					t.Errorf("%d ranks, hash %d is unknown: found %+v", ranks, unknown, f)
				}
			}
		}
	}
}

// TestMatchHashesBoundsLookups has blocks of unknown content, which are looked up in each rank.
func TestMatchHashesBoundsLookups(t *testing.T) {
	const ranks, blocks = 4, 10
	x := New()
	hashes := newPrompt(0, blocks)
	for range ranks {
		x.Store(x.AddRank("m", nil), 0, Stored{Blocks: hashes})
	}
	for _, tt := range []struct {
		max, found int
		exceeded   bool
	}{{0, ranks, false}, {ranks*blocks + 1, ranks, false}, {ranks * blocks, ranks - 1, true}, {2*blocks + 5, 2, true}, {1, 0, true}} {
		m := Matcher{MaxLookups: tt.max}
		x.MatchHashes("m", hashes, nil, &m)
		if len(m.Found) != tt.found || m.Exceeded != tt.exceeded {
			t.Errorf("at most %d lookups: found %d, exceeded %t; want %d, %t", tt.max, len(m.Found), m.Exceeded, tt.found, tt.exceeded)
		}
	}
	var m Matcher
	first := true
	x.MatchHashes("m", hashes, func(*Rank) bool { selected := first; first = false; return selected }, &m)
	if len(m.Found) != 1 || m.Lookups != blocks {
		t.Errorf("one rank is selected: found %d by %d lookups", len(m.Found), m.Lookups)
	}
}
