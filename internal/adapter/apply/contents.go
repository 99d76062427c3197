package apply

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// errEnded ends the reading of a pool whose contents cannot be followed.
var errEnded = errors.New("the journal has ended")

// Contents returns the contents of blocks in an index that has applied the entries of a journal, for pools: also of workers that other servers read, and
// after a restart.
func Contents(reader journal.Reader, of *index.Index, logger *slog.Logger) feed.Contents {
	return func(ctx context.Context, pool string, l feed.Learner) error {
		source := &Source{Journal: reader, Index: of, Lock: new(sync.Mutex), Logger: logger, Pool: pool, PoolsOf: l.PoolsOf}
		if err := source.Run(ctx, &learner{Learner: l, pool: pool, index: of}, l.Begun); err != nil {
			return err
		}
		return errEnded
	}
}

// learner is a Target that passes on stores and removes.
type learner struct {
	feed.Learner
	pool  string
	index *index.Index
	batch []feed.Content
}

func (*learner) Begin(string, *kvcastv1.WorkerAdded) {}

func (*learner) End(string) {}

// Apply implements Target.
func (l *learner) Apply(worker string, event *kvcastv1.RouterEvent) {
	if event.GetTier() != kvcastv1.Tier(l.Tier) && worker != l.pool {
		return
	}
	if removed := event.GetRemoved(); removed != nil && worker != l.pool && l.Removed != nil {
		l.Flush(worker, 0)
		l.Removed(removed.GetBlockHashes())
	}
	stored := event.GetStored()
	hashes, tokens := stored.GetBlockHashes(), stored.GetTokensHashes()
	if len(hashes) != len(tokens) {
		return
	}
	parent, hasParent := stored.GetParentHash(), stored != nil && stored.ParentHash != nil
	first := len(l.batch)
	for i, hash := range hashes {
		l.batch = append(l.batch, feed.Content{
			Hash: hash, Parent: parent, HasParent: hasParent, TokensHash: tokens[i], Tokens: stored.GetBlockSize(), LoRA: stored.GetLoraName(),
		})
		parent, hasParent = hash, true
	}
	if event.GetTier() == kvcastv1.Tier_TIER_DEVICE || worker == l.pool {
		return
	}
	// The store of a copy may lack a part of the block's content. The index has it, from the store in device memory, unless the block was removed since.
	contents := l.batch[first:]
	var unknown []int
	l.index.EachBlock(worker, event.GetDpRank(), hashes, func(i int, b *radix.Block) {
		if !b.HasTokens {
			unknown = append(unknown, i)
			return
		}
		c := &contents[i]
		c.Parent, c.HasParent, c.TokensHash, c.Tokens, c.LoRA = b.Parent, b.HasParent, b.Tokens, b.BlockSize, strings.Clone(b.LoRA)
	})
	for _, i := range slices.Backward(unknown) {
		l.batch = slices.Delete(l.batch, first+i, first+i+1)
	}
}

// Flush implements Target.
func (l *learner) Flush(worker string, _ float64) {
	if len(l.batch) > 0 {
		l.Stored(l.batch, worker == l.pool)
	}
	if l.batch = l.batch[:0]; cap(l.batch) > maxKept {
		l.batch = nil
	}
}

// maxKept is for how many contents memory is kept from one entry to the next.
const maxKept = 1 << 12
