package feed

import "context"

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

// Contents passes on the blocks that the workers that load from a pool have in device memory, and those that the pool has: all of a moment,
// and then those that are stored, until ctx ends. It calls begun between the two. store keeps nothing.
type Contents func(ctx context.Context, pool string, store func([]Content), begun func()) error
