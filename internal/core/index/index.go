// Package index is the read model: the state of all workers that follows from the journal's entries.
//
// In: entries, in order, from a journal (Follower) or from a stream and its snapshots (Apply methods). Out: the workers with their blocks,
// digests and trust; snapshots; lookups of blocks; and for prompts the longest prefix that each dp rank holds (package radix). Guarantee:
// each answer is exact at one seq, except where a method says otherwise. The same entries give the same answers in a server and in a
// client. A snapshot has one block hash for each parent: if that was removed, while the rank holds the content under another block hash, an
// index that begins with the snapshot matches a shorter prefix.
//
// One writer applies entries. Any number of readers wait for it at most while it applies one entry, or a bounded part
// of the journal, and hold it up for bounded turns.
package index

import (
	"sync"
	"sync/atomic"

	"github.com/kvcast/kvcast/internal/core/index/expected"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// NumTiers is the number of tiers. Tier n of kvcast.v1.Tier has the index n - 1 in arrays.
const NumTiers = kvblock.NumTiers

// Index is the state of all workers after some entry. New makes an empty one. Its methods are safe for concurrent use,
// except that only one goroutine may call Apply methods at a time.
type Index struct {
	mu      sync.RWMutex // guards all below
	blocks  *radix.Index
	workers map[string]*worker
	byName  []*worker // the same ones
	order   atomic.Pointer[order]
	// expected has a lock of its own.
	expected expectations
	models   map[string]*model
	seq      uint64 // the last entry that is applied
	numPools int
	// learners is the number of ranks that learn.
	learners int
	// doubtUnadded makes ranks of workers without a WorkerAdded degraded.
	doubtUnadded bool
	// lastRule is the last rule of an engine with several attention groups. Equal ones that follow share it, so that they are compared quickly.
	lastRule *hybrid.Rule
	decoder  decoder
}

// New returns an index without workers.
func New() *Index {
	x := &Index{blocks: radix.New(), workers: make(map[string]*worker), models: make(map[string]*model)}
	x.expected.set = expected.New[*rank](ExpectedLimits)
	x.learnAdopted()
	return x
}

func (x *Index) learnAdopted() {
	x.blocks.OnAdoption(func(r *radix.Rank, hash uint64) { x.learnAll(r.Owner.(*rank), []uint64{hash}) })
}

// RetainTokenIDs makes the index keep the token ids in entries, up to a number of bytes. They are users' prompts. It must be
// called before the first entry is applied.
func (x *Index) RetainTokenIDs(maxBytes int64) { x.blocks.RetainTokenIDs(maxBytes) }

// KeepBlockHashes makes the index keep what Query.BlockHashes needs, some 10 bytes a block. It must be called before the first entry is applied.
func (x *Index) KeepBlockHashes() { x.blocks.KeepNames() }

// KeepsBlockHashes reports whether KeepBlockHashes was called.
func (x *Index) KeepsBlockHashes() bool { return x.blocks.KeepsNames() }

// DoubtUnadded is for an index whose first entry may not be the first of the journal. It concerns ranks that are added later: those of a worker whose WorkerAdded the
// index has not received are degraded with JOINED_LATE, and after a clear count as of a hybrid engine until it restarts: what was emitted before is unknown.
func (x *Index) DoubtUnadded() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.doubtUnadded = true
}

// TokenIDBytes returns the memory of token ids.
func (x *Index) TokenIDBytes() int64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.blocks.TokenIDBytes()
}

// Seq returns the seq of the last entry applied.
func (x *Index) Seq() uint64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.seq
}

// ApplyEntry applies an entry. Readers see all of its events or none.
func (x *Index) ApplyEntry(e *kvcastv1.Entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.worker(e.GetWorker(), e.GetModel())
	for _, ev := range e.GetEvents() {
		w = x.applyEvent(w, ev)
	}
	x.entryApplied(w, e.GetSeq())
}

// entryApplied ends the application of an entry of a worker, which the entry may have removed.
func (x *Index) entryApplied(w *worker, seq uint64) {
	w.lastSeq, x.seq = seq, seq
	if w.isEmpty() {
		x.removeWorker(w)
	}
	x.sweep()
}

// Sweep releases some of the blocks that were cleared or removed, and reports whether any are left.
func (x *Index) Sweep() (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.blocks.Sweep()
}

// ApplySnapshotWorker adds a worker of a snapshot, without blocks.
func (x *Index) ApplySnapshotWorker(s *kvcastv1.SnapshotWorker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.worker(s.GetWorker(), s.GetAdded().GetModel())
	w = x.addWorker(w, s.GetAdded())
	w.lastEventID = s.GetLastEventId()
	for _, n := range s.GetIncompleteRanks() {
		x.rank(w, n).doubt(reasonsOf(kvcastv1.DegradedReason_DEGRADED_REASON_GAP), nil) // of servers that send no reasons
	}
	for _, report := range s.GetRanks() {
		r := x.rank(w, report.GetDpRank())
		r.resolve(nil)
		for _, tier := range report.GetTierReasons() {
			r.doubt(reasonsOf(tier.GetReasons()...), []kvcastv1.Tier{tier.GetTier()})
			if n, ok := tierIndex(uint64(tier.GetTier())); ok {
				r.setChunk(n, tier.GetChunkTokens())
			}
		}
		if len(report.GetTierReasons()) == 0 {
			r.doubt(reasonsOf(report.GetReasons()...), nil)
		}
		r.detail = report.GetDetail()
		r.gaps, r.missedBatches, r.groupsOmitted = report.GetGaps(), report.GetMissedBatches(), report.GetGroupsOmitted()
		if report.GetGroups() != nil {
			x.setGroups(r, report.GetGroups())
		}
	}
}

