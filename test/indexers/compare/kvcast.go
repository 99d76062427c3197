package main

import (
	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/test/indexers"
)

const model = "model"

// index is kvcast's index.
type index struct {
	index   *radix.Index
	ranks   [indexers.Workers]*radix.Rank
	matcher radix.Matcher
	// workers and blocks are the sums of the last match, if it returned groups.
	workers, blocks int
}

// newIndex returns an index whose matches return a list, or groups, whose ranks are then visited, as SMG's ChainIndex visits them.
func newIndex(groups bool) indexers.Index {
	x := &index{index: radix.New()}
	x.matcher.Group = groups
	for i := range x.ranks {
		x.ranks[i] = x.index.AddRank(model, nil)
	}
	return x
}

func (x *index) Apply(e *indexers.Event) {
	r := x.ranks[e.Worker]
	if !e.Stored {
		x.index.Remove(r, 0, e.Blocks)
		return
	}
	x.index.Store(r, 0, radix.Stored{Parent: e.Parent, HasParent: e.HasParent, Blocks: e.Blocks, Tokens: e.Tokens})
}

func (x *index) Match(p indexers.Prompt) {
	x.index.Match(model, p.Tokens, &x.matcher)
	if !x.matcher.Group {
		return
	}
	x.workers, x.blocks = len(x.matcher.Found), 0
	for i := range x.matcher.Found {
		x.blocks += x.matcher.Found[i].Blocks
	}
	for _, g := range x.matcher.Groups {
		for range g.Numbers() {
			x.workers++
			x.blocks += g.Blocks
		}
	}
}

func (x *index) Matched() (workers, blocks int) {
	if x.matcher.Group {
		return x.workers, x.blocks
	}
	for _, m := range x.matcher.Found {
		blocks += m.Blocks
	}
	return len(x.matcher.Found), blocks
}
