// Package workers reads which blocks a store holds from what the workers announce that load from it, where the store itself cannot be asked:
// files that engines share, or objects.
//
// In: the blocks that the workers store and remove in one tier. Out: the blocks of the store, as package pool publishes them: a block that
// any worker has announced, until a worker removes it, or none has announced it for some time.
package workers

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/pool"
)

// ageSteps is in how many steps blocks become as old as they may: they are removed at most a step later.
const ageSteps = 60

// Config is what a Receiver reads.
type Config struct {
	// Pool is the name of the pool that the store is to Contents, Tier that of its blocks in the workers, and MaxAge for how long blocks count
	// as held, above 0.
	Pool     string
	Tier     kvblock.Tier
	MaxAge   time.Duration
	Contents feed.Contents
	// Limit bounds the memory of blocks. The oldest make room for others.
	Limit interface {
		Reserve(bytes int64) bool
		Release(bytes int64)
	}
	Logger *slog.Logger
}

// receiver passes on what workers announce.
type receiver struct {
	*pool.Publisher
	Config

	mu     sync.Mutex // guards all below, and is held from a change of blocks until it is published
	blocks *blocks
	begun  bool // the blocks of the beginning are complete, and published
}

// Subscribe reads what workers announce, in the background, until Contents ends.
func Subscribe(c Config) transport.Receiver {
	r := &receiver{Publisher: pool.New(), Config: c, blocks: newBlocks(c.MaxAge, c.Limit)}
	r.Go(r.run)
	return r
}

// run passes on contents until they end, or receiving ends.
func (r *receiver) run() {
	ctx, cancel := context.WithCancel(r.Context())
	var aging sync.WaitGroup
	aging.Go(func() { r.age(ctx) })
	err := r.Contents(ctx, r.Pool, feed.Learner{Tier: r.Tier, Stored: r.stored, Removed: r.removed, Begun: r.begin})
	cancel()
	aging.Wait()
	r.mu.Lock()
	connected := r.begun
	r.blocks.close()
	r.mu.Unlock()
	r.Disconnected(connected, err)
}

// begin publishes the blocks of the beginning.
func (r *receiver) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.begun { // the contents have begun anew
		return
	}
	r.Connected(r.blocks.held())
	r.begun = true
}

// stored records blocks that a worker has announced, or that the pool had before this run, and publishes those that are new. Later, what the
// pool has stored follows from what was published.
func (r *receiver) stored(all []feed.Content, ofPool bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ofPool && r.begun {
		return
	}
	now := time.Now()
	var fresh []feed.Content
	for _, c := range all {
		isNew, gone := r.blocks.store(c, now)
		if len(gone) > 0 {
			r.publish(fresh)
			r.unpublish(gone)
			fresh = nil
		}
		if isNew {
			fresh = append(fresh, c)
		}
	}
	r.publish(fresh)
}

// removed records blocks that a worker has removed.
func (r *receiver) removed(hashes []uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var gone []uint64
	for _, hash := range hashes {
		if r.blocks.remove(hash) {
			gone = append(gone, hash)
		}
	}
	r.unpublish(gone)
}

// publish publishes blocks, unless those of the beginning are not complete. r.mu must be held.
func (r *receiver) publish(all []feed.Content) {
	if r.begun && len(all) > 0 {
		r.Store(all)
	}
}

// unpublish publishes that blocks are gone, unless those of the beginning are not complete. r.mu must be held.
func (r *receiver) unpublish(hashes []uint64) {
	if r.begun && len(hashes) > 0 {
		r.Remove(hashes)
	}
}

// age removes blocks that are too old, until ctx ends.
func (r *receiver) age(ctx context.Context) {
	ticks := time.NewTicker(max(r.MaxAge/ageSteps, time.Second))
	defer ticks.Stop()
	for {
		select {
		case now := <-ticks.C:
			r.mu.Lock()
			gone := r.blocks.expire(now)
			r.unpublish(gone)
			r.mu.Unlock()
			if len(gone) > 0 {
				r.Logger.Debug("blocks removed that no worker has announced for max_age", "blocks", len(gone), "max_age", r.MaxAge)
			}
		case <-ctx.Done():
			return
		}
	}
}
