package hybrid_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
)

// positions are the prefixes that groups hold, in tokens, by the index of the group.
type positions [][]int

// Held implements hybrid.Holder.
func (p positions) Held(group, from, step, n int) uint64 {
	return hybrid.HolderFunc(func(group, tokens int) bool {
		for _, held := range p[group] {
			if held == tokens {
				return true
			}
		}
		return false
	}).Held(group, from, step, n)
}

// every returns the multiples of step from first to last.
func every(step, first, last int) (all []int) {
	for n := first; n <= last; n += step {
		all = append(all, n)
	}
	return all
}

func mustRule(t testing.TB, unit int, groups ...hybrid.Group) hybrid.Rule {
	t.Helper()
	for i := range groups {
		groups[i].Index = i
	}
	r, err := hybrid.New(groups, unit)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func full(block int) hybrid.Group {
	return hybrid.Group{Kind: hybrid.FullAttention, BlockSize: block}
}

func window(block, tokens int) hybrid.Group {
	return hybrid.Group{Kind: hybrid.SlidingWindow, BlockSize: block, Window: tokens}
}

func mamba(block int) hybrid.Group { return hybrid.Group{Kind: hybrid.Mamba, BlockSize: block} }

func chunked(block, chunk int) hybrid.Group {
	return hybrid.Group{Kind: hybrid.ChunkedLocalAttention, BlockSize: block, Chunk: chunk}
}

func drops(g hybrid.Group) hybrid.Group {
	g.Drops = true
	return g
}

func groups(all ...hybrid.Group) []hybrid.Group { return all }

// ruleTests have a limit of one token less than the prompt.
var ruleTests = []struct {
	name   string
	groups []hybrid.Group
	unit   int
	held   positions
	tokens int
	want   int
}{
	{"full: all blocks up to the last token", groups(full(16)), 0, positions{every(16, 16, 64)}, 65, 64},
	{"full: never the last token", groups(full(16)), 0, positions{every(16, 16, 64)}, 64, 48},
	{"full: until the first missing block", groups(full(16)), 0, positions{{16, 32, 64}}, 65, 32},
	{"full: no first block", groups(full(16)), 0, positions{{32, 48}}, 65, 0},
	{"MLA, sinks: as full", groups(hybrid.Group{Kind: hybrid.MLAAttention, BlockSize: 16}, hybrid.Group{Kind: hybrid.SinkFullAttention, BlockSize: 16}), 0,
		positions{every(16, 16, 64), every(16, 16, 48)}, 65, 48},
	{"full: a block of EAGLE is dropped", groups(drops(full(16))), 0, positions{every(16, 16, 64)}, 65, 48},

	{"window: the last blocks only", groups(full(16), window(16, 32)), 0, positions{every(16, 16, 96), {80, 96}}, 97, 96},
	{"window: one block for a window of 17 tokens", groups(full(16), window(16, 17)), 0, positions{every(16, 16, 96), {96}}, 97, 96},
	{"window: two blocks for a window of 18 tokens", groups(full(16), window(16, 18)), 0, positions{every(16, 16, 96), {32, 48, 96}}, 97, 48},
	{"window: a run that reaches the first block may be shorter", groups(full(16), window(16, 100)), 0, positions{every(16, 16, 96), {16, 32, 64, 80}}, 97, 32},
	{"window: none", groups(full(16), window(16, 100)), 0, positions{every(16, 16, 96), {32, 48}}, 97, 0},
	{"window: full attention limits it", groups(full(16), window(16, 17)), 0, positions{{16, 32}, {32, 96}}, 97, 32},
	{"window: smaller blocks end with an aligned prefix", groups(full(32), window(16, 17)), 0, positions{every(32, 32, 96), {48, 64, 80}}, 100, 64},
	{"window: larger blocks", groups(full(16), window(64, 65)), 0, positions{every(16, 16, 144), {64, 128}}, 150, 128},
	{"window: alone", groups(window(16, 33)), 0, positions{{16, 64, 80, 112}}, 129, 80},
	{"window: MLA, two windows", groups(
		hybrid.Group{Kind: hybrid.SlidingWindowMLA, BlockSize: 4, Window: 8}, hybrid.Group{Kind: hybrid.SlidingWindowMLA, BlockSize: 8, Window: 9}), 0,
		positions{{12, 16, 20, 24, 28, 32}, {8, 16, 32}}, 33, 32},

	{"Mamba: the last state", groups(full(64), mamba(64)), 0, positions{every(64, 64, 320), {64, 192}}, 321, 192},
	{"Mamba: the states of all its groups", groups(full(64), mamba(64), mamba(64)), 0, positions{every(64, 64, 320), {64, 192, 256}, {64, 192, 320}}, 321, 192},
	{"Mamba: alone", groups(mamba(64)), 0, positions{{64, 256}}, 300, 256},
	{"Mamba: a state in the middle of a larger block does not count", groups(full(128), mamba(64)), 0, positions{{128, 256}, {128, 192}}, 257, 128},
	{"Mamba: partial hits end with a unit", groups(full(64), mamba(64)), 16, positions{{64, 128, 176}, {64, 160, 176}}, 200, 176},
	{"Mamba: a partial block holds all of its units", groups(full(64), mamba(64)), 16, positions{{64, 128, 176}, {64, 160}}, 200, 160},
	{"Mamba: partial hits of full attention without a state", groups(full(64), mamba(64)), 16, positions{{64, 128, 176}, {128}}, 200, 128},
	{"Mamba: a window of whole units keeps partial hits", groups(full(64), mamba(64), window(16, 17)), 16, positions{{64, 96}, {80, 96}, {80}}, 200, 80},
	{"Mamba: a window of larger blocks does not", groups(full(64), mamba(64), window(32, 33)), 16, positions{{64, 96}, {64, 96}, {32, 64, 96}}, 200, 64},

	{"chunked: the blocks of the last chunk", groups(full(16), chunked(16, 64)), 0, positions{every(16, 16, 112), {80, 96}}, 113, 96},
	{"chunked: none at the end of a chunk", groups(full(16), chunked(16, 64)), 0, positions{every(16, 16, 112), {16, 96}}, 113, 64},
	{"chunked: alone", groups(chunked(16, 64)), 0, positions{{144}}, 160, 144},

	{"all kinds lower each other", groups(full(16), window(16, 33), mamba(32), chunked(16, 64)), 16,
		positions{every(16, 16, 240), {48, 64, 96, 112, 208, 224}, {64, 112, 192, 224}, {80, 96, 112, 144}}, 241, 112},

	{"EAGLE: looks a block further and drops it", groups(drops(full(16)), drops(window(16, 17))), 0, positions{every(16, 16, 96), {64, 80}}, 97, 64},
	{"EAGLE: also beyond the last token", groups(drops(full(16)), window(16, 17)), 0, positions{every(16, 16, 96), {80}}, 96, 80},
	{"EAGLE: several groups of one kind look further", groups(drops(full(16)), full(16)), 0, positions{every(16, 16, 96), every(16, 16, 96)}, 96, 80},
	{"EAGLE: one of several groups of one kind drops for all", groups(drops(full(16)), full(16)), 0, positions{every(16, 16, 96), every(16, 16, 96)}, 97, 80},
	{"EAGLE: a group that is alone does not", groups(drops(full(16))), 0, positions{every(16, 16, 96)}, 96, 64},
	{"EAGLE: not for Mamba", groups(drops(full(64)), drops(mamba(64))), 0, positions{every(64, 64, 320), {64, 256, 320}}, 321, 256},
	{"EAGLE: a unit where there are partial hits", groups(drops(full(64)), mamba(64)), 16, positions{{64, 128, 176}, {160, 176}}, 200, 160},
	{"EAGLE: a window drops again after another group lowers", groups(full(16), drops(window(16, 17)), mamba(16)), 0,
		positions{every(16, 16, 160), {32, 48, 80, 96, 128, 144}, {32, 80, 96}}, 161, 80},
	{"EAGLE: a short run from the first block is aligned twice", groups(full(64), drops(window(16, 200))), 0, positions{every(64, 64, 192), every(16, 16, 144)}, 193, 64},
}

func TestLongest(t *testing.T) {
	for _, tt := range ruleTests {
		t.Run(tt.name, func(t *testing.T) {
			r := mustRule(t, tt.unit, tt.groups...)
			hashed := tt.tokens - tt.tokens%r.Unit()
			if got, _ := r.Longest(tt.held, tt.tokens-1, hashed); got != tt.want {
				t.Errorf("got %d tokens, want %d", got, tt.want)
			}
		})
	}
}

func TestLongestNamesTheGroupThatEndsIt(t *testing.T) {
	all := every(16, 16, 96)
	for _, tt := range []struct {
		name   string
		groups []hybrid.Group
		held   positions
		tokens int
		want   int
	}{
		{"the prompt", groups(full(16), window(16, 32)), positions{all, all}, 97, hybrid.NoGroup},
		{"the last token", groups(full(16), window(16, 32)), positions{all, all}, 96, hybrid.NoGroup},
		{"full attention", groups(full(16), window(16, 17)), positions{{16, 32}, all}, 97, 0},
		{"a window", groups(full(16), window(16, 32)), positions{all, {16, 32, 64}}, 97, 1},
		{"a state, which the window after it allows", groups(full(16), mamba(16), window(16, 17)), positions{all, {48}, all}, 97, 1},
		{"a window before the last state", groups(full(16), mamba(16), window(16, 17)), positions{all, {16, 48}, {16, 32, 96}}, 97, 1},
		{"the second of two windows, which are equal", groups(full(16), window(16, 17), window(16, 17)), positions{all, all, {32}}, 97, 1},
		{"a chunk", groups(full(16), chunked(16, 64)), positions{all, {96}}, 97, 1},
		{"a group that is alone", groups(mamba(16)), positions{{32}}, 97, 0},
		{"a block that EAGLE drops", groups(drops(full(16))), positions{all}, 97, 0},
	} {
		r := mustRule(t, 0, tt.groups...)
		if tokens, got := r.Longest(tt.held, tt.tokens-1, tt.tokens-tt.tokens%16); got != tt.want {
			t.Errorf("%s: %d tokens, ended by group %d, want %d", tt.name, tokens, got, tt.want)
		}
	}
}

func TestLongestOfNothing(t *testing.T) {
	var zero hybrid.Rule
	r := mustRule(t, 0, full(16), window(16, 33))
	for _, tt := range []struct {
		name          string
		rule          *hybrid.Rule
		limit, hashed int
	}{
		{"no groups", &zero, 64, 64},
		{"no tokens", &r, -1, 0},
		{"one token", &r, 0, 0},
		{"less than a unit", &r, 14, 0},
		{"no names", &r, 64, 0},
	} {
		if got, endedBy := tt.rule.Longest(positions{every(16, 16, 64), every(16, 16, 64)}, tt.limit, tt.hashed); got != 0 || endedBy != hybrid.NoGroup {
			t.Errorf("%s: got %d tokens, ended by group %d, want 0 by none", tt.name, got, endedBy)
		}
	}
	if got := zero.LongestWithHost(positions{}, 32, 64, 64); got != 32 {
		t.Errorf("no groups, with host: got %d tokens, want those of the device", got)
	}
}

func TestLongestWithHost(t *testing.T) {
	for _, tt := range []struct {
		name           string
		groups         []hybrid.Group
		unit           int
		host           positions
		device, tokens int
		want           int
	}{
		{"nothing", groups(full(16), window(16, 33)), 0, positions{{}, {}}, 64, 129, 64},
		{"the blocks that follow", groups(full(16), window(16, 33)), 0, positions{{80, 96}, {80, 96}}, 64, 129, 96},
		{"a gap after the device's blocks", groups(full(16)), 0, positions{{96, 112}}, 64, 129, 64},
		{"no block before the device's hit is needed", groups(full(16), window(16, 65)), 0, positions{{80, 96}, {80, 96}}, 64, 129, 96},
		{"a window does not extend into the device", groups(full(16), window(16, 65)), 0, positions{{80, 96}, {96}}, 64, 129, 64},
		{"never the last token", groups(full(16)), 0, positions{{80, 96, 112, 128}}, 64, 128, 112},
		{"no tokens left", groups(full(16)), 0, positions{{80}}, 64, 65, 64},
		{"Mamba", groups(full(64), mamba(64)), 0, positions{every(64, 64, 320), {128, 256}}, 64, 321, 256},
		{"a partial hit is less than what the host has", groups(full(64), mamba(64)), 16, positions{{128, 192}, {192}}, 112, 321, 192},
		{"a partial hit is more", groups(full(64), mamba(64)), 16, positions{{80}, {80}}, 112, 321, 112},
		{"chunks are counted from the device's hit", groups(full(16), chunked(16, 64)), 0, positions{{48, 64, 80, 96, 112}, {112}}, 32, 129, 112},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := mustRule(t, tt.unit, tt.groups...)
			hashed := tt.tokens - tt.tokens%r.Unit()
			if got := r.LongestWithHost(tt.host, tt.device, tt.tokens-1, hashed); got != tt.want {
				t.Errorf("got %d tokens, want %d", got, tt.want)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	indexed := func(index int, g hybrid.Group) hybrid.Group {
		g.Index = index
		return g
	}
	for _, tt := range []struct {
		want   string
		unit   int
		groups []hybrid.Group
	}{
		{"0 attention groups; want 1 to 64", 0, nil},
		{"65 attention groups; want 1 to 64", 0, make([]hybrid.Group, 65)},
		{"attention group 64 (mamba): index out of range; want 0 to 63", 0, groups(indexed(64, mamba(16)))},
		{"attention group -1 (mamba): index out of range; want 0 to 63", 0, groups(indexed(-1, mamba(16)))},
		{"two attention groups have index 3; want each index once", 0, groups(indexed(3, full(16)), indexed(3, mamba(16)))},
		{"attention group 0 (kind 0): kind unknown", 0, groups(hybrid.Group{BlockSize: 16})},
		{"attention group 0 (kind 8): kind unknown", 0, groups(hybrid.Group{Kind: 8, BlockSize: 16})},
		{"attention group 0 (full_attention): block size 0; want 1 to 1048576 tokens", 0, groups(full(0))},
		{"attention group 0 (full_attention): block size 1048577; want 1 to 1048576 tokens", 0, groups(full(1<<20 + 1))},
		{"attention group 0 (sliding_window): window 0; want 2 to 1073741824 tokens", 0, groups(window(16, 0))},
		{"attention group 0 (sliding_window): window 1; want 2 to 1073741824 tokens", 0, groups(window(16, 1))},
		{"attention group 0 (mamba): window 5; want 0 without a sliding window", 0, groups(hybrid.Group{Kind: hybrid.Mamba, BlockSize: 16, Window: 5})},
		{"attention group 0 (chunked_local_attention): chunk 0; want 1 to 1073741824 tokens, as configured at the engine", 0, groups(chunked(16, 0))},
		{"attention group 0 (full_attention): chunk 5; want 0 without chunked local attention", 0,
			groups(hybrid.Group{Kind: hybrid.FullAttention, BlockSize: 16, Chunk: 5})},
		{"attention group 0 (chunked_local_attention): drops a block; vLLM does not support EAGLE with it", 0, groups(drops(chunked(16, 64)))},
		{"attention group 1 (chunked_local_attention): block size 16; want 32, as vLLM supports it with groups of one block size only", 0,
			groups(full(32), indexed(1, chunked(16, 64)))},
		{"the block sizes [65537 65539] have a least common multiple above 1073741824", 0, groups(full(65537), indexed(1, full(65539)))},
		{"hash unit of 24 tokens; want 0 or a divisor of the block sizes [16 64]", 24, groups(full(16), indexed(1, mamba(64)))},
		{"hash unit of 32 tokens; want 0 or a divisor of the block sizes [16 64]", 32, groups(full(16), indexed(1, mamba(64)))},
		{"hash unit of -1 tokens; want 0 or a divisor of the block sizes [16]", -1, groups(full(16))},
	} {
		_, err := hybrid.New(tt.groups, tt.unit)
		if want := "compile hybrid rule: " + tt.want; err == nil || err.Error() != want {
			t.Errorf("got error %v, want %s", err, want)
		}
	}
}

func TestUnitAndAlign(t *testing.T) {
	for _, tt := range []struct {
		name        string
		groups      []hybrid.Group
		unit        int
		units, want int
	}{
		{"the greatest common divisor and the least common multiple", groups(full(12), window(8, 20)), 0, 4, 24},
		{"partial hits", groups(full(16), mamba(256)), 0, 16, 16},
		{"partial hits with a given unit", groups(full(64), mamba(64)), 16, 16, 16},
		{"Mamba alone has none", groups(mamba(64)), 16, 16, 64},
		{"nor with a window of several units", groups(mamba(64), window(32, 40)), 16, 16, 64},
		{"full attention has none", groups(full(64), full(64)), 16, 16, 64},
	} {
		r := mustRule(t, tt.unit, tt.groups...)
		if r.Unit() != tt.units || r.Align() != tt.want {
			t.Errorf("%s: got unit %d and alignment %d, want %d and %d", tt.name, r.Unit(), r.Align(), tt.units, tt.want)
		}
	}
}

func TestKindNames(t *testing.T) {
	for _, tt := range []struct {
		name         string
		want         hybrid.Kind
		full, window bool
	}{
		{"full_attention", hybrid.FullAttention, true, false},
		{"mla_attention", hybrid.MLAAttention, true, false},
		{"sink_full_attention", hybrid.SinkFullAttention, true, false},
		{"sliding_window", hybrid.SlidingWindow, false, true},
		{"sliding_window_mla", hybrid.SlidingWindowMLA, false, true},
		{"mamba", hybrid.Mamba, false, false},
		{"chunked_local_attention", hybrid.ChunkedLocalAttention, false, false},
	} {
		got, ok := hybrid.KindOf(tt.name)
		if !ok || got != tt.want || got.String() != tt.name {
			t.Errorf("%s: got %v, %v, want %v", tt.name, got, ok, tt.want)
		}
		if got.IsFull() != tt.full || got.IsWindow() != tt.window {
			t.Errorf("%s: got IsFull %v and IsWindow %v", tt.name, got.IsFull(), got.IsWindow())
		}
	}
	for _, name := range []string{"", "unknown", "encoder_only_attention", "cross_attention", "kind 0"} {
		if got, ok := hybrid.KindOf(name); ok {
			t.Errorf("%q: got %v, want none", name, got)
		}
	}
}
