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

// View is what all workers hold according to one subscription. One goroutine applies the
// updates; any number may query it at the same time. They see each entry entirely or not at
// all, and wait for one entry at most, not for a response or a snapshot.
//
// A block of one worker takes at most 80 bytes, or 125 while one of its ancestors is unknown.
// Blocks that several workers hold take less.
//
// While a snapshot replaces the state, as after the loss of the journal, queries are answered from the old
// state, and both use memory. Before the first snapshot is complete, the View is empty and Ready is false.
type View struct {
	mu       sync.RWMutex
	state    *state                // guarded by mu
	status   ViewStatus            // guarded by mu
	watchers map[*watcher]struct{} // guarded by mu

	// Used by the applying goroutine alone.
	pending  *state // the snapshot that is being received; nil: none
	complete bool   // the state is everything that the filter selects, so digests must match
}

// ViewStatus is the status of a View.
type ViewStatus struct {
	// Ready reports whether a snapshot has been applied, or the subscription started without one.
	Ready bool
	// Live reports whether there is a stream. Without one the View becomes stale.
	Live bool
	// Position is the last position applied.
	Position Position
	// Snapshots is the number of snapshots applied.
	Snapshots uint64
	// Compared is the number of comparisons with the server's digests, one per worker, rank
	// and tier. Differed is how many of them differed, which led to a snapshot.
	Compared, Differed uint64
}

// NewView returns an empty View.
func NewView() *View {
	return &View{state: newState(), watchers: make(map[*watcher]struct{})}
}

// Follow applies all updates of a subscription. It returns the error that ends them; nil if
// their context ends them. It usually runs in its own goroutine:
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

// Apply applies the next update of a subscription. A View must receive all updates of one
// subscription, which should start with a snapshot. Apply must not be called concurrently.
//
// If the server sends digests (Config.Digests), Apply compares them with the state, provided that the
// subscription started with a snapshot or with the first entry. A difference means that an event was lost: the
// subscription starts again with a snapshot, and the next Interruption has a *DigestError.
func (v *View) Apply(u Update) {
	m := u.Message
	switch {
	case m == nil:
		v.pending = nil // its end will not come
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

// applyContents applies a message to the pending snapshot, which no query sees, or to the
// state, one entry at a time.
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

// applySnapshot replaces the state by the pending snapshot.
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

// update changes what queries see, and notifies watchers.
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

// Worker is what a View knows of a worker.
type Worker struct {
	Name  string
	Model string
	// BlockSize is in tokens; 0: unknown.
	BlockSize uint32
	// Added has the worker's endpoint, labels and more. It is nil if the subscription started
	// after the worker was added, and must not be modified.
	Added *kvcastv1.WorkerAdded
	// Ranks are the dp ranks with events, ascending.
	Ranks []Rank
}

// Rank is what a View knows of a dp rank.
type Rank struct {
	Rank uint32
	// Blocks are the digests of the held blocks, by kvcastv1.Tier.
	Blocks [numTiers + 1]BlocksDigest
	// Incomplete reports whether the engine's blocks may differ: events were lost, or the
	// engine was already running when it was first read.
	Incomplete bool
	// Gaps is the number of gaps since the worker was added or since the last snapshot.
	// LastGap is the last of them; nil: none. It must not be modified.
	Gaps    uint64
	LastGap *kvcastv1.Gap
}

// Workers returns all workers, by name.
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

// Holds returns the tiers in which a dp rank of a worker holds a block, given by the engine's block hash.
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
	// XOR is the XOR of splitmix64 of each hash.
	XOR uint64
}

// DigestError reports that a View differs from the server's digest.
type DigestError struct {
	Worker string
	Rank   uint32
	Tier   kvcastv1.Tier
	// Seq is the entry after which they were compared.
	Seq uint64
	// Got is the digest of the View, Want that of the server.
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

// compareDigests compares the state with the server's digests of the update's position, and
// requests a snapshot if they differ. If the message has any digest of a worker, it has all.
func (v *View) compareDigests(u Update) {
	type rankTier struct {
		rank uint32
		tier int
	}
	digests := make(map[string]map[rankTier]BlocksDigest)
	for _, d := range u.Message.GetProgress().GetWorkers() {
		tier, ok := tierIndex(d.GetTier())
		if !ok {
			continue
		}
		if digests[d.GetWorker()] == nil {
			digests[d.GetWorker()] = make(map[rankTier]BlocksDigest)
		}
		digests[d.GetWorker()][rankTier{d.GetDpRank(), tier}] = BlocksDigest{d.GetBlocks(), d.GetDigest()}
	}
	if len(digests) == 0 {
		return
	}
	var compared, differed uint64
	var difference *DigestError
	for name, sets := range digests {
		w := v.state.workers[name]
		if w != nil {
			for rank := range w.ranks {
				for tier := range numTiers {
					if at := (rankTier{rank, tier}); sets[at] == (BlocksDigest{}) {
						sets[at] = BlocksDigest{} // without a digest it must be empty
					}
				}
			}
		}
		for at, want := range sets {
			compared++
			if got := w.digest(at.rank, at.tier); got != want {
				differed++
				difference = &DigestError{name, at.rank, kvcastv1.Tier(at.tier + 1), u.Position.Seq, got, want}
			}
		}
	}
	v.update(func() {
		v.status.Compared += compared
		v.status.Differed += differed
	})
	if difference != nil {
		u.Resnapshot(difference)
	}
}
