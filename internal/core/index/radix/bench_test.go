package radix

import (
	"fmt"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// mixed returns a well-distributed hash of a number.
func mixed(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

const benchRanks = 64

// benchIndex returns an index with 64 ranks.
func benchIndex() (*Index, []*Rank) {
	x := New()
	ranks := make([]*Rank, benchRanks)
	for i := range ranks {
		ranks[i] = x.AddRank("m", nil)
	}
	return x, ranks
}

// heap returns the bytes in use after a garbage collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// userTime returns the CPU time of the process in user mode, which other processes change less than the elapsed time.
func userTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano())
}

// measure calls a function repeatedly, with the number of the call, and reports the median CPU time of 256 calls in user
// mode.
func measure(b *testing.B, call func(i int)) {
	const calls = 256
	var used []float64
	i := 0
	for b.Loop() {
		began := userTime(b)
		for range calls {
			call(i)
			i++
		}
		used = append(used, float64(userTime(b)-began)/calls)
	}
	b.ReportMetric(median(used), "user-ns/call")
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// conversation is the blocks of one conversation that a rank holds. Its block hashes and tokens hashes follow from id.
type conversation struct {
	id     uint64
	blocks int
}

// conversations are the conversations of a rank: 16 run at a time, and the oldest are evicted from their ends.
type conversations struct {
	rank   *Rank
	next   uint64
	active [16]conversation
	idle   []conversation
	held   int
	step   uint64
	block  [16]uint64
	tokens [16]uint64
}

// grow stores one block of an active conversation, six at its start. It returns the number of blocks.
func (c *conversations) grow(x *Index) int {
	c.step++
	v := &c.active[mixed(c.step)%uint64(len(c.active))]
	n := 1
	if v.blocks == 0 || v.blocks >= 128 {
		if v.blocks > 0 {
			c.idle = append(c.idle, *v)
		}
		c.next++
		*v = conversation{id: uint64(c.rank.number)<<40 | c.next<<12}
		n = 6
	}
	s := Stored{Parent: mixed(v.id + uint64(v.blocks)), HasParent: v.blocks > 0}
	for i := range n {
		c.block[i] = mixed(v.id + uint64(v.blocks+i+1))
		c.tokens[i] = c.block[i] + 1
	}
	s.Blocks, s.Tokens = c.block[:n], c.tokens[:n]
	x.Store(c.rank, 0, s)
	v.blocks += n
	c.held += n
	return n
}

// evict removes the last block of the oldest idle conversation.
func (c *conversations) evict(x *Index) {
	v := &c.idle[0]
	c.block[0] = mixed(v.id + uint64(v.blocks))
	x.Remove(c.rank, 0, c.block[:1])
	c.held--
	if v.blocks--; v.blocks == 0 {
		c.idle = c.idle[1:]
	}
}

// BenchmarkConversations stores conversations of 64 ranks, mostly one block at a time: Fill from an empty index, and
// Churn in an index in which each block evicts another.
func BenchmarkConversations(b *testing.B) {
	const perRank = 8192
	start := func() (*Index, []conversations, int) {
		x, ranks := benchIndex()
		all := make([]conversations, len(ranks))
		for i := range all {
			all[i].rank = ranks[i]
		}
		blocks := 0
		for done := 0; done < len(all); {
			done = 0
			for i := range all {
				if all[i].held >= perRank {
					done++
					continue
				}
				blocks += all[i].grow(x)
			}
		}
		return x, all, blocks
	}
	b.Run("Fill", func(b *testing.B) {
		var used []float64
		bytes := 0.0
		for b.Loop() {
			b.StopTimer()
			before, began := heap(), userTime(b)
			b.StartTimer()
			x, all, blocks := start()
			b.StopTimer()
			used = append(used, float64(userTime(b)-began)/float64(blocks))
			bytes = float64(heap()-before) / float64(blocks)
			runtime.KeepAlive(x)
			runtime.KeepAlive(all)
			b.StartTimer()
		}
		b.ReportMetric(median(used), "user-ns/block")
		b.ReportMetric(bytes, "bytes/block")
	})
	b.Run("Churn", func(b *testing.B) {
		x, all, _ := start()
		var used []float64
		for b.Loop() {
			n, began := 0, userTime(b)
			for i := range 1 << 16 {
				c := &all[i%len(all)]
				for range c.grow(x) {
					c.evict(x)
					n++
				}
			}
			used = append(used, float64(userTime(b)-began)/float64(n))
		}
		b.ReportMetric(median(used), "user-ns/store+remove")
	})
}

// BenchmarkSharedRuns stores the same chains of 128 blocks in 64 ranks.
func BenchmarkSharedRuns(b *testing.B) {
	const chains, length = 64, 128
	var used []float64
	for b.Loop() {
		began := userTime(b)
		x, ranks := benchIndex()
		for c := range uint64(chains) {
			var tokens, blocks [length]uint64
			for i := range tokens {
				tokens[i] = mixed(c<<20 | uint64(i+1))
			}
			for k, r := range ranks {
				for i := range blocks {
					blocks[i] = tokens[i] ^ uint64(k)<<32
				}
				x.Store(r, 0, Stored{Blocks: blocks[:], Tokens: tokens[:]})
			}
		}
		used = append(used, float64(userTime(b)-began)/(chains*benchRanks*length))
	}
	b.ReportMetric(median(used), "user-ns/block")
}

// storePrompt stores a prefix of a prompt in a rank.
func storePrompt(x *Index, r *Rank, prompt []uint64, blocks int) {
	storePromptIn(x, r, 0, prompt, blocks)
}

func storePromptIn(x *Index, r *Rank, tier int, prompt []uint64, blocks int) {
	hashes := make([]uint64, blocks)
	for i := range hashes {
		hashes[i] = prompt[i] ^ 1
	}
	x.Store(r, tier, Stored{Blocks: hashes, Tokens: prompt[:blocks]})
}

func newPrompt(first uint64, blocks int) []uint64 {
	p := make([]uint64, blocks)
	for i := range p {
		p[i] = mixed(first + uint64(i) + 1)
	}
	return p
}

// BenchmarkScan scans the blocks of 64 ranks, which have prompts of 128 blocks; four ranks share each.
func BenchmarkScan(b *testing.B) {
	x, ranks := benchIndex()
	for i := range 64 * benchRanks {
		storePrompt(x, ranks[i%benchRanks], newPrompt(uint64(i/4)<<20, 128), 128)
	}
	var (
		used   []float64
		blocks []Block
	)
	for b.Loop() {
		n, began := 0, userTime(b)
		for _, r := range ranks {
			for from, done := uint64(0), false; !done; done = from == 0 {
				blocks, from = x.Scan(r, from, blocks[:0])
				n += len(blocks)
			}
		}
		used = append(used, float64(userTime(b)-began)/float64(n))
	}
	b.ReportMetric(median(used), "user-ns/block")
}

// BenchmarkMatch matches prompts of which 64 ranks hold prefixes: of staggered lengths, or whole.
func BenchmarkMatch(b *testing.B) {
	for _, c := range []struct {
		name      string
		blocks    int
		staggered bool
	}{{"1000Staggered", 1000, true}, {"1000Whole", 1000, false}, {"32Whole", 32, false}, {"32Staggered", 32, true}} {
		b.Run(c.name, func(b *testing.B) {
			x, ranks := benchIndex()
			prompt := newPrompt(0, c.blocks)
			for i, r := range ranks {
				n := c.blocks
				if c.staggered {
					n = max(1, c.blocks*(i+1)/benchRanks)
				}
				storePrompt(x, r, prompt, n)
			}
			var m Matcher
			measure(b, func(int) { x.Match("m", prompt, &m) })
			if len(m.Found) != benchRanks {
				b.Fatalf("found %d ranks, want %d", len(m.Found), benchRanks)
			}
		})
	}
	for _, blocks := range []int{32, 1000} {
		b.Run(fmt.Sprintf("%dHashes", blocks), func(b *testing.B) {
			x, ranks := benchIndex()
			prompt := newPrompt(0, blocks)
			for i, r := range ranks {
				storePrompt(x, r, prompt, max(1, blocks*(i+1)/benchRanks))
			}
			hashes := slices.Clone(prompt)
			for i := range hashes {
				hashes[i] ^= 1
			}
			var m Matcher
			measure(b, func(int) { x.MatchHashes("m", hashes, nil, &m) })
			if len(m.Found) != benchRanks {
				b.Fatalf("found %d ranks, want %d", len(m.Found), benchRanks)
			}
		})
	}
	// 4,096 prompts: 64 system prompts of 128 blocks in all ranks, then 138 blocks of a conversation in two ranks.
	b.Run("Mix266", func(b *testing.B) {
		x, ranks := benchIndex()
		prompts := make([][]uint64, 4096)
		for i := range prompts {
			prompts[i] = append(newPrompt(uint64(i%64)<<20, 128), newPrompt(uint64(i+64)<<20, 138)...)
			if i < 64 {
				for _, r := range ranks {
					storePrompt(x, r, prompts[i], 128)
				}
			}
			for _, k := range []int{i, i * 7 / 5} {
				storePrompt(x, ranks[k%benchRanks], prompts[i], 266)
			}
		}
		var m Matcher
		measure(b, func(i int) { x.Match("m", prompts[int(mixed(uint64(i))%4096)], &m) })
	})
}

func TestMatchDoesNotAllocate(t *testing.T) {
	testclass.WithoutRace(t)
	x, ranks := benchIndex()
	prompt := newPrompt(0, 100)
	for i, r := range ranks {
		storePrompt(x, r, prompt, i+1)
	}
	var m Matcher
	if got := testing.AllocsPerRun(100, func() { x.Match("m", prompt, &m) }); got > 0 || len(m.Found) != benchRanks {
		t.Errorf("%v allocations and %d ranks, want 0 and %d", got, len(m.Found), benchRanks)
	}
}

// TestExtensionDoesNotAllocate stores and removes a block at the end of a rank's run, which needs no growth.
func TestExtensionDoesNotAllocate(t *testing.T) {
	testclass.WithoutRace(t)
	x, ranks := benchIndex()
	prompt := newPrompt(0, 102)
	storePrompt(x, ranks[0], prompt, 101)
	s := Stored{Parent: prompt[100] ^ 1, HasParent: true, Blocks: []uint64{prompt[101] ^ 1}, Tokens: prompt[101:]}
	got := testing.AllocsPerRun(100, func() {
		x.Store(ranks[0], 0, s)
		x.Remove(ranks[0], 0, s.Blocks)
	})
	if n, _ := ranks[0].Digest(0); got > 0 || n != 101 {
		t.Errorf("%v allocations and %d blocks, want 0 and 101", got, n)
	}
	if runs := usedRuns(x); runs != 2 {
		t.Errorf("%d runs, want a root and a run", runs)
	}
}
