package blockpool

import "github.com/kvcast/kvcast/internal/wire"

// Group is an attention group beside full attention, with blocks of the same size. It takes blocks of the same pool, and they have the
// same hashes.
//
// As vLLM does by default (prefix_cache_retention_interval 0), it keeps of a request only what the same prompt can reuse later, up to
// its last whole block before the last token: the blocks of the window there, or the state there. Generated tokens add nothing.
type Group struct {
	// Window is the size of the group's sliding window in tokens; 0 means that it keeps states, as Mamba's layers do.
	Window int
}

// group is the blocks of an attention group.
type group struct {
	// need is the number of blocks that it needs of a prefix, the last ones; 0 means all.
	need   int
	kind   string
	fields *wire.Rare       // of its stores
	copies map[uint64][]int // blocks by hash, the oldest copy first
}

func newGroups(c Config) []group {
	all := []group{{kind: "full_attention"}}
	for _, g := range c.Groups {
		if g.Window == 0 {
			all = append(all, group{need: 1, kind: "mamba"})
			continue
		}
		all = append(all, group{
			need: (g.Window - 2 + c.BlockSize) / c.BlockSize, kind: "sliding_window", // a token attends to itself and to Window-1 before it
			fields: &wire.Rare{SlidingWindow: int64(g.Window), HasSlidingWindow: true},
		})
	}
	for i := range all {
		all[i].copies = make(map[uint64][]int)
	}
	return all
}

// first returns the first of the blocks that the group needs of a prefix of n blocks.
func (g *group) first(n int) int {
	if g.need == 0 {
		return 0
	}
	return max(0, n-g.need)
}

// serves reports whether the group has what it needs of a prefix.
func (g *group) serves(prefix []uint64) bool {
	for _, h := range prefix[g.first(len(prefix)):] {
		if len(g.copies[h]) == 0 {
			return false
		}
	}
	return true
}

// most returns the most blocks that a request uses of the group at a time, unless it is the main group: what it reuses, and what it stores.
func (g *group) most() int { return 2 * g.need }

// Held returns the number of blocks of the longest prefix of a prompt that requests can reuse which continue it.
func (p *Pool) Held(prompt []uint32) int { return p.reusable(p.hasher.extend(nil, prompt)) }

// reusable returns the number of blocks of the longest prefix that all groups serve.
func (p *Pool) reusable(hashes []uint64) int {
	n := 0
	for n < len(hashes) && len(p.groups[0].copies[hashes[n]]) > 0 {
		n++
	}
	for ; n > 0; n-- {
		served := true
		for i := range p.groups[1:] {
			served = served && p.groups[1+i].serves(hashes[:n])
		}
		if served {
			break
		}
	}
	return n
}
