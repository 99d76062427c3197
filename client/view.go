package client

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// View is the state of all workers according to one subscription. One goroutine applies the updates. Any number of
// goroutines may query the View concurrently: a query sees all events of an entry or none, and waits while one entry
// is applied, but not for a whole message or snapshot.
//
// A block of one worker takes at most 80 bytes, or 125 bytes while an ancestor of the block is unknown. Blocks that
// several workers hold take less per worker.
//
// While a snapshot is received, queries use the previous state, and both states take memory. Until the first
// snapshot is complete, the View is empty and ViewStatus.Ready is false.
type View struct {
	mu       sync.RWMutex
	state    *state                // guarded by mu
	status   ViewStatus            // guarded by mu
	watchers map[*watcher]struct{} // guarded by mu

	// Used only by the goroutine that applies updates.
	pending  *state // the state of the snapshot that is being received; nil: none
	complete bool   // the state has all blocks that the filter selects, so digests must match
}

// ViewStatus is the status of a View.
type ViewStatus struct {
	// Ready reports whether a snapshot has been applied, or the subscription has started without a snapshot.
	Ready bool
	// Live reports whether there is a stream. Without a stream, the View becomes outdated.
	Live bool
	// Position is the last position applied.
	Position Position
	// Snapshots is the number of snapshots applied.
	Snapshots uint64
	// Compared is the number of comparisons with the server's digests, one per worker, rank and tier. Differed is
	// the number of comparisons with a difference, after which a snapshot was requested.
	Compared, Differed uint64
}

// NewView returns an empty View.
func NewView() *View {
	return &View{state: newState(), watchers: make(map[*watcher]struct{})}
}

// Follow applies all updates of a subscription. It returns the error that ended the subscription; nil if the
// subscription's context has ended. It usually runs in its own goroutine:
//
//	err := view.Follow(c.Subscribe(ctx, client.Config{Digests: true}))
func (v *View) Follow(updates iter.Seq2[Update, error]) error {
	for u, err := range updates {
		if err != nil {
			return err
		}
		v.Apply(u)
	}
	return nil
}

// Apply applies the next update of a subscription. The caller must apply all updates of one subscription, which
// should start with a snapshot. Apply must not be called concurrently.
//
// Apply compares the state with the server's digests if the update has digests (Config.Digests) and the
// subscription has started with a snapshot or with entry 1. A difference means that an event was lost:
// the subscription requests a snapshot, and the next update has an Interruption with a *DigestError.
func (v *View) Apply(u Update) {
	m := u.Message
	switch {
	case m == nil:
		v.pending = nil // the next stream starts another snapshot
		v.update(func() { v.status.Live = false })
		return
	case m.GetAccepted() != nil:
		v.complete = v.complete || m.GetAccepted().GetMode() == kvcastv1.Accepted_MODE_EARLIEST && u.Position.Seq == 0
	case m.GetSnapshotBegin() != nil:
		v.pending, v.complete = newState(), false
	case m.GetSnapshotEnd() != nil:
		v.applySnapshot(u)
		return
	}
	v.applyContents(m)
	v.update(func() {
		v.status.Live = true
		if !u.Position.IsZero() {
			v.status.Ready, v.status.Position = true, u.Position
		}
		v.state.sweep()
	})
	if m.GetProgress() != nil && m.GetPosition() != nil && v.complete {
		v.compareDigests(u)
	}
}

// applyContents applies a message to the pending state, which queries do not see, or entry by entry to the state.
func (v *View) applyContents(m *kvcastv1.SubscribeResponse) {
	if v.pending != nil {
		if w := m.GetSnapshotWorker(); w != nil {
			v.pending.applySnapshotWorker(w)
		}
		for _, b := range m.GetSnapshotBlocks() {
			v.pending.applySnapshotBlocks(b)
		}
		for _, e := range m.GetEntries() {
			v.pending.applyEntry(e)
		}
		v.pending.sweep()
		return
	}
	for _, e := range m.GetEntries() {
		v.update(func() {
			v.state.applyEntry(e)
			v.state.sweep()
			v.workerChanged(e.GetWorker())
		})
	}
}

// applySnapshot replaces the state with the pending state.
func (v *View) applySnapshot(u Update) {
	v.update(func() {
		for _, st := range []*state{v.state, v.pending} {
			for name := range st.workers {
				v.workerChanged(name)
			}
		}
		v.state, v.pending, v.complete = v.pending, nil, true
		v.status.Ready, v.status.Live, v.status.Position = true, true, u.Position
		v.status.Snapshots++
		for w := range v.watchers {
			w.change.Snapshot = true
		}
	})
}

// update calls f while no query runs, and notifies watchers.
func (v *View) update(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f()
	for w := range v.watchers {
		w.notify(v.status)
	}
}

// Status returns the status of the View.
func (v *View) Status() ViewStatus {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.status
}

// WaitReady waits until the View is Ready. It returns the error of ctx if that ends first.
func (v *View) WaitReady(ctx context.Context) error {
	for range v.Changes(ctx) {
		if v.Status().Ready {
			return nil
		}
	}
	return ctx.Err()
}