// ApplySnapshotBlocks adds blocks of a snapshot. The worker keeps the block size of its SnapshotWorker, since the last
// block is not necessarily the newest.
func (x *Index) ApplySnapshotBlocks(b *kvcastv1.SnapshotBlocks) {
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.worker(b.GetWorker(), "")
	size := w.blockSize
	for _, ev := range b.GetEvents() {
		w = x.applyEvent(w, ev)
	}
	if size != 0 {
		x.setBlockSize(w, size)
	}
	x.blocks.Sweep()
}

// applyEvent applies an event of a worker, and returns the worker or its replacement. It ignores events and tiers that
// this version does not know.
func (x *Index) applyEvent(w *worker, ev *kvcastv1.RouterEvent) *worker {
	w.lastEventID = max(w.lastEventID, ev.GetEventId())
	tier, tierKnown := tierIndex(uint64(ev.GetTier()))
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_WorkerAdded:
		return x.addWorker(w, kind.WorkerAdded)
	case *kvcastv1.RouterEvent_WorkerRemoved:
		return x.replaceWorker(w)
	case *kvcastv1.RouterEvent_Stored:
		s := kind.Stored
		if r := x.rank(w, ev.GetDpRank()); tierKnown {
			x.store(r, tier, &radix.Stored{
				Parent: s.GetParentHash(), HasParent: s.ParentHash != nil,
				Blocks: s.GetBlockHashes(), Tokens: s.GetTokensHashes(),
				LoRA: s.GetLoraName(), BlockSize: s.GetBlockSize(), TokenIDs: s.GetTokenIds(),
			})
		}
	case *kvcastv1.RouterEvent_Removed:
		if r := x.rank(w, ev.GetDpRank()); tierKnown {
			x.remove(r, tier, kind.Removed.GetBlockHashes())
		}
	case *kvcastv1.RouterEvent_Cleared:
		x.clear(x.rank(w, ev.GetDpRank()), kind.Cleared)
	case *kvcastv1.RouterEvent_Gap:
		x.rank(w, ev.GetDpRank()).gap(kind.Gap)
	case *kvcastv1.RouterEvent_Resolved:
		x.rank(w, ev.GetDpRank()).resolveReasons(kind.Resolved.GetReasons())
	case *kvcastv1.RouterEvent_GroupsOmitted:
		x.rank(w, ev.GetDpRank()).groupsOmitted = true
	case *kvcastv1.RouterEvent_Groups:
		x.setGroups(x.rank(w, ev.GetDpRank()), kind.Groups)
	case *kvcastv1.RouterEvent_GroupStored:
		if r := x.rank(w, ev.GetDpRank()); tierKnown {
			x.applyGroup(r, tier, uint64(kind.GroupStored.GetGroup()), kind.GroupStored.GetBlockHashes(), true)
		}
	case *kvcastv1.RouterEvent_GroupRemoved:
		if r := x.rank(w, ev.GetDpRank()); tierKnown {
			x.applyGroup(r, tier, uint64(kind.GroupRemoved.GetGroup()), kind.GroupRemoved.GetBlockHashes(), false)
		}
	}
	return w
}

// tierIndex returns the index of a tier of kvcast.v1.Tier; ok is false if this version does not know the tier.
func tierIndex(t uint64) (_ int, ok bool) { return int(t) - 1, t >= 1 && t <= NumTiers }

// store adds blocks to a rank.
func (x *Index) store(r *rank, tier int, s *radix.Stored) {
	if s.BlockSize != 0 && s.BlockSize != r.worker.blockSize {
		x.setBlockSize(r.worker, s.BlockSize) // an engine may restart with another block size
	}
	if uint64(len(s.TokenIDs)) != uint64(len(s.Blocks))*uint64(s.BlockSize) {
		s.TokenIDs = nil // of another version, or not of all blocks
	}
	r.usedTiers |= 1 << tier
	x.blocks.Store(r.blocks, tier, *s)
	x.learnAll(r, s.Blocks)
	x.expected.stored(r, s.Tokens)
}

// remove removes blocks from a rank.
func (x *Index) remove(r *rank, tier int, hashes []uint64) {
	r.removed = x.seq + 1

	x.blocks.Remove(r.blocks, tier, hashes)
}

// clear applies a Cleared event.
func (x *Index) clear(r *rank, c *kvcastv1.Cleared) {
	r.removed = x.seq + 1
	x.expected.drop(r)
	for _, t := range c.GetTiers() {
		if tier, ok := tierIndex(uint64(t)); ok {
			x.blocks.ClearTier(r.blocks, tier)
		}
	}
	if len(c.GetTiers()) == 0 {
		x.blocks.Clear(r.blocks)
		if c.GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED {
			r.groupsOmitted = false
			x.forgetGroups(r)
		}
	}
	r.clearGroups(c.GetTiers())
	r.resolve(c.GetTiers())
	if c.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP { // the engine may still hold blocks
		r.doubt(reasonsOf(kvcastv1.DegradedReason_DEGRADED_REASON_GAP), c.GetTiers())
		r.gaps++
	}
}
