package checker

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Block is what stores have said of a block besides its hash.
type Block struct {
	Parent     uint64
	HasParent  bool
	TokensHash uint64
	// Hashed tells that TokensHash is known.
	Hashed    bool
	BlockSize uint32
	// LoRA is empty for the base model.
	LoRA string
}

// storeBlocks puts blocks into a set. What the newest store says of a block holds,
// but one without tokens_hashes leaves what is known of a block as it is.
func storeBlocks(set map[uint64]Block, s *kvcastv1.Stored) {
	b := Block{
		Parent: s.GetParentHash(), HasParent: s.ParentHash != nil,
		BlockSize: s.GetBlockSize(), LoRA: s.GetLoraName(),
	}
	for i, h := range s.GetBlockHashes() {
		if b.Hashed = i < len(s.GetTokensHashes()); b.Hashed {
			b.TokensHash = s.GetTokensHashes()[i]
		}
		if _, held := set[h]; !held || b.Hashed {
			set[h] = b
		}
		b.Parent, b.HasParent = h, true
	}
}
