package pipeline

import (
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// maxIdleTokens is the largest capacity for tokens that an empty run keeps.
const maxIdleTokens = 16 << 10

// runKey has the fields that are equal in all events of a run.
type runKey struct {
	kind      wire.Kind
	rank      uint32
	tier      kvblock.Tier
	lora      string
	salt      string
	blockSize uint32
	// hashed reports whether the tokens hashes are known, tokens whether tokens are emitted.
	hashed bool
	tokens bool
	// note is the session id of stores, or the reason of removes, if it is emitted.
	note string
	// group is not 0 for blocks that are not in runs: see groups.Key.
	group uint8
}

// run is adjacent stores that continue one another, or adjacent removes. It becomes one event.
type run struct {
	key       runKey
	parent    uint64
	hasParent bool
	// Indexed by block, except that tokens has blockSize elements a block.
	hashes       []uint64
	tokensHashes []uint64
	tokens       []uint32
	// inputs reports whether stored blocks may have inputs beside their tokens and adapter.
	inputs bool
	// ops are the operations on the copies of each block; empty if all are 0: copies.Add or copies.Remove.
	ops []copies.Op
	// Times of the last batch that contributed.
	engineTime int64
	ingestTime int64
}

func (r *run) empty() bool { return len(r.hashes) == 0 }

// last returns the last block, which a store must continue to join the run.
func (r *run) last() uint64 { return r.hashes[len(r.hashes)-1] }

// op returns the operation on the copies of block i.
func (r *run) op(i int) copies.Op {
	if len(r.ops) == 0 {
		return 0
	}
	return r.ops[i]
}

// appendOps appends the operation of the next n blocks, before their hashes are appended.
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

// slice returns a run of the blocks from index i up to j, which shares the memory of r.
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

// cloneStrings copies the run's strings, which are memory of the batch, so that the run can outlive the batch.
func (r *run) cloneStrings() {
	r.key.lora, r.key.salt, r.key.note = strings.Clone(r.key.lora), strings.Clone(r.key.salt), strings.Clone(r.key.note)
}

func (r *run) reset() {
	if cap(r.tokens) > maxIdleTokens {
		r.tokens = nil
	}
	r.hashes, r.tokensHashes, r.tokens, r.ops, r.inputs = r.hashes[:0], r.tokensHashes[:0], r.tokens[:0], r.ops[:0], false
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
	flushNote
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
	flushNote:        "note",
	flushParent:      "parent",
	flushMaxBlocks:   "max_blocks",
	flushTimeout:     "timeout",
	flushBatchEnd:    "batch_end",
	flushUnmergeable: "unmergeable",
	flushShutdown:    "shutdown",
}

// differs returns the reason why runs of two keys do not merge; ok is false if they merge.
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
	case k.note != o.note:
		return flushNote, true
	}
	return flushHashOnly, true
}
