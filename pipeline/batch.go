package pipeline

import (
	"strings"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/pipeline/copies"
)

// maxRunTokens bounds the token ids of one event, so that an entry stays within
// what gRPC clients accept by default (4 MiB) at five bytes a token.
const maxRunTokens = 1 << 19

// maxIdleTokens is how many tokens' memory an idle run keeps.
const maxIdleTokens = 16 << 10

// runKey are the fields that are equal in all events of a run.
type runKey struct {
	kind      wire.Kind
	rank      uint32
	tier      wire.Tier
	lora      string
	salt      string
	blockSize uint32
	// hashed reports whether the blocks' tokens hashes are known, tokens whether their
	// tokens are emitted.
	hashed bool
	tokens bool
}

// run is the pending event: adjacent stores that continue one another, or adjacent removes.
type run struct {
	key       runKey
	parent    uint64
	hasParent bool
	// Parallel: hashes, and where known their tokens hashes and tokens.
	hashes       []uint64
	tokensHashes []uint64
	tokens       []uint32
	// ops are the operations on the counts of each block; empty where that is 0, copies.Add or
	// copies.Remove, for all.
	ops []copies.Op
	// Times of the last batch that contributed.
	engineTime int64
	ingestTime int64
}

func (r *run) empty() bool { return len(r.hashes) == 0 }

// last is the block that a store must continue to join the run.
func (r *run) last() uint64 { return r.hashes[len(r.hashes)-1] }

// op returns the operation on the counts of block i.
func (r *run) op(i int) copies.Op {
	if len(r.ops) == 0 {
		return 0
	}
	return r.ops[i]
}

// appendOps appends the operation of n blocks that are about to be appended to the run.
func (r *run) appendOps(op copies.Op, n int) {
	if op == 0 && len(r.ops) == 0 {
		return
	}
	for len(r.ops) < len(r.hashes) {
		r.ops = append(r.ops, 0)
	}
	for range n {
		r.ops = append(r.ops, op)
	}
}

// stores reports whether the run stores a block.
func (r *run) stores(rank uint32, hash uint64) bool {
	if r.key.kind != wire.KindStored || r.key.rank != rank {
		return false
	}
	for _, h := range r.hashes {
		if h == hash {
			return true
		}
	}
	return false
}

// slice returns a run of the blocks from i up to j, in the same memory.
func (r *run) slice(i, j int) run {
	p := *r
	p.hashes = r.hashes[i:j]
	if len(r.ops) > 0 {
		p.ops = r.ops[i:j]
	}
	if r.key.hashed {
		p.tokensHashes = r.tokensHashes[i:j]
	}
	if size := int(r.key.blockSize); r.key.tokens {
		p.tokens = r.tokens[i*size : j*size]
	}
	if i > 0 {
		p.parent, p.hasParent = r.hashes[i-1], true
	}
	return p
}

// cloneStrings copies the run's strings: those of a batch are the caller's memory, and the
// run outlives the batch.
func (r *run) cloneStrings() {
	r.key.lora, r.key.salt = strings.Clone(r.key.lora), strings.Clone(r.key.salt)
}

func (r *run) reset() {
	if cap(r.tokens) > maxIdleTokens {
		r.tokens = nil
	}
	r.hashes, r.tokensHashes, r.tokens, r.ops = r.hashes[:0], r.tokensHashes[:0], r.tokens[:0], r.ops[:0]
}

// flushReason is why a run was emitted.
type flushReason uint8

const (
	flushKind flushReason = iota
	flushRank
	flushTier
	flushLoRA
	flushSalt
	flushBlockSize
	flushHashOnly
	flushParent
	flushMaxBlocks
	flushTimeout
	flushBatchEnd
	flushUnmergeable
	flushShutdown
	numFlushReasons
)

var flushNames = [numFlushReasons]string{
	flushKind:        "kind",
	flushRank:        "dp_rank",
	flushTier:        "tier",
	flushLoRA:        "lora",
	flushSalt:        "salt",
	flushBlockSize:   "block_size",
	flushHashOnly:    "hash_only",
	flushParent:      "parent",
	flushMaxBlocks:   "max_blocks",
	flushTimeout:     "timeout",
	flushBatchEnd:    "batch_end",
	flushUnmergeable: "unmergeable",
	flushShutdown:    "shutdown",
}

// differs returns why runs of two keys do not merge; ok is false where they do.
func (k *runKey) differs(o *runKey) (why flushReason, ok bool) {
	switch {
	case *k == *o:
		return 0, false
	case k.kind != o.kind:
		return flushKind, true
	case k.rank != o.rank:
		return flushRank, true
	case k.tier != o.tier:
		return flushTier, true
	case k.lora != o.lora:
		return flushLoRA, true
	case k.salt != o.salt:
		return flushSalt, true
	case k.blockSize != o.blockSize:
		return flushBlockSize, true
	}
	return flushHashOnly, true
}
