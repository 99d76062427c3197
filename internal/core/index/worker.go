package index

import (
	"cmp"
	"iter"
	"math"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// worker is the state of a worker. An entry of an unknown worker adds it, since a stream may begin after WorkerAdded.
type worker struct {
	name, model string
	added       *kvcastv1.WorkerAdded // nil: not received
	blockSize   uint32                // in tokens; 0: unknown
	lastEventID uint64
	lastSeq     uint64
	ranks       []*rank // ascending by number
}

// rank is the state of a dp rank, an engine with its own cache.
type rank struct {
	worker    *worker
	number    uint32
	blocks    *radix.Rank
	usedTiers uint8 // tiers that have held blocks since the worker was added; bit n is tier index n
	// reasons are why the blocks of each tier may differ from the engine's, and all those of any tier; none if the rank is
	// complete. detail is what the last Gap with one has said.
	reasons [NumTiers]Reasons
	all     Reasons
	// chunks are the tokens in a connector's chunk in each tier; 0: it has none of several blocks. hasChunks reports whether any is set.
	chunks              [NumTiers]uint32
	hasChunks           bool
	detail              string
	gaps, missedBatches uint64
	lastGap             *kvcastv1.Gap
	groupsOmitted       bool
	// attention has the blocks of attention groups other than the main group; nil: there are none.
	attention *attention
	// created and removed are one more than the seq that the index had when it applied the entry that created the rank, and the last one
	// that removed blocks from it. removed is 0 if none did.
	created, removed uint64
}

// model counts the workers of a model by block size, without those whose size is unknown.
type model struct {
	workers  int
	sizes    []sizeCount // in no order
	hashings []*hashing  // of the engines with several attention groups
	pools    pools
}

type sizeCount struct {
	size    uint32
	workers int
}

// Reasons is a set of reasons for which the blocks of a rank may differ from the engine's: bit n is reason n of kvcast.v1.DegradedReason.
type Reasons uint32

func reasonsOf(all ...kvcastv1.DegradedReason) (r Reasons) {
	for _, reason := range all {
		switch {
		case reason >= 32: // of a later version
			r |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_GAP
		case reason > 0:
			r |= 1 << reason
		}
	}
	return r
}

// All yields the reasons, ascending.
func (r Reasons) All() iter.Seq[kvcastv1.DegradedReason] {
	return func(yield func(kvcastv1.DegradedReason) bool) {
		for reason := range kvcastv1.DegradedReason(32) {
			if r&(1<<reason) != 0 && !yield(reason) {
				return
			}
		}
	}
}

// List returns the reasons, ascending.
func (r Reasons) List() []kvcastv1.DegradedReason { return slices.Collect(r.All()) }

// doubt adds reasons to the tiers named; to all if none is.
func (r *rank) doubt(reasons Reasons, tiers []kvcastv1.Tier) {
	for _, t := range tiers {
		if tier, ok := tierIndex(uint64(t)); ok {
			r.reasons[tier] |= reasons
			r.all |= reasons
		}
	}
	if len(tiers) > 0 {
		return
	}
	for tier := range r.reasons {
		r.reasons[tier] |= reasons
	}
	r.all |= reasons
}

// resolve removes the reasons of the tiers named; of all if none is.
func (r *rank) resolve(tiers []kvcastv1.Tier) {
	for _, t := range tiers {
		if tier, ok := tierIndex(uint64(t)); ok {
			r.reasons[tier] = 0
			r.setChunk(tier, 0)
		}
	}
	if len(tiers) == 0 {
		r.reasons, r.chunks, r.hasChunks = [NumTiers]Reasons{}, [NumTiers]uint32{}, false
	}
	r.countReasons()
}

// resolveReasons removes the reasons that Gaps with some reasons have caused. It ignores those that this version does not
// resolve: they may have caused a reason in common with others.
func (r *rank) resolveReasons(gaps []kvcastv1.Gap_Reason) {
	for _, g := range gaps {
		if g != kvcastv1.Gap_REASON_REPLAY_UNPROVED {
			continue
		}
		for tier := range r.reasons {
			r.reasons[tier] &^= reasonsOf(gapReason(g))
		}
	}
	r.countReasons()
}

// countReasons sets the reasons of all tiers.
func (r *rank) countReasons() {
	r.all = 0
	for _, reasons := range r.reasons {
		r.all |= reasons
	}
	if r.all == 0 {
		r.detail = ""
	}
}

// reasonsDiffer reports whether the tiers have different reasons.
func reasonsDiffer(tiers *[NumTiers]Reasons) bool {
	for _, reasons := range tiers[1:] {
		if reasons != tiers[0] {
			return true
		}
	}
	return false
}

// tierReasons returns the reasons of each tier that has some, if the tiers differ, or have chunks.
func tierReasons(tiers *[NumTiers]Reasons, chunks *[NumTiers]uint32) (all []*kvcastv1.TierReasons) {
	if !reasonsDiffer(tiers) && *chunks == [NumTiers]uint32{} {
		return nil
	}
	for tier, reasons := range tiers {
		if reasons != 0 {
			all = append(all, &kvcastv1.TierReasons{Tier: kvcastv1.Tier(tier + 1), Reasons: reasons.List(), ChunkTokens: chunks[tier]})
		}
	}
	return all
}

// gapReason returns the reason that a Gap causes: usually the one of the same name.
func gapReason(g kvcastv1.Gap_Reason) kvcastv1.DegradedReason {
	switch g {
	case kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER:
		return kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT
	case kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES:
		return kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED
	default:
		if same := kvcastv1.DegradedReason_value["DEGRADED_"+g.String()]; same != 0 {
			return kvcastv1.DegradedReason(same)
		}
		return kvcastv1.DegradedReason_DEGRADED_REASON_GAP // also for a reason of a later version
	}
}

// gap applies a Gap event.
func (r *rank) gap(g *kvcastv1.Gap) {
	r.doubt(reasonsOf(gapReason(g.GetReason())), g.GetTiers())
	if detail := g.GetDetail(); detail != "" {
		r.detail = detail
	}
	if tokens := g.GetChunkTokens(); tokens > 0 {
		for _, t := range g.GetTiers() {
			if tier, ok := tierIndex(uint64(t)); ok {
				r.setChunk(tier, tokens)
			}
		}
	}
	r.gaps++
	if missed := g.GetMissedBatches(); missed <= math.MaxUint64-r.missedBatches { // an engine chooses its seqs
		r.missedBatches += missed
	} else {
		r.missedBatches = math.MaxUint64
	}
	r.lastGap = g
}

// worker returns the worker with a name, and adds it if it does not exist.
func (x *Index) worker(name, modelName string) *worker {
	w := x.workers[name]
	if w == nil {
		w = &worker{name: name, model: modelName}
		x.insertWorker(w)
	}
	return w
}

func (x *Index) insertWorker(w *worker) {
	x.workers[w.name] = w
	i, _ := x.findByName(w.name)
	x.byName = slices.Insert(x.byName, i, w)
	m := x.models[w.model]
	if m == nil {
		m = new(model)
		x.models[w.model] = m
	}
	m.workers++
	m.count(w.blockSize, 1)
	if m.pools.add(w); w.isPool() {
		x.numPools++
	}
}

// removeWorker removes a worker with its blocks.
func (x *Index) removeWorker(w *worker) {
	for _, r := range w.ranks {
		x.dropHashing(r)
		x.forgetLearned(r)
		x.expected.drop(r)
		x.blocks.RemoveRank(r.blocks)
	}
	delete(x.workers, w.name)
	i, _ := x.findByName(w.name)
	x.byName = slices.Delete(x.byName, i, i+1)
	m := x.models[w.model]
	m.count(w.blockSize, -1)
	if m.pools.remove(w); w.isPool() {
		x.numPools--
	}
	if m.workers--; m.workers == 0 {
		delete(x.models, w.model)
	}
}

func (x *Index) findByName(name string) (int, bool) {
	return slices.BinarySearchFunc(x.byName, name, func(w *worker, name string) int { return strings.Compare(w.name, name) })
}

// order has the positions of all ranks by worker and rank number, by their numbers in the index of blocks.
type order struct {
	positions  []uint32
	numberings uint64 // of the index of blocks
}

// ordered returns the positions of all ranks. It computes them if ranks were added since the last call.
func (x *Index) ordered() []uint32 {
	if o := x.order.Load(); o != nil && o.numberings == x.blocks.Numberings() {
		return o.positions
	}
	o := &order{make([]uint32, x.blocks.NumNumbers()), x.blocks.Numberings()}
	position := uint32(0)
	for _, w := range x.byName {
		for _, r := range w.ranks {
			o.positions[r.blocks.Number()] = position
			position++
		}
	}
	x.order.Store(o)
	return o.positions
}

// replaceWorker removes a worker, and returns an empty one in its place, which stays only if the same entry adds it again.
func (x *Index) replaceWorker(w *worker) *worker {
	x.removeWorker(w)
	empty := &worker{name: w.name, model: w.model}
	x.insertWorker(empty)
	return empty
}

// isEmpty reports whether the worker was removed, or no event of it is known.
func (w *worker) isEmpty() bool { return w.added == nil && len(w.ranks) == 0 }

// addWorker applies a WorkerAdded event: it replaces the worker.
func (x *Index) addWorker(w *worker, added *kvcastv1.WorkerAdded) *worker {
	x.removeWorker(w)
	n := &worker{name: w.name, model: added.GetModel(), added: added, blockSize: added.GetBlockSize(), lastEventID: w.lastEventID}
	x.insertWorker(n)
	for _, number := range added.GetRanks() {
		x.rank(n, number)
	}
	return n
}

// rank returns a dp rank of a worker, and adds it if it does not exist.
func (x *Index) rank(w *worker, number uint32) *rank {
	i, ok := w.find(number)
	if !ok {
		r := &rank{worker: w, number: number, created: x.seq + 1}
		r.blocks = x.blocks.AddRank(w.model, r)
		w.ranks = slices.Insert(w.ranks, i, r)
		if w.added == nil && x.doubtUnadded {
			r.doubt(reasonsOf(kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE), nil)
			r.groupsOmitted = true // which a clear does not change
		}
	}
	return w.ranks[i]
}

// find returns the index of a dp rank in ranks, or the index at which to insert it.
func (w *worker) find(number uint32) (int, bool) {
	return slices.BinarySearchFunc(w.ranks, number, func(r *rank, n uint32) int { return cmp.Compare(r.number, n) })
}

// setBlockSize sets the block size of a worker.
func (x *Index) setBlockSize(w *worker, size uint32) {
	m := x.models[w.model]
	m.count(w.blockSize, -1)
	w.blockSize = size
	m.count(size, 1)
}

// count changes the number of workers with a block size.
func (m *model) count(size uint32, change int) {
	if size == 0 {
		return
	}
	i := slices.IndexFunc(m.sizes, func(c sizeCount) bool { return c.size == size })
	if i < 0 {
		i = len(m.sizes)
		m.sizes = append(m.sizes, sizeCount{size: size})
	}
	if m.sizes[i].workers += change; m.sizes[i].workers == 0 {
		m.sizes = slices.Delete(m.sizes, i, i+1)
	}
}

// Worker is the state of a worker at some seq.
type Worker struct {
	Name, Model string
	// BlockSize is the number of tokens in a block; 0: unknown.
	BlockSize uint32
	// Added has the worker's endpoint and labels. It is nil if the entries begin after the worker was added. It must not be modified.
	Added *kvcastv1.WorkerAdded
	// LastEventID and LastSeq are those of the worker's last event and entry.
	LastEventID, LastSeq uint64
	// Ranks are the dp ranks that were configured or have had events, ascending.
	Ranks []Rank
}

// Rank is the state of a dp rank.
type Rank struct {
	Rank uint32
	// Blocks are the digests of the blocks in each tier. Bit n of UsedTiers is set if tier index n has held blocks since the worker was added.
	Blocks [NumTiers]Digest
	// GroupBlocks are the pairs of an attention group other than the main group and a block that it holds.
	GroupBlocks [numGroupTiers]Digest
	UsedTiers   uint8
	// Reasons are why the blocks may differ from the engine's, in any tier; 0: the rank is complete. TierReasons are
	// those of each tier. Detail is what the last Gap with one has said.
	Reasons     Reasons
	TierReasons [NumTiers]Reasons
	Detail      string
	// Chunks are the tokens in a connector's chunk in each tier; 0: it has none of several blocks.
	Chunks [NumTiers]uint32
	// GroupsOmitted reports whether the engine caches other attention groups than the main group.
	GroupsOmitted bool
	// Groups describes them; nil if they are not followed. It must not be modified. Followed reports whether prefixes are exact
	// nevertheless, if the engine's hashes of a prompt are known.
	Groups   *kvcastv1.Groups
	Followed bool
	// Gaps is the number of gaps since the worker was added, and MissedBatches the number of batches lost, as far as it is known. LastGap is
	// the last Gap event; nil if there is none since the worker was added or a snapshot was applied. It must not be modified.
	Gaps, MissedBatches uint64
	LastGap             *kvcastv1.Gap
}

// Digest is a fingerprint of a set of block hashes.
type Digest struct {
	// Blocks is the number of hashes, and of groups and hashes.
	Blocks uint64
	// XOR is that of WorkerDigest.digest of the contract, or of group_digest.
	XOR uint64
}

// ListTierReasons returns the reasons of each tier that has some, if the tiers differ, or have chunks.
func (r *Rank) ListTierReasons() []*kvcastv1.TierReasons {
	return tierReasons(&r.TierReasons, &r.Chunks)
}

// Trust returns how far a rank's blocks can be trusted, as far as it follows from entries.
func (r *Rank) Trust() kvcastv1.Trust { return trust(r.Reasons, r.GroupsOmitted && !r.Followed) }

func trust(reasons Reasons, groupsOmitted bool) kvcastv1.Trust {
	switch {
	case reasons != 0:
		return kvcastv1.Trust_TRUST_DEGRADED
	case groupsOmitted:
		return kvcastv1.Trust_TRUST_UPPER_BOUND
	}
	return kvcastv1.Trust_TRUST_EXACT
}

// Brief is what there is to know of a dp rank besides its blocks to judge a prediction.
type Brief struct {
	// BlockSize is the number of tokens in a block; 0: unknown.
	BlockSize uint32
	// Trust is as of Rank.Trust.
	Trust kvcastv1.Trust
	// Created is when the rank was created: a prediction at a lower seq is not about it, but about a rank of a worker of this name that was
	// removed before.
	Created uint64
	// Removed is when blocks were last removed from the rank, in any tier: since a prediction at a lower seq, some were removed. Since one
	// at this seq or a higher one, none were.
	Removed uint64
}

// Brief returns what is known of a rank; ok is false if it does not exist.
func (x *Index) Brief(worker string, number uint32) (_ Brief, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(worker, number)
	if r == nil {
		return Brief{}, false
	}
	return Brief{BlockSize: r.worker.blockSize, Trust: trust(r.all, r.groupsOmitted && !r.followed()), Created: r.created, Removed: r.removed}, true
}

// Len returns the number of workers, and of their blocks in all dp ranks and tiers.
func (x *Index) Len() (workers int, blocks uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, w := range x.workers {
		for _, r := range w.ranks {
			for tier := range NumTiers {
				blocks += r.digest(tier).Blocks
			}
		}
	}
	return len(x.workers), blocks
}

// Workers returns the workers that match selects (nil: all) at one seq, sorted by name, and the seq.
func (x *Index) Workers(match func(worker, model string) bool) (all []Worker, seq uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all = make([]Worker, 0, len(x.workers))
	for _, w := range x.byName {
		if match == nil || match(w.name, w.model) {
			all = append(all, w.state())
		}
	}
	return all, x.seq
}

// EachWorker calls a function with the labels and the block size (0: unknown) of each worker of a model that is no pool, at one seq and without
// copies. The function must neither call the index nor modify the labels.
func (x *Index) EachWorker(model string, visit func(labels map[string]string, blockSize uint32)) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, w := range x.workers {
		if w.model == model && !w.isPool() {
			visit(w.added.GetLabels(), w.blockSize)
		}
	}
}

