package apply

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// errEnded ends the reading of a pool whose contents cannot be followed.
var errEnded = errors.New("the journal has ended")

// Contents returns the contents of blocks in an index that has applied the entries of a journal, for pools: also of workers that other servers read, and
// after a restart. Of a worker, blocks in device memory count alone: what connectors tell of lower tiers may name neither adapter nor cache salt.
func Contents(reader journal.Reader, of *index.Index, logger *slog.Logger) feed.Contents {
	return func(ctx context.Context, pool string, store func([]feed.Content), begun func()) error {
		source := &Source{Journal: reader, Index: of, Lock: new(sync.Mutex), Logger: logger, Pool: pool}
		if err := source.Run(ctx, &learner{pool: pool, store: store}, begun); err != nil {
			return err
		}
		return errEnded
	}
}

// learner is a Target that passes on stores.
type learner struct {
	pool  string
	store func([]feed.Content)
	batch []feed.Content
}

func (*learner) Begin(string, *kvcastv1.WorkerAdded) {}

func (*learner) End(string) {}

// Apply implements Target.
func (l *learner) Apply(worker string, event *kvcastv1.RouterEvent) {
	stored := event.GetStored()
	if stored == nil {
		return
	}
	hashes, tokens := stored.GetBlockHashes(), stored.GetTokensHashes()
	if len(hashes) != len(tokens) || event.GetTier() != kvcastv1.Tier_TIER_DEVICE && worker != l.pool {
		return
	}
	parent, hasParent := stored.GetParentHash(), stored.ParentHash != nil
	for i, hash := range hashes {
		l.batch = append(l.batch, feed.Content{
			Hash: hash, Parent: parent, HasParent: hasParent, TokensHash: tokens[i], Tokens: stored.GetBlockSize(), LoRA: stored.GetLoraName(),
		})
		parent, hasParent = hash, true
	}
}

// Flush implements Target.
func (l *learner) Flush(string, float64) {
	l.store(l.batch)
	if l.batch = l.batch[:0]; cap(l.batch) > maxKept {
		l.batch = nil
	}
}

// maxKept is for how many contents memory is kept from one entry to the next.
const maxKept = 1 << 12
