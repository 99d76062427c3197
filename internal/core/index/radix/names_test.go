package radix

import (
	"fmt"
	"slices"
)

// compareNames compares the names of a path, all of whose blocks the rank may have, with those of the model: chain, unless a block had several names at a time.
func (p pair) compareNames(x *Index, path string, tokens, chain []uint64, shorter bool, seen occurrences) error {
	m := Matcher{KeepPath: true}
	x.Match(p.model.model, tokens, &m)
	held := p.model.match(allTiers, tokens)
	for _, most := range []int{len(tokens), held / 2} {
		got := m.Names(p.rank, most, []uint64{unknownHash})[1:]
		if len(got) > min(held, most) {
			return fmt.Errorf("%d names of %v, want at most %d, of which %d are held", len(got), tokens, most, held)
		}
		for i, h := range got {
			if b := p.model.blocks[h]; b == nil || b.path != path[:i+1] {
				return fmt.Errorf("name %d of %q is %d, which is %v", i, path, h, b)
			}
		}
		if want := chain[:min(held, most)]; !p.model.hadTwins && !shorter && !slices.Equal(got, want) {
			return fmt.Errorf("names of %v are %v, want %v", tokens, got, want)
		}
		seen.add("names of several blocks", len(got) > 2)
	}
	return nil
}
