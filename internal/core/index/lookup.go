package index

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Lookup selects blocks, by block hash or tokens hash, and the ranks and tiers to look for them.
type Lookup struct {
	BlockHashes, TokensHashes []uint64
	// Match selects workers.
	Match func(worker, model string) bool
	Tiers kvblock.Tiers
	// Limit is the maximum number of holders returned.
	Limit int
	// Alias returns for block hashes of sources the block hashes that entries have, with the names of the sources that
	// hold the block now; nil if no worker has several sources. It is called without a lock.
	Alias func(worker string, rank uint32, hashes []uint64) map[uint64][]string
}

// ErrTooManyHolders means that Lookup found more holders than Lookup.Limit.
var ErrTooManyHolders = errors.New("too many ranks and tiers hold the blocks")

// Holders returns every rank and tier that holds one of the blocks. Tokens hashes are compared with each block of the
// ranks. The index may change between two ranks, and during a search for tokens hashes.
func (x *Index) Holders(ctx context.Context, q *Lookup) ([]*kvcastv1.BlockHolder, error) {
	s := search{Lookup: q, hashes: slices.Compact(slices.Sorted(slices.Values(q.BlockHashes))), tokens: make(map[uint64]struct{}, len(q.TokensHashes))}
	for _, h := range q.TokensHashes {
		s.tokens[h] = struct{}{}
	}
	workers, _ := x.Workers(q.Match)
	for i := range workers {
		for j := range workers[i].Ranks {
			if err := s.rank(ctx, x, workers[i].Name, workers[i].Ranks[j].Rank); err != nil {
				return nil, err
			}
		}
	}
	return s.found, nil
}

// search is the state of a lookup.
type search struct {
	*Lookup
	hashes []uint64 // sorted
	tokens map[uint64]struct{}
	found  []*kvcastv1.BlockHolder
	blocks []radix.Block
}

// rank searches a rank.
func (s *search) rank(ctx context.Context, x *Index, worker string, number uint32) error {
	hashes := s.hashes
	var sources map[uint64][]string
	if s.Alias != nil {
		if sources = s.Alias(worker, number, hashes); len(sources) > 0 {
			hashes = slices.Sorted(maps.Keys(sources))
			hashes = slices.Compact(slices.Sorted(slices.Values(append(hashes, s.hashes...))))
		}
	}
	x.mu.RLock()
	r := x.findRank(worker, number)
	if r == nil {
		x.mu.RUnlock()
		return nil
	}
	for _, h := range hashes {
		if b, ok := x.blocks.Find(r.blocks, h); ok {
			s.add(r, &b, sources[h])
		}
	}
	x.mu.RUnlock()
	if len(s.found) > s.Limit {
		return ErrTooManyHolders
	}
	if len(s.tokens) == 0 {
		return ctx.Err()
	}
	return s.scan(ctx, x, worker, number, hashes)
}

// scan searches a rank for tokens hashes. It skips blocks with the sorted block hashes.
func (s *search) scan(ctx context.Context, x *Index, worker string, number uint32, skip []uint64) error {
	first, from := true, uint64(0)
	for first || from != 0 {
		first = false
		if err := ctx.Err(); err != nil {
			return err
		}
		var wanted []radix.Block
		x.mu.RLock()
		r := x.findRank(worker, number)
		if r == nil {
			x.mu.RUnlock()
			return nil
		}
		s.blocks, from = x.blocks.Scan(r.blocks, from, s.blocks[:0])
		for _, b := range s.blocks {
			if _, ok := s.tokens[b.Tokens]; !ok || !b.HasTokens {
				continue
			}
			if _, twice := slices.BinarySearch(skip, b.Hash); !twice {
				wanted = append(wanted, b)
			}
		}
		x.mu.RUnlock()
		for i := range wanted {
			b := &wanted[i]
			var sources []string
			if s.Alias != nil {
				sources = s.Alias(worker, number, []uint64{b.Hash})[b.Hash]
			}
			s.add(r, b, sources)
		}
		if len(s.found) > s.Limit {
			return ErrTooManyHolders
		}
	}
	return nil
}

// EachBlock calls a function with what is known of each of some blocks of a dp rank that any tier holds, and its index in hashes. The function must not
// call the Index.
func (x *Index) EachBlock(worker string, number uint32, hashes []uint64, visit func(i int, b *radix.Block)) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(worker, number)
	if r == nil {
		return
	}
	for i, h := range hashes {
		if b, ok := x.blocks.Find(r.blocks, h); ok {
			visit(i, &b)
		}
	}
}

// findRank returns a rank; nil if it does not exist.
func (x *Index) findRank(worker string, number uint32) *rank {
	w := x.workers[worker]
	if w == nil {
		return nil
	}
	if i, ok := w.find(number); ok {
		return w.ranks[i]
	}
	return nil
}

// add adds a holder for each tier that holds a block.
func (s *search) add(r *rank, b *radix.Block, sources []string) {
	for tier := range NumTiers {
		if b.Tiers&(1<<tier) == 0 || s.Tiers&(2<<tier) == 0 || len(s.found) > s.Limit {
			continue
		}
		h := &kvcastv1.BlockHolder{
			BlockHash: b.Hash, Worker: r.worker.name, Model: r.worker.model, DpRank: r.number,
			Tier: kvcastv1.Tier(tier + 1), Sources: sources,
		}
		if b.HasTokens {
			h.TokensHash = proto.Uint64(b.Tokens)
		}
		if b.LoRA != "" {
			h.LoraName = proto.String(strings.Clone(b.LoRA))
		}
		s.found = append(s.found, h)
	}
}

// Tiers returns the tiers in which a dp rank of a worker holds the block with a block hash; none if it does not exist.
func (x *Index) Tiers(worker string, number uint32, blockHash uint64) (tiers []kvcastv1.Tier) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(worker, number)
	if r == nil {
		return nil
	}
	held := r.blocks.Tiers(blockHash)
	for tier := range NumTiers {
		if held&(1<<tier) != 0 {
			tiers = append(tiers, kvcastv1.Tier(tier+1))
		}
	}
	return tiers
}