// Worker returns a worker; ok is false if it does not exist.
func (x *Index) Worker(name string) (_ Worker, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.workers[name]
	if w == nil {
		return Worker{}, false
	}
	return w.state(), true
}

func (w *worker) state() Worker {
	s := Worker{
		Name: w.name, Model: w.model, BlockSize: w.blockSize, Added: w.added,
		LastEventID: w.lastEventID, LastSeq: w.lastSeq, Ranks: make([]Rank, len(w.ranks)),
	}
	for i, r := range w.ranks {
		s.Ranks[i] = Rank{
			Rank: r.number, UsedTiers: r.usedTiers, Reasons: r.all, TierReasons: r.reasons, Chunks: r.chunks, Detail: r.detail, GroupsOmitted: r.groupsOmitted,
			Gaps: r.gaps, MissedBatches: r.missedBatches, LastGap: r.lastGap,
			Groups: r.groups(), Followed: r.followed(),
		}
		for tier := range NumTiers {
			s.Ranks[i].Blocks[tier] = r.digest(tier)
		}
		if a := r.attention; a != nil {
			s.Ranks[i].GroupBlocks = a.digests
		}
	}
	return s
}

func (r *rank) digest(tier int) Digest {
	blocks, xor := r.blocks.Digest(tier)
	return Digest{blocks, xor}
}
