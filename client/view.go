package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const numTiers = kvblock.NumTiers

// View is the state of all workers according to one subscription. One goroutine applies the updates. Any number of
// goroutines may query the View concurrently: a query sees all events of an entry or none, and waits while one entry
// is applied, but not for a whole message or snapshot.
//
// A block of a dp rank takes at most 80 bytes, or 125 bytes while an ancestor of the block is unknown. Blocks that
// several ranks hold take less per rank.
//
// While a snapshot is received, queries use the previous state, and both states take memory. Until the first
// snapshot is complete, the View is empty and ViewStatus.Ready is false.
type View struct {
	state atomic.Pointer[index.Index] // replaced at the end of each snapshot
	// known is what is known of when the state was up to date; nil: nothing.
	known atomic.Pointer[recency]

	mu       sync.RWMutex
	status   ViewStatus            // guarded by mu
	watchers map[*watcher]struct{} // guarded by mu

	// Used only by the goroutine that applies updates.
	pending  *index.Index // the state of the snapshot that is being received; nil: none
	complete bool         // the state has all blocks that the filter selects, so digests must match
	goal     goal
	quiet    time.Duration // recency.quiet of the stream
}

// goal is the newest entry that the server had at a message before it, and when that message came: a state that has reached seq has all entries of that time.
// The zero goal: the stream is not behind.
type goal struct {
	seq uint64
	at  time.Time
}

// recency is when a state was last known to be up to date, and for how long after that it counts as up to date without another message. quiet is 0 if there
// is no stream, the stream is behind, a snapshot replaces the state, or it differs from the server's.
type recency struct {
	at    time.Time
	quiet time.Duration
}

// never returns the recency of a state that was never up to date, or is wrong.
func never() *recency { return &recency{at: time.Now().Add(-2 * StaleAfter)} }

// quietIntervals is how many progress intervals a stream may be silent before its View grows older: messages may be late.
const quietIntervals = 2

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
	v := &View{watchers: make(map[*watcher]struct{})}
	v.state.Store(index.New())
	return v
}

// Follow applies all updates of a subscription. It returns the error that ended the subscription; nil if the
// subscription's context has ended. It usually runs in its own goroutine:
//
//	err := view.Follow(c.Subscribe(ctx, client.Config{Digests: true}))
func (v *View) Follow(updates iter.Seq2[Update, error]) error {
	defer v.streamEnded()
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
		v.streamEnded()
		if reason := new(Error); u.Interruption != nil && errors.As(u.Interruption.Err, &reason) && reason.Reason == ReasonOutdated {
			v.known.Store(never()) // what the server has sent was old already
		}
		return
	case m.GetAccepted() != nil:
		v.quiet = quietIntervals * time.Duration(min(m.GetAccepted().GetProgressIntervalNano(), math.MaxInt64/quietIntervals))
		if v.quiet == 0 {
			v.quiet = math.MaxInt64 // it may be silent for any time
		}
		v.complete = v.complete || m.GetAccepted().GetMode() == kvcastv1.Accepted_MODE_EARLIEST && u.Position.Seq == 0
		if !v.complete { // what workers that were added before hold is not known
			v.state.Load().DoubtUnadded()
		}
	case m.GetSnapshotBegin() != nil:
		v.pending, v.complete = index.New(), false
		v.stopUpdating() // queries use the previous state until the snapshot is complete
	case m.GetSnapshotEnd() != nil:
		v.applySnapshot(u)
		return
	}
	v.applyContents(m)
	v.update(func() {
		v.status.Live = true
		if u.Position.IsZero() {
			return
		}
		v.status.Ready, v.status.Position = true, u.Position
		v.heard(u)
	})
	if m.GetProgress() != nil && m.GetPosition() != nil && v.complete {
		v.compareDigests(u)
	}
}

// streamEnded drops the snapshot that was being received: the next stream starts another one.
func (v *View) streamEnded() {
	v.pending = nil
	v.stopUpdating()
	v.update(func() { v.status.Live = false })
}

