package hybrid

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Kind is the kind of an attention group.
type Kind uint8

// The kinds.
const (
	FullAttention Kind = iota + 1
	MLAAttention
	SinkFullAttention
	SlidingWindow
	SlidingWindowMLA
	// Mamba is a state space model or linear attention in vLLM's cache mode "align", the only one with which vLLM reuses prefixes.
	Mamba
	ChunkedLocalAttention
)

// kindNames are the kinds as vLLM's events name them.
var kindNames = [...]string{
	FullAttention: "full_attention", MLAAttention: "mla_attention", SinkFullAttention: "sink_full_attention",
	SlidingWindow: "sliding_window", SlidingWindowMLA: "sliding_window_mla", Mamba: "mamba", ChunkedLocalAttention: "chunked_local_attention",
}

// KindOf returns the kind with a name of vLLM's events, kv_cache_spec_kind, and whether there is one. Groups of other kinds are not
// part of a Rule: vLLM does not reuse prefixes of encoder-only and cross attention.
func KindOf(name string) (Kind, bool) {
	i := slices.Index(kindNames[1:], name)
	return Kind(i + 1), i >= 0
}

// String returns the kind's name in vLLM's events.
func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return kindNames[k]
}

// IsFull reports whether the kind is full attention, which needs all blocks of a prefix.
func (k Kind) IsFull() bool { return k >= FullAttention && k <= SinkFullAttention }

// IsWindow reports whether the kind has a sliding window.
func (k Kind) IsWindow() bool { return k == SlidingWindow || k == SlidingWindowMLA }

// Bounds of a set of groups.
const (
	// MaxGroups is the greatest number of groups, and one more than the greatest index of a group.
	MaxGroups = 64
	// MaxBlockSize is the greatest block size, in tokens.
	MaxBlockSize = 1 << 20
	// MaxTokens is the greatest window, the greatest chunk, and the greatest least common multiple of the block sizes, in tokens.
	MaxTokens = 1 << 30
)

// Group is an attention group of an engine.
type Group struct {
	// Index is the engine's number of the group, from 0; less than MaxGroups.
	Index int
	Kind  Kind
	// BlockSize is the number of tokens in a block, from 1 to MaxBlockSize; for Mamba the number of tokens between two states.
	BlockSize int
	// Window is the number of tokens in a sliding window, from 2 to MaxTokens; 0 if the group has none.
	Window int
	// Chunk is the number of tokens in a chunk of chunked local attention, from 1 to MaxTokens; 0 in other groups. It is not
	// in the engine's events.
	Chunk int
	// Drops reports whether the engine drops a block of what it finds in the group: of groups that EAGLE or MTP uses, which are
	// often all. vLLM drops no Mamba states; it refuses EAGLE with chunked local attention. It is not in the engine's events.
	Drops bool
}

// New compiles the rule for the groups of an engine. unit is the number of tokens of a hash unit, which vLLM calls hash block size; it
// divides each block size. If it is 0, it is the greatest common divisor of the block sizes, which is vLLM's default. The order of
// the groups does not matter; New does not keep them.
func New(groups []Group, unit int) (Rule, error) {
	if len(groups) == 0 || len(groups) > MaxGroups {
		return Rule{}, fmt.Errorf("compile hybrid rule: %d attention groups; want 1 to %d", len(groups), MaxGroups)
	}
	groups = slices.SortedFunc(slices.Values(groups), func(a, b Group) int { return cmp.Compare(a.Index, b.Index) })
	r := Rule{groups: len(groups), blocks: 1}
	var seen, divisor = uint64(0), 0
	for i := range groups {
		g := &groups[i]
		if err := g.check(); err != nil {
			return Rule{}, fmt.Errorf("compile hybrid rule: attention group %d (%v): %w", g.Index, g.Kind, err)
		}
		if seen&(1<<g.Index) != 0 {
			return Rule{}, fmt.Errorf("compile hybrid rule: two attention groups have index %d; want each index once", g.Index)
		}
		seen |= 1 << g.Index
		divisor = gcd(divisor, g.BlockSize)
		if r.blocks = r.blocks / gcd(r.blocks, g.BlockSize) * g.BlockSize; r.blocks > MaxTokens {
			return Rule{}, fmt.Errorf("compile hybrid rule: the block sizes %v have a least common multiple above %d", blockSizes(groups), MaxTokens)
		}
	}
	r.unit = unit
	if unit == 0 {
		r.unit = divisor
	}
	if r.unit < 0 || divisor%r.unit != 0 {
		return Rule{}, fmt.Errorf("compile hybrid rule: hash unit of %d tokens; want 0 or a divisor of the block sizes %v", unit, blockSizes(groups))
	}
	r.align = r.blocks
	if hasPartialHits(groups, r.unit) {
		r.align = r.unit
	}
	for i := range groups {
		if err := r.add(&groups[i]); err != nil {
			return Rule{}, fmt.Errorf("compile hybrid rule: attention group %d (%v): %w", groups[i].Index, groups[i].Kind, err)
		}
	}
	return r, nil
}

