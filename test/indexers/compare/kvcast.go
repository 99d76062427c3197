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
}

func newIndex() indexers.Index {
	x := &index{index: radix.New()}
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

func (x *index) Match(p indexers.Prompt) { x.index.Match(model, p.Tokens, &x.matcher) }

func (x *index) Matched() (workers, blocks int) {
	for _, m := range x.matcher.Found {
		blocks += m.Blocks
	}
	return len(x.matcher.Found), blocks
}