// heard records when the state was up to date, at a message with a position.
func (v *View) heard(u Update) {
	m, now := u.Message, time.Now()
	newest := max(m.GetNewestSeq(), m.GetAccepted().GetNewestSeq())
	if m.GetAccepted() != nil || m.GetSnapshotEnd() != nil {
		v.goal = goal{}
	}
	switch {
	case max(newest, v.goal.seq) <= u.Position.Seq: // earlier servers say what is newest in accepted alone
		v.known.Store(&recency{now, v.quiet})
		v.goal = goal{}
		return
	case v.goal.seq == 0: // it is behind from now on
		v.stopUpdating()
	case u.Position.Seq >= v.goal.seq:
		v.known.Store(&recency{at: v.goal.at})
	default:
		return
	}
	v.goal = goal{newest, now}
}

// stopUpdating records that the state has not been up to date since the last message at which it was. Its ranks become STALE after StaleAfter.
func (v *View) stopUpdating() {
	if known := v.known.Load(); known == nil {
		v.known.Store(never())
	} else if known.quiet != 0 {
		v.known.Store(&recency{at: known.at})
	}
}

// applyContents applies a message to the pending state, which queries do not see, or entry by entry to the state.
func (v *View) applyContents(m *kvcastv1.SubscribeResponse) {
	if v.pending != nil {
		if w := m.GetSnapshotWorker(); w != nil {
			v.pending.ApplySnapshotWorker(w)
		}
		for _, b := range m.GetSnapshotBlocks() {
			v.pending.ApplySnapshotBlocks(b)
		}
		for _, e := range m.GetEntries() {
			v.pending.ApplyEntry(e)
		}
		return
	}
	for _, e := range m.GetEntries() {
		v.state.Load().ApplyEntry(e)
		v.update(func() { v.workerChanged(e.GetWorker()) })
	}
}

// applySnapshot replaces the state with the pending state.
func (v *View) applySnapshot(u Update) {
	before := v.state.Swap(v.pending)
	v.pending, v.complete = nil, true
	v.update(func() {
		for _, state := range []*index.Index{before, v.state.Load()} {
			workers, _ := state.Workers(nil)
			for _, w := range workers {
				v.workerChanged(w.Name)
			}
		}
		v.heard(u)
		v.status.Ready, v.status.Live, v.status.Position = true, true, u.Position
		v.status.Snapshots++
		for w := range v.watchers {
			w.change.Snapshot = true
		}
	})
}

// update calls f, and notifies watchers.
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
	// Ranks are the dp ranks that were configured or have had events, ascending.
	Ranks []Rank
}

// Rank is the state of a dp rank in a View.
type Rank struct {
	Rank uint32
	// Blocks are the digests of the blocks, by kvcastv1.Tier.
	Blocks [numTiers + 1]BlocksDigest
	// GroupBlocks are the digests of the pairs of an attention group other than the main group and a block that it holds, by kvcastv1.Tier.
	GroupBlocks [numTiers + 1]BlocksDigest
	// Trust is how far the blocks can be trusted. If it is DEGRADED, Reasons are why, ascending.
	Trust   kvcastv1.Trust
	Reasons []kvcastv1.DegradedReason
	// Incomplete reports whether the engine's blocks may differ, because events were lost, or because the engine
	// was already running when kvcast first read it.
	Incomplete bool
	// Gaps is the number of gaps since the worker was added. LastGap is the last Gap event since then or since the
	// last snapshot; nil: none. It must not be modified.
	Gaps    uint64
	LastGap *kvcastv1.Gap
}

// Workers returns all workers, ordered by name.
func (v *View) Workers() []Worker {
	isStale := v.age() > StaleAfter // before the state, which a newer one may replace
	all, _ := v.state.Load().Workers(nil)
	out := make([]Worker, 0, len(all))
	for i := range all {
		out = append(out, exportWorker(&all[i], isStale))
	}
	return out
}

// Worker returns a worker; ok is false if it does not exist.
func (v *View) Worker(name string) (_ Worker, ok bool) {
	isStale := v.age() > StaleAfter
	w, ok := v.state.Load().Worker(name)
	if !ok {
		return Worker{}, false
	}
	return exportWorker(&w, isStale), true
}

