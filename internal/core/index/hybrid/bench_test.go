package hybrid_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
)

// bitmaps is a Holder with a bit for each block of a group. All blocks have the same size, and there are no partial hits.
type bitmaps struct {
	block int
	words [hybrid.MaxGroups][]uint64
}

// newBitmaps returns bitmaps of groups that hold all blocks up to a number.
func newBitmaps(block, blocks, groups int) *bitmaps {
	b := &bitmaps{block: block}
	for g := range groups {
		b.words[g] = make([]uint64, blocks/64+2)
		for i := range blocks {
			b.set(g, i, true)
		}
	}
	return b
}

func (b *bitmaps) set(group, block int, held bool) {
	if bit := uint64(1) << (block % 64); held {
		b.words[group][block/64] |= bit
	} else {
		b.words[group][block/64] &^= bit
	}
}

func (b *bitmaps) Held(group, from, _, _ int) uint64 {
	words, first := b.words[group], from/b.block
	shift := first % 64
	return words[first/64]>>shift | words[first/64+1]<<1<<(63-shift)
}

// benchmarks are prompts of 1,000 blocks.
var benchmarks = []struct {
	name   string
	groups []hybrid.Group
	// change removes some of the blocks, of which all are held.
	change func(*bitmaps)
	want   int // in blocks
}{
	{"window", groups(full(16), window(16, 128)), func(*bitmaps) {}, 999},
	{"window, short", groups(full(16), window(16, 128)), func(b *bitmaps) {
		for i := 20; i < 995; i++ {
			b.set(1, i, false)
		}
	}, 20},
	{"window, every other block", groups(full(16), window(16, 128)), func(b *bitmaps) {
		for i := 1; i < 1000; i += 2 {
			b.set(1, i, false)
		}
	}, 1},
	{"window, EAGLE", groups(drops(full(16)), drops(window(16, 128))), func(*bitmaps) {}, 999},
	{"5 windows of 1024", groups(full(16), window(16, 1024), window(16, 1024), window(16, 1024), window(16, 1024), window(16, 1024)),
		func(*bitmaps) {}, 999},
	{"3 Mamba", groups(full(16), mamba(16), mamba(16), mamba(16)), func(*bitmaps) {}, 999},
	{"3 Mamba, few states", groups(full(16), mamba(16), mamba(16), mamba(16)), func(b *bitmaps) {
		for i := range 1000 {
			for g := 1; g < 4; g++ {
				b.set(g, i, i == 100 || i == 400+g)
			}
		}
	}, 101},
	{"chunked", groups(full(16), chunked(16, 8192)), func(*bitmaps) {}, 999},
}

func BenchmarkLongest(b *testing.B) {
	for _, bb := range benchmarks {
		b.Run(bb.name, func(b *testing.B) {
			r := mustRule(b, 0, bb.groups...)
			held := newBitmaps(16, 1000, len(bb.groups))
			bb.change(held)
			b.ReportAllocs()
			for b.Loop() {
				if got, _ := r.Longest(held, 15_999, 16_000); got != bb.want*16 {
					b.Fatalf("got %d tokens, want %d blocks", got, bb.want)
				}
			}
		})
	}
}

func BenchmarkLongestByFunction(b *testing.B) {
	r := mustRule(b, 0, full(16), window(16, 128))
	held := hybrid.HolderFunc(func(_, tokens int) bool { return tokens <= 16_000 })
	for b.Loop() {
		r.Longest(held, 15_999, 16_000)
	}
}

func BenchmarkNew(b *testing.B) {
	gs := groups(full(64), mamba(64), mamba(64), mamba(64))
	for i := range gs {
		gs[i].Index = i
	}
	for b.Loop() {
		if _, err := hybrid.New(gs, 16); err != nil {
			b.Fatal(err)
		}
	}
}

func TestLongestDoesNotAllocate(t *testing.T) {
	for _, tt := range benchmarks {
		r := mustRule(t, 0, tt.groups...)
		held := newBitmaps(16, 1000, len(tt.groups))
		tt.change(held)
		if n := testing.AllocsPerRun(10, func() {
			if got, _ := r.Longest(held, 15_999, 16_000); got != tt.want*16 {
				t.Fatalf("%s: got %d tokens, want %d blocks", tt.name, got, tt.want)
			}
			r.LongestWithHost(held, 160, 15_999, 16_000)
		}); n != 0 {
			t.Errorf("%s: %v allocations, want none", tt.name, n)
		}
	}
}

func Example() {
	// OpenAI's gpt-oss: full attention, and a sliding window of 128 tokens.
	rule, err := hybrid.New([]hybrid.Group{
		{Index: 0, Kind: hybrid.FullAttention, BlockSize: 16},
		{Index: 1, Kind: hybrid.SlidingWindow, BlockSize: 16, Window: 128},
	}, 0)
	if err != nil {
		panic(err)
	}
	// The engine has evicted the window's blocks before token 320, and those after token 640.
	held := hybrid.HolderFunc(func(group, tokens int) bool { return group == 0 || tokens > 320 && tokens <= 640 })
	const promptTokens = 1000
	tokens, endedBy := rule.Longest(held, promptTokens-1, promptTokens/16*16)
	fmt.Println(tokens, "tokens, ended by group", endedBy)
	// Output: 640 tokens, ended by group 1
}
