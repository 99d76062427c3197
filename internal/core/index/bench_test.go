package index_test

import (
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// filled returns an index of a worker with blocks: conversations of 64 blocks, each stored block by block in turn.
func filled(blocks int) *index.Index {
	const conversations = 64
	x := index.New()
	rank := uint32(0)
	mix := func(n uint64) uint64 { return n * 0x9e3779b97f4a7c15 }
	for first := 0; first < blocks; first += conversations * conversations {
		for i := range conversations {
			for c := range conversations {
				n := uint64(first + c*conversations + i)
				s := &kvcastv1.Stored{BlockHashes: []uint64{mix(n)}, TokensHashes: []uint64{mix(n) + 1}, BlockSize: 16}
				if i > 0 {
					parent := mix(n - 1)
					s.ParentHash = &parent
				}
				x.ApplyEntry(&kvcastv1.Entry{Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{{
					DpRank: &rank, Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: s},
				}}})
			}
		}
	}
	return x
}

func BenchmarkSnapshot(b *testing.B) {
	for _, blocks := range []int{100_000, 1_000_000} {
		x := filled(blocks)
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			bytes := 0
			for b.Loop() {
				s, _ := x.Snapshot("w")
				for piece := range s.Blocks(b.Context(), 0xff) {
					bytes += len(piece)
					s.Reuse(piece)
				}
			}
			b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/float64(blocks), "ns/block")
			b.ReportMetric(float64(bytes)/float64(b.N)/float64(blocks), "B/block")
		})
	}
}

// groupsOf are the attention groups of engines with hybrid models, with blocks of 16 tokens in the main group.
var groupsOf = map[string][]*kvcastv1.AttentionGroup{
	"main": {{Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 16, Main: true}},
	"gpt-oss": {
		{Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 16, Main: true},
		{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW, BlockSize: 16, Window: 128},
	},
	"qwen": {
		{Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 16, Main: true},
		{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_MAMBA, BlockSize: 16}, {Index: 2, Kind: kvcastv1.AttentionGroup_KIND_MAMBA, BlockSize: 16},
	},
}

// BenchmarkMatchGroups matches a prompt that 64 engines hold, by token ids, for which the engines' hashes are computed, and by tokens hashes,
// for which they are learned. The engines of hybrid models hold all blocks of each group.
func BenchmarkMatchGroups(b *testing.B) {
	for _, blocks := range []int{32, 1000} {
		tokens := make([]uint32, 16*blocks+1)
		for i := range tokens {
			tokens[i] = uint32(i)
		}
		hasher, err := vllmhash.New(vllmhash.SHA256, vllmhash.DefaultSeed, 16)
		if err != nil {
			b.Fatal(err)
		}
		hashes, err := hasher.Append(nil, tokens, vllmhash.Content{}, new(vllmhash.Buffer))
		if err != nil {
			b.Fatal(err)
		}
		stored := &kvcastv1.Stored{BlockHashes: hashes, BlockSize: 16, TokensHashes: kvblock.AppendTokensHashes(nil, tokens, 16, kvblock.Seed("", ""), false, nil)}
		for _, model := range []string{"main", "gpt-oss", "qwen"} {
			x := index.New()
			for n := range uint64(64) {
				events := []*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 16}), event(0, stored)}
				if groups := groupsOf[model]; len(groups) > 1 {
					events = append(events, event(0, &kvcastv1.Groups{Groups: groups, Unit: 16, Hashing: hashed}))
					for _, g := range groups[1:] {
						events = append(events, event(0, &kvcastv1.GroupStored{Group: g.GetIndex(), BlockHashes: hashes}))
					}
				}
				x.ApplyEntry(&kvcastv1.Entry{Seq: n + 1, Worker: fmt.Sprint(n), Model: "m", Events: events})
			}
			for by, p := range map[string]index.Prompt{"tokens": {TokenIDs: tokens}, "hashes": {TokensHashes: stored.GetTokensHashes()}} {
				b.Run(fmt.Sprintf("blocks=%d/by=%s/%s", blocks, by, model), func(b *testing.B) {
					q := &index.Query{Model: "m", Prompts: []index.Prompt{p}}
					var m index.Matches
					for b.Loop() {
						x.Match(q, &m)
					}
					if n := len(m.Prompts[0]); n != 64 || m.Prompts[0][0].Tokens() != 16*blocks || m.Prompts[0][0].Trust() != kvcastv1.Trust_TRUST_EXACT {
						b.Fatalf("%d matches of %d tokens, %v", n, m.Prompts[0][0].Tokens(), m.Prompts[0][0].Trust())
					}
				})
			}
		}
	}
}

// BenchmarkGroupMemory measures the memory of a block in an engine with one attention group and with more, in bytes for each block of the main
// group. All groups hold all prefixes of 1,000 prompts of 100 blocks: windows their last 8 blocks, Mamba groups the state at each tenth block.
func BenchmarkGroupMemory(b *testing.B) {
	const prompts, blocks = 1000, 100
	for _, model := range []string{"main", "gpt-oss", "qwen"} {
		b.Run(model, func(b *testing.B) {
			for b.Loop() {
				before := heapInUse()
				x := index.New()
				events := []*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 16})}
				groups := groupsOf[model]
				if len(groups) > 1 {
					events = append(events, event(0, &kvcastv1.Groups{Groups: groups, Unit: 16}))
				}
				x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "w", Model: "m", Events: events})
				for p := range uint64(prompts) {
					s := &kvcastv1.Stored{BlockSize: 16}
					for n := range uint64(blocks) {
						s.BlockHashes = append(s.BlockHashes, (p*blocks+n+1)*0x9e3779b97f4a7c15)
						s.TokensHashes = append(s.TokensHashes, (p*blocks+n+1)*0xbf58476d1ce4e5b9)
					}
					events := []*kvcastv1.RouterEvent{event(0, s)}
					for _, g := range groups[min(1, len(groups)):] {
						held := s.BlockHashes[blocks-8:]
						if g.GetKind() == kvcastv1.AttentionGroup_KIND_MAMBA {
							held = nil
							for n := 9; n < blocks; n += 10 {
								held = append(held, s.BlockHashes[n])
							}
						}
						events = append(events, event(0, &kvcastv1.GroupStored{Group: g.GetIndex(), BlockHashes: held}))
					}
					x.ApplyEntry(&kvcastv1.Entry{Seq: p + 2, Worker: "w", Model: "m", Events: events})
				}
				b.ReportMetric(float64(heapInUse()-before)/(prompts*blocks), "B/block")
				runtime.KeepAlive(x)
			}
		})
	}
}

