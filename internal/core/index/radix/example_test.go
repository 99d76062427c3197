package radix_test

import (
	"fmt"

	"github.com/kvcast/kvcast/internal/core/index/radix"
)

func Example() {
	x := radix.New()
	a, b := x.AddRank("llama", "worker a"), x.AddRank("llama", "worker b")
	// The block hashes of two engines differ; the tokens hashes of equal contents are equal.
	x.Store(a, 0, radix.Stored{Blocks: []uint64{1, 2, 3}, Tokens: []uint64{70, 71, 72}})
	x.Store(b, 0, radix.Stored{Blocks: []uint64{9}, Tokens: []uint64{70}})
	x.Store(b, 1, radix.Stored{Parent: 9, HasParent: true, Blocks: []uint64{8}, Tokens: []uint64{71}})

	var m radix.Matcher
	x.Match("llama", []uint64{70, 71, 73}, &m)
	for _, f := range m.Found {
		fmt.Println(f.Rank.Model(), f.Rank.Owner, f.Blocks, f.TierBlocks)
	}
	// Unordered output:
	// llama worker a 2 [2 0 0 0]
	// llama worker b 2 [1 0 0 0]
}
