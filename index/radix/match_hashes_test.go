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
// path counts as the block that the path has there.
func (m *modelRank) mayHold(tiers uint8, hashes []uint64) int {
	held := make(map[string]bool)
	for _, b := range m.blocks {
		if b.tiers&tiers != 0 && b.path != "" {
			held[b.path] = true
		}
	}
	for i := range hashes {
		if m.holds(tiers, hashes[i:i+1]) == 0 && !m.isBetween(i, hashes, held) {
			return i
		}
	}
	return len(hashes)
}

func (m *modelRank) isBetween(i int, hashes []uint64, held map[string]bool) bool {
	for first := range i + 1 {
		for last := i; last < len(hashes); last++ {
			a, b := m.blocks[hashes[first]], m.blocks[hashes[last]]
			if a == nil || b == nil || a.path == "" || len(b.path) < len(a.path) || b.path[:len(a.path)] != a.path ||
				utf8.RuneCountInString(b.path) != utf8.RuneCountInString(a.path)+last-first {
				continue
			}
			if runes := []rune(b.path); held[string(runes[:len(runes)-(last-i)])] {
				return true
			}
		}
	}
	return false
}

// compareMatchHashes returns an error that describes how a match by block hashes differs from the model's. The prefixes
// must be equal if exact is set.
func (p pair) compareMatchHashes(x *Index, m *Matcher, modelName string, hashes []uint64, exact bool) error {
	x.MatchHashes(modelName, hashes, m)
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
	least, most := p.model.holds(allTiers, hashes), p.model.mayHold(allTiers, hashes)
	if got.Blocks < least || got.Blocks > most || exact && got.Blocks != least {
		return fmt.Errorf("found %+v with the hashes %v, want %d to %d blocks", got, hashes, least, most)
	}
	for tier, n := range got.TierBlocks {
		least, most := p.model.holds(1<<tier, hashes), p.model.mayHold(1<<tier, hashes)
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
		f := Match{Rank: r}
		if x.extendHashes(&f, hashes); f.Blocks != want || f.TierBlocks != [NumTiers]int{want, min(want, 100)} {
			t.Errorf("%d common hashes: the first run extends to %+v, want %d blocks", same, f, want)
		}
	}
}