func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkApplyEncoded applies entries of a full engine, which stores a chain of blocks and evicts as many: 16 entries at a time, of 16 blocks
// each (B1) or one (B2). b.N is entries.
func BenchmarkApplyEncoded(b *testing.B) {
	const entries, together = 4096, 16
	for _, shape := range []struct {
		name   string
		blocks int
	}{{"B1", 16}, {"B2", 1}} {
		b.Run(shape.name, func(b *testing.B) {
			var chunks [][]byte
			for first := 0; first < entries; first += together {
				var batch []*kvcastv1.Entry
				for n := first; n < first+together; n++ {
					// Each entry continues the chain of the one before, and evicts what was stored half a round ago.
					s, r := stored(blocksOf(n, shape.blocks)...), removed(blocksOf((n+entries/2)%entries, shape.blocks)...)
					s.BlockSize, s.ParentHash = 16, proto.Uint64(blocksOf(n+entries-1, shape.blocks)[shape.blocks-1])
					batch = append(batch, entryOf(uint64(n+1), event(0, s), event(0, r)))
				}
				chunks = append(chunks, encodeEntries(b, batch...))
			}
			x := index.New()
			x.ApplyEntry(entryOf(1, event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 16}), event(0, stored(blocksOf(entries-1, shape.blocks)...))))
			var times []index.EntryTimes
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += together {
				var err error
				if times, err = x.ApplyEncoded(chunks[n/together%len(chunks)], times[:0], nil); err != nil {
					b.Fatal(err)
				}
			}
			if _, blocks := x.Len(); b.N > entries && blocks > uint64(entries/2+2)*uint64(shape.blocks) {
				b.Fatalf("%d blocks: evictions have no effect", blocks)
			}
		})
	}
}

// blocksOf returns the blocks of entry n, of which there are 4,096.
func blocksOf(n, blocks int) (hashes []uint64) {
	for i := range blocks {
		hashes = append(hashes, (uint64(n%4096*blocks+i)+1)*0x9e3779b97f4a7c15)
	}
	return hashes
}

// BenchmarkMatchGrowth matches prompts that more workers hold, and longer ones. workers=N has prompts of 32 blocks, and blocks=N is held by 64 workers. An
// answer has the best 8 workers, or all of them.
func BenchmarkMatchGrowth(b *testing.B) {
	match := func(workers, blocks, limit int) func(*testing.B) {
		return func(b *testing.B) {
			x := index.New()
			hashes := blocksOf(0, blocks)
			for n := range uint64(workers) {
				s := stored(hashes...)
				s.BlockSize = 16
				x.ApplyEntry(&kvcastv1.Entry{Seq: n + 1, Worker: fmt.Sprint(n), Model: "m", Events: []*kvcastv1.RouterEvent{event(0, s)}})
			}
			q := &index.Query{Model: "m", Prompts: []index.Prompt{{TokensHashes: stored(hashes...).GetTokensHashes()}}, Limit: limit}
			var m index.Matches
			for b.Loop() {
				x.Match(q, &m)
			}
			want := workers
			if limit > 0 {
				want = min(limit, workers)
			}
			if len(m.Prompts[0]) != want || m.Prompts[0][want-1].Blocks != blocks {
				b.Fatalf("got %d matches, want %d of %d blocks", len(m.Prompts[0]), want, blocks)
			}
		}
	}
	for name, limit := range map[string]int{"best8": 8, "all": 0} {
		for _, n := range []int{1, 8, 64, 256, 1000} {
			b.Run(fmt.Sprintf("%s/workers=%d", name, n), match(n, 32, limit))
		}
		for _, n := range []int{32, 320, 3200, 32000} {
			b.Run(fmt.Sprintf("%s/blocks=%d", name, n), match(64, n, limit))
		}
	}
}

// BenchmarkMatchBest matches a prompt of 32 blocks, which each of 64 workers holds, with a limit of 8 workers.
func BenchmarkMatchBest(b *testing.B) {
	x := index.New()
	hashes := blocksOf(0, 32)
	for n := range uint64(64) {
		s := stored(hashes...)
		s.BlockSize = 16
		x.ApplyEntry(&kvcastv1.Entry{Seq: n + 1, Worker: fmt.Sprint(n), Model: "m", Events: []*kvcastv1.RouterEvent{event(0, s)}})
	}
	q := &index.Query{Model: "m", Prompts: []index.Prompt{{TokensHashes: stored(hashes...).GetTokensHashes()}}, Limit: 8}
	var m index.Matches
	b.ReportAllocs()
	for b.Loop() {
		x.Match(q, &m)
	}
	if len(m.Prompts[0]) != 8 || m.Prompts[0][7].Blocks != 32 {
		b.Fatalf("got %v", m.Prompts)
	}
}