// check checks a group by itself.
func (g *Group) check() error {
	switch {
	case g.Index < 0 || g.Index >= MaxGroups:
		return fmt.Errorf("index out of range; want 0 to %d", MaxGroups-1)
	case g.Kind == 0 || int(g.Kind) >= len(kindNames):
		return errors.New("kind unknown")
	case g.BlockSize < 1 || g.BlockSize > MaxBlockSize:
		return fmt.Errorf("block size %d; want 1 to %d tokens", g.BlockSize, MaxBlockSize)
	case g.Kind.IsWindow() && (g.Window < 2 || g.Window > MaxTokens):
		return fmt.Errorf("window %d; want 2 to %d tokens", g.Window, MaxTokens)
	case !g.Kind.IsWindow() && g.Window != 0:
		return fmt.Errorf("window %d; want 0 without a sliding window", g.Window)
	case g.Kind == ChunkedLocalAttention && (g.Chunk < 1 || g.Chunk > MaxTokens):
		return fmt.Errorf("chunk %d; want 1 to %d tokens, as configured at the engine", g.Chunk, MaxTokens)
	case g.Kind != ChunkedLocalAttention && g.Chunk != 0:
		return fmt.Errorf("chunk %d; want 0 without chunked local attention", g.Chunk)
	case g.Kind == ChunkedLocalAttention && g.Drops:
		return errors.New("drops a block; vLLM does not support EAGLE with it")
	}
	return nil
}

// hasPartialHits reports whether the engine reuses prefixes that end within a block: it has several groups, among them a Mamba group
// with blocks of several units, and each group that is neither Mamba nor full attention has blocks of one unit.
func hasPartialHits(groups []Group, unit int) bool {
	partial := false
	for i := range groups {
		switch g := &groups[i]; {
		case g.Kind == Mamba:
			partial = partial || g.BlockSize > unit
		case !g.Kind.IsFull() && g.BlockSize != unit:
			return false
		}
	}
	return partial && len(groups) > 1
}

// add adds a group to its spec.
func (r *Rule) add(g *Group) error {
	if g.Kind == ChunkedLocalAttention && g.BlockSize != r.align {
		return fmt.Errorf("block size %d; want %d, as vLLM supports it with groups of one block size only", g.BlockSize, r.align)
	}
	to := &r.others
	if g.Kind.IsFull() {
		to = &r.full
	}
	key := *g
	key.Index, key.Drops = 0, false
	i := slices.IndexFunc(*to, func(s spec) bool { return s.key == key })
	if i < 0 {
		i = len(*to)
		*to = append(*to, newSpec(key, r))
	}
	s := &(*to)[i]
	s.groups = append(s.groups, g.Index)
	s.drop = s.drop || g.Drops
	return nil
}

func blockSizes(groups []Group) (sizes []int) {
	for _, g := range groups {
		sizes = append(sizes, g.BlockSize)
	}
	return sizes
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
