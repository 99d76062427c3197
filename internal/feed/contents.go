package feed

import (
	"context"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Content is the content of a block, and which block it continues.
type Content struct {
	// Hash is the engine's hash of the block, and Parent that of the block that it continues, unless it begins a prompt.
	Hash, Parent uint64
	HasParent    bool
	// TokensHash identifies the content.
	TokensHash uint64
	// Tokens is the number of tokens in the block.
	Tokens uint32
	// LoRA is the name of the adapter; empty for none.
	LoRA string
}

// Learner gets the contents of blocks in one tier of the workers that load from a pool, and those that the pool has: all of a moment, then
// Begun is called, and then those that are stored. It may get all anew later. Calls are one after another.
type Learner struct {
	Tier kvblock.Tier
	// PoolsOf, if not empty, is a model whose other pools take the place of the workers.
	PoolsOf string
	// Stored gets blocks that a worker has stored, or that the pool has. It keeps nothing.
	Stored func(all []Content, ofPool bool)
	// Removed gets the hashes of blocks that a worker has removed; nil: nothing is called. It keeps nothing.
	Removed func(hashes []uint64)
	Begun   func()
}

// Contents passes on the contents of blocks until ctx ends.
type Contents func(ctx context.Context, pool string, l Learner) error

// NoContents passes on none.
func NoContents(ctx context.Context, _ string, l Learner) error {
	l.Begun()
	<-ctx.Done()
	return nil
}
