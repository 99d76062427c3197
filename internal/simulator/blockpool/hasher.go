package blockpool

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
)

// hasher gives hashes to blocks. Each hash is of all tokens up to the end of its block.
type hasher struct {
	size int // tokens of a block
	seed uint64
	vllm *vllmhash.Hasher // nil: xxh3
	// Both are reused.
	bytes  []byte
	buffer vllmhash.Buffer
}

// newHasher returns the hasher of a valid configuration.
func newHasher(c Config) hasher {
	h := hasher{size: c.BlockSize, seed: c.HashSeed}
	if c.VLLMHashes {
		v, _ := vllmhash.New(vllmhash.SHA256, vllmhash.DefaultSeed, c.BlockSize) // the configuration is valid
		h.vllm = &v
	}
	return h
}

// extend appends hashes until hashes has that of each whole block of tokens. It may begin with those of the first blocks.
func (h *hasher) extend(hashes []uint64, tokens []uint32) []uint64 {
	whole := len(tokens) / h.size
	if h.vllm != nil && len(hashes) < whole {
		hashes, _ = h.vllm.Append(hashes[:0], tokens[:whole*h.size], vllmhash.Content{}, &h.buffer) // no content, no error
	}
	for i := len(hashes); i < whole; i++ {
		parent := h.seed
		if i > 0 {
			parent = hashes[i-1]
		}
		h.bytes = h.bytes[:0]
		for _, t := range tokens[i*h.size : (i+1)*h.size] {
			h.bytes = binary.LittleEndian.AppendUint32(h.bytes, t)
		}
		hashes = append(hashes, xxh3.HashSeed(h.bytes, parent))
	}
	return hashes
}
