package radix

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// idsOfBlock returns the token ids of a block of tests, which follow from its tokens hash.
func idsOfBlock(tokens uint64, size int) []uint32 {
	ids := make([]uint32, size)
	for i := range ids {
		ids[i] = uint32(tokens)*10 + uint32(i)
	}
	return ids
}

// retainedIDs returns the token ids of all blocks of a rank, by block hash.
func retainedIDs(x *Index, r *Rank) map[uint64][]uint32 {
	all := make(map[uint64][]uint32)
	for from, first := uint64(0), true; first || from != 0; first = false {
		var part []Block
		part, from = x.Scan(r, from, nil)
		for i := range part {
			all[part[i].Hash] = x.AppendTokenIDs(nil, &part[i])
		}
	}
	return all
}

// checkRetained checks the memory of token ids against the runs.
func checkRetained(t *rapid.T, x *Index) {
	used := int64(0)
	for id := uint32(1); id < x.tree.runs; id++ {
		r := x.tree.run(id)
		if r.rare == nil {
			continue
		}
		ids := &r.rare.ids
		used += 4 * int64(cap(ids.all))
		if len(ids.all) > len(r.tokens)*int(ids.size) {
			t.Fatalf("run %d has %d blocks, and %d token ids of blocks of %d", id, len(r.tokens), len(ids.all), ids.size)
		}
	}
	if used != x.TokenIDBytes() || used > x.tree.retained.limit {
		t.Fatalf("got %d bytes of token ids, want %d, of at most %d", x.TokenIDBytes(), used, x.tree.retained.limit)
	}
}

// TestTokenIDsAreThoseOfTheContent stores and removes random chains of several ranks, with and without token ids. The ids of a
// block are those of its content or unknown, and known if the block was stored with them after its parent, and there is room.
func TestTokenIDsAreThoseOfTheContent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 2
		x := New()
		x.tree.limits.run = rapid.Uint32Range(1, 8).Draw(t, "run")
		limit := rapid.SampledFrom([]int64{1, 200, 1 << 30}).Draw(t, "limit")
		x.RetainTokenIDs(limit)
		ranks := []*Rank{x.AddRank("m", nil), x.AddRank("m", nil)}
		known := make([]map[uint64]bool, len(ranks)) // blocks that must have ids, by block hash
		for i := range known {
			known[i] = make(map[uint64]bool)
		}
		for range rapid.IntRange(1, 60).Draw(t, "changes") {
			i := rapid.IntRange(0, len(ranks)-1).Draw(t, "rank")
			// The block hash is the path, of which each digit from 1 to 3 is a content.
			path := uint64(0)
			var blocks, tokens []uint64
			for range rapid.IntRange(1, 7).Draw(t, "depth") {
				digit := rapid.Uint64Range(1, 3).Draw(t, "content")
				path = path*4 + digit
				blocks, tokens = append(blocks, path), append(tokens, digit)
			}
			switch rapid.IntRange(0, 5).Draw(t, "change") {
			case 0:
				x.Remove(ranks[i], 0, blocks[len(blocks)-1:])
				delete(known[i], blocks[len(blocks)-1])
			case 1:
				x.Clear(ranks[i])
				clear(known[i])
			default:
				s := Stored{Blocks: blocks, Tokens: tokens, BlockSize: size}
				if rapid.Bool().Draw(t, "with ids") {
					for n := range blocks {
						s.TokenIDs = append(s.TokenIDs, idsOfBlock(tokens[n], size)...)
						known[i][blocks[n]] = true
					}
				}
				x.Store(ranks[i], 0, s)
			}
			x.Sweep()
			checkRetained(t, x)
			for i, r := range ranks {
				for hash, ids := range retainedIDs(x, r) {
					want := idsOfBlock(hash%4, size)
					if ids != nil && !slices.Equal(ids, want) || ids == nil && known[i][hash] && limit == 1<<30 {
						t.Fatalf("block %x of rank %d: got token ids %v, want %v", hash, i, ids, want)
					}
				}
			}
		}
		for _, r := range ranks {
			x.RemoveRank(r)
		}
		for x.Sweep() {
		}
		if x.TokenIDBytes() != 0 {
			t.Fatalf("%d bytes of token ids are left without ranks", x.TokenIDBytes())
		}
	})
}

// TestTokenIDsOfLargeBlocksAreApart fills a run with blocks so large that the token ids of the last one would begin after 2^32
// others. There is room for those of the first block alone.
func TestTokenIDsOfLargeBlocksAreApart(t *testing.T) {
	testclass.WithoutRace(t)
	const last, size = maxRun - 1, 1<<32/(maxRun-1) + 1
	x := New()
	x.RetainTokenIDs(4 * minTokens * size)
	r := x.AddRank("m", nil)
	chain := newPrompt(1, last+1)
	want := idsOfBlock(1, size)
	x.Store(r, 0, Stored{Blocks: chain[:1], Tokens: chain[:1], BlockSize: size, TokenIDs: want})
	x.Store(r, 0, Stored{HasParent: true, Parent: chain[0], Blocks: chain[1:last], Tokens: chain[1:last], BlockSize: size})
	x.Store(r, 0, Stored{
		HasParent: true, Parent: chain[last-1], Blocks: chain[last:], Tokens: chain[last:], BlockSize: size, TokenIDs: idsOfBlock(2, size),
	})
	check := func() {
		t.Helper()
		for hash, got := range retainedIDs(x, r) {
			if hash == chain[0] && !slices.Equal(got, want) || hash != chain[0] && got != nil {
				t.Fatalf("block %d has %d token ids, which are not its own", slices.Index(chain, hash), len(got))
			}
		}
	}
	check()
	x.Remove(r, 0, chain[last:]) // drops the token ids from the offset of the block on
	check()
}

// TestMemoryOfTokenIDs measures the memory of the token ids of chains of 16 tokens a block, which 8 ranks hold.
func TestMemoryOfTokenIDs(t *testing.T) {
	testclass.WithoutRace(t)
	const ranks, chains, length, size = 8, 2000, 64, 16
	x := New()
	x.RetainTokenIDs(1 << 30)
	for range ranks {
		r := x.AddRank("m", nil)
		for c := range uint64(chains) {
			s := Stored{Blocks: make([]uint64, length), Tokens: make([]uint64, length), BlockSize: size, TokenIDs: make([]uint32, length*size)}
			for i := range s.Blocks {
				s.Blocks[i], s.Tokens[i] = c<<32|uint64(i)|1, c<<32|uint64(i)|2
			}
			x.Store(r, 0, s)
		}
	}
	got := float64(x.TokenIDBytes()) / (chains * length)
	t.Logf("token ids: %.1f bytes for each block of 16 tokens, for all ranks together", got)
	if got > 90 {
		t.Errorf("got %.1f bytes, want at most 90: 64 for the ids, and room to grow", got)
	}
}
