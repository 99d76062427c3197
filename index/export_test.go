package index

import (
	"slices"

	"github.com/kvcast/kvcast/index/radix"
)

// EntryTimes are the times in an entry.
type EntryTimes = entryTimes

// NewEntryTimes returns the times of an entry.
func NewEntryTimes(engine, ingest int64) EntryTimes { return EntryTimes{engine, ingest} }

// ApplyEncoded applies encoded entries like a Follower, and appends their times.
func (x *Index) ApplyEncoded(entries []byte, times []EntryTimes) ([]EntryTimes, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.applyEncoded(entries, times)
}

// Blocks returns all blocks of a rank by block hash, without their places, which depend on the other ranks.
func (x *Index) Blocks(worker string, number uint32) map[uint64]radix.Block {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make(map[uint64]radix.Block)
	r := x.findRank(worker, number)
	for from, first := uint64(0), true; r != nil && (first || from != 0); first = false {
		var part []radix.Block
		part, from = x.blocks.Scan(r.blocks, from, nil)
		for _, b := range part {
			b.Place = 0
			all[b.Hash] = b
		}
	}
	return all
}

// Sweeping reports whether blocks are left to release, and releases some of them.
func (x *Index) Sweeping() bool { return x.sweep() }

// Models returns the number of models of which counts are kept.
func (x *Index) Models() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.models)
}

// BlockSizes returns the block sizes with which the workers of a model are matched, ascending.
func (x *Index) BlockSizes(model string) []uint32 {
	return slices.Sorted(slices.Values(x.appendBlockSizes(nil, model)))
}

// PieceBytes is the maximum size of a piece of a snapshot of a worker with a short name.
const PieceBytes = pieceBytes

// TurnBytes is the maximum number of bytes that a Follower applies while readers wait.
const TurnBytes = turnBytes
