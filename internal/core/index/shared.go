package index

import (
	"context"

	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// Sharing says how many ranks hold the same blocks, and which parts of the tree they share most.
type Sharing = radix.Sharing

// sharingWork bounds the work between two turns of the writer: some 100 µs, and twice that if the last part of it is a path of
// 1,000 nodes. A run that very many ranks hold in parts takes longer.
const sharingWork = 1 << 15

// Sharing counts how many ranks of a model hold the same blocks; of all models if the name is empty. It visits every block, and
// then the nodes that it returns, in turns between which the index may change. It returns at most so many nodes, of which half, those that are shared most, are
// the reason for the others: the nodes before them.
func (x *Index) Sharing(ctx context.Context, model string, nodes int) (*Sharing, error) {
	s := new(Sharing)
	for next, first := uint32(0), true; first || next != 0; first = false {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		x.mu.RLock()
		next = x.blocks.AddRuns(s, model, next, sharingWork, (nodes+1)/2)
		x.mu.RUnlock()
	}
	for more := true; more; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		x.mu.RLock()
		more = x.blocks.Resolve(s, sharingWork, nodes)
		x.mu.RUnlock()
	}
	return s, nil
}

// Chain returns the tokens hashes of the blocks from the start of the prompt to a block of a worker's rank, and the worker's model; ok is
// false if the rank does not hold the block, if its content or that of a block before it is unknown, or if the chain is longer than most.
func (x *Index) Chain(worker string, number uint32, hash uint64, most int) (tokens []uint64, model string, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(worker, number)
	if r == nil {
		return nil, "", false
	}
	tokens, ok = x.blocks.Chain(r.blocks, hash, most+1)
	return tokens, r.worker.model, ok && len(tokens) <= most
}