// Worker is the state of a worker in a View.
type Worker struct {
	Name  string
	Model string
	// BlockSize is the number of tokens per block; 0: unknown.
	BlockSize uint32
	// Added has the worker's endpoint, labels and other properties. It is nil if the subscription started after
	// the worker was added. It must not be modified.
	Added *kvcastv1.WorkerAdded
	// Ranks are the dp ranks that have had events, ascending.
	Ranks []Rank
}

// Rank is the state of a dp rank in a View.
type Rank struct {
	Rank uint32
	// Blocks are the digests of the blocks, by kvcastv1.Tier.
	Blocks [numTiers + 1]BlocksDigest
	// Incomplete reports whether the engine's blocks may differ, because events were lost, or because the engine
	// was already running when kvcast first read it.
	Incomplete bool
	// Gaps is the number of Gap events since the worker was added or since the last snapshot. LastGap is the last
	// of these events; nil: none. It must not be modified.
	Gaps    uint64
	LastGap *kvcastv1.Gap
}

// Workers returns all workers, ordered by name.
func (v *View) Workers() []Worker {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := make([]Worker, 0, len(v.state.workers))
	for _, name := range slices.Sorted(maps.Keys(v.state.workers)) {
		out = append(out, v.state.workers[name].export())
	}
	return out
}

// Worker returns a worker; ok is false if it does not exist.
func (v *View) Worker(name string) (_ Worker, ok bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	w := v.state.workers[name]
	if w == nil {
		return Worker{}, false
	}
	return w.export(), true
}

func (w *worker) export() Worker {
	out := Worker{Name: w.name, Model: w.model, BlockSize: w.blockSize, Added: w.added}
	for _, n := range slices.Sorted(maps.Keys(w.ranks)) {
		r := w.ranks[n]
		rank := Rank{Rank: n, Incomplete: r.incomplete, Gaps: r.gaps, LastGap: r.lastGap}
		for tier := range numTiers {
			rank.Blocks[tier+1] = w.digest(n, tier)
		}
		out.Ranks = append(out.Ranks, rank)
	}
	return out
}

// Holds returns the tiers in which a dp rank of a worker holds the block with the engine's block hash.
func (v *View) Holds(worker string, rank uint32, blockHash uint64) []kvcastv1.Tier {
	v.mu.RLock()
	defer v.mu.RUnlock()
	w := v.state.workers[worker]
	if w == nil || w.ranks[rank] == nil {
		return nil
	}
	_, tag, _ := w.ranks[rank].table.Get(blockHash)
	var out []kvcastv1.Tier
	for tier := range numTiers {
		if tag&(1<<tier) != 0 {
			out = append(out, kvcastv1.Tier(tier+1))
		}
	}
	return out
}

// BlocksDigest is a fingerprint of a set of block hashes.
type BlocksDigest struct {
	// Blocks is the number of hashes.
	Blocks uint64
	// XOR is the XOR of splitmix64 of all hashes, as WorkerDigest.digest of the contract describes.
	XOR uint64
}

// DigestError reports that the blocks of a View differ from a digest of the server.
type DigestError struct {
	Worker string
	Rank   uint32
	Tier   kvcastv1.Tier
	// Seq is the position at which the digests were compared.
	Seq uint64
	// Got is the digest of the View, and Want the digest of the server.
	Got, Want BlocksDigest
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("the view of worker %q, rank %d, %v has %d blocks with digest %016x after entry %d, the server %d with %016x",
		e.Worker, e.Rank, e.Tier, e.Got.Blocks, e.Got.XOR, e.Seq, e.Want.Blocks, e.Want.XOR)
}

// digest returns the digest of a rank's blocks in a tier; w may be nil.
func (w *worker) digest(rank uint32, tier int) BlocksDigest {
	if w == nil || w.ranks[rank] == nil {
		return BlocksDigest{}
	}
	r := w.ranks[rank]
	return BlocksDigest{r.blocks[tier], r.digests[tier]}
}

// compareDigests compares the state with the server's digests at the update's position, and requests a snapshot if
// they differ. If the message has a digest of a worker, the worker's ranks and tiers without a digest must be empty.
func (v *View) compareDigests(u Update) {
	type place struct {
		worker string
		rank   uint32
		tier   int
	}
	want := make(map[place]BlocksDigest)
	names := make(map[string]struct{})
	for _, d := range u.Message.GetProgress().GetWorkers() {
		if tier, ok := tierIndex(d.GetTier()); ok {
			want[place{d.GetWorker(), d.GetDpRank(), tier}] = BlocksDigest{d.GetBlocks(), d.GetDigest()}
			names[d.GetWorker()] = struct{}{}
		}
	}
	for name := range names {
		if w := v.state.workers[name]; w != nil {
			for rank := range w.ranks {
				for tier := range numTiers {
					if at := (place{name, rank, tier}); want[at] == (BlocksDigest{}) {
						want[at] = BlocksDigest{} // no digest: the tier must be empty
					}
				}
			}
		}
	}
	var differed uint64
	for at, want := range want {
		if got := v.state.workers[at.worker].digest(at.rank, at.tier); got != want {
			differed++
			u.Resnapshot(&DigestError{at.worker, at.rank, kvcastv1.Tier(at.tier + 1), u.Position.Seq, got, want})
		}
	}
	if len(want) > 0 {
		v.update(func() {
			v.status.Compared += uint64(len(want))
			v.status.Differed += differed
		})
	}
}