func exportWorker(w *index.Worker, isStale bool) Worker {
	out := Worker{Name: w.Name, Model: w.Model, BlockSize: w.BlockSize, Added: w.Added}
	for i := range w.Ranks {
		r := &w.Ranks[i]
		rank := Rank{
			Rank: r.Rank, Trust: r.Trust(), Reasons: r.Reasons.List(), Incomplete: r.Reasons != 0, Gaps: r.Gaps, LastGap: r.LastGap,
		}
		if isStale {
			rank.Trust, rank.Reasons = kvcastv1.Trust_TRUST_DEGRADED, append(rank.Reasons, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
		}
		for tier, d := range r.Blocks {
			rank.Blocks[tier+1] = BlocksDigest(d)
		}
		for tier, d := range r.GroupBlocks {
			rank.GroupBlocks[tier+1] = BlocksDigest(d)
		}
		out.Ranks = append(out.Ranks, rank)
	}
	return out
}

// Holds returns the tiers in which a dp rank of a worker holds the block with the engine's block hash.
func (v *View) Holds(worker string, rank uint32, blockHash uint64) []kvcastv1.Tier {
	return v.state.Load().Tiers(worker, rank, blockHash)
}

// BlocksDigest is a fingerprint of a set of block hashes, or of pairs of an attention group and a block hash.
type BlocksDigest struct {
	// Blocks is the number of hashes, or of pairs.
	Blocks uint64
	// XOR is that of WorkerDigest.digest of the contract, or of group_digest.
	XOR uint64
}

// DigestError reports that the blocks of a View differ from a digest of the server.
type DigestError struct {
	Worker string
	Rank   uint32
	Tier   kvcastv1.Tier
	// Groups reports whether the digests are those of attention groups other than the main group.
	Groups bool
	// Seq is the position at which the digests were compared.
	Seq uint64
	// Got is the digest of the View, and Want the digest of the server.
	Got, Want BlocksDigest
}

func (e *DigestError) Error() string {
	of := ""
	if e.Groups {
		of = " of other attention groups than the main group"
	}
	return fmt.Sprintf("the view of worker %q, rank %d, %v has %d blocks%s with digest %016x after entry %d, the server %d with %016x",
		e.Worker, e.Rank, e.Tier, e.Got.Blocks, of, e.Got.XOR, e.Seq, e.Want.Blocks, e.Want.XOR)
}

// compareDigests compares the state with the server's digests at the update's position, and requests a snapshot if
// they differ. If the message has a digest of a worker, the worker's ranks and tiers without a digest must be empty.
func (v *View) compareDigests(u Update) {
	type place struct {
		worker string
		rank   uint32
		tier   kvcastv1.Tier
	}
	type digests struct{ main, groups BlocksDigest }
	want, names := make(map[place]digests), make(map[string]struct{})
	withoutGroups := make(map[place]struct{}) // of servers of earlier versions, and of lower tiers
	for _, d := range u.Message.GetProgress().GetWorkers() {
		if t := d.GetTier(); t >= kvcastv1.Tier_TIER_DEVICE && t <= numTiers { // a tier that this version knows
			at := place{d.GetWorker(), d.GetDpRank(), t}
			want[at] = digests{BlocksDigest{d.GetBlocks(), d.GetDigest()}, BlocksDigest{d.GetGroupBlocks(), d.GetGroupDigest()}}
			if d.GroupBlocks == nil {
				withoutGroups[at] = struct{}{}
			}
			names[d.GetWorker()] = struct{}{}
		}
	}
	got := make(map[place]digests)
	for name := range names {
		w, _ := v.Worker(name)
		for _, r := range w.Ranks {
			for tier := kvcastv1.Tier_TIER_DEVICE; tier <= numTiers; tier++ {
				at := place{name, r.Rank, tier}
				if got[at] = (digests{r.Blocks[tier], r.GroupBlocks[tier]}); want[at] == (digests{}) {
					want[at] = digests{} // without a digest, the tier must be empty
				}
			}
		}
	}
	var differed uint64
	for at, want := range want {
		got := got[at]
		if _, ok := withoutGroups[at]; ok {
			got.groups = want.groups
		}
		switch {
		case got.main != want.main:
			differed++
			u.Resnapshot(&DigestError{at.worker, at.rank, at.tier, false, u.Position.Seq, got.main, want.main})
		case got.groups != want.groups:
			differed++
			u.Resnapshot(&DigestError{at.worker, at.rank, at.tier, true, u.Position.Seq, got.groups, want.groups})
		}
	}
	if differed > 0 { // until there is a snapshot
		v.known.Store(never())
	}
	if len(want) > 0 {
		v.update(func() {
			v.status.Compared += uint64(len(want))
			v.status.Differed += differed
		})
	}
}
