package checker

import (
	"maps"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// View is the state of a router that has applied a stream as the contract specifies: for each
// worker, dp rank and tier a set of blocks. It is not safe for concurrent use.
type View struct {
	workers map[string]*viewWorker
}

// viewWorker is the state of a worker.
type viewWorker struct {
	// added is nil if no event has announced the worker.
	added *kvcastv1.WorkerAdded
	ranks map[uint32]*viewRank
}

// viewRank is the state of a dp rank.
type viewRank struct {
	tiers map[kvcastv1.Tier]map[uint64]Block
	gaps  []*kvcastv1.Gap
	// incomplete are the tiers whose sets may be wrong, unproved those that may be because of a replay socket that is not
	// known to be the engine's.
	incomplete, unproved tierSet
	// groupsOmitted reports whether the engine also caches other attention groups.
	groupsOmitted bool
	// groups are the last that were described, and held the blocks of groups other than the main group.
	groups *kvcastv1.Groups
	held   map[groupBlock]struct{}
}

// groupBlock is a block of an attention group.
type groupBlock struct {
	tier  kvcastv1.Tier
	group uint32
	hash  uint64
}

// hold changes whether a group holds blocks.
func (r *viewRank) hold(tier kvcastv1.Tier, group uint32, hashes []uint64, holds bool) {
	for _, hash := range hashes {
		if b := (groupBlock{tier, group, hash}); holds {
			r.held[b] = struct{}{}
		} else {
			delete(r.held, b)
		}
	}
}

// NewView returns an empty View.
func NewView() *View {
	return &View{workers: make(map[string]*viewWorker)}
}

// Reset empties the view, as SnapshotBegin requires.
func (v *View) Reset() { clear(v.workers) }

// ApplyWorker applies a worker of a snapshot.
func (v *View) ApplyWorker(sw *kvcastv1.SnapshotWorker) {
	v.workers[sw.GetWorker()] = newViewWorker(sw.GetAdded())
	for _, n := range sw.GetIncompleteRanks() {
		v.rank(sw.GetWorker(), n).incomplete = tiersNamed(nil)
	}
	for _, r := range sw.GetRanks() {
		rank := v.rank(sw.GetWorker(), r.GetDpRank())
		rank.groupsOmitted, rank.groups = r.GetGroupsOmitted(), r.GetGroups()
		byTier := r.GetTierReasons()
		if len(byTier) > 0 || len(r.GetReasons()) > 0 {
			rank.incomplete, rank.unproved = 0, 0
		}
		if len(byTier) == 0 {
			rank.degrade(r.GetReasons(), nil)
		}
		for _, t := range byTier {
			rank.degrade(t.GetReasons(), []kvcastv1.Tier{t.GetTier()})
		}
	}
}

// ApplyBlocks applies blocks of a snapshot.
func (v *View) ApplyBlocks(b *kvcastv1.SnapshotBlocks) {
	for _, ev := range b.GetEvents() {
		v.ApplyEvent(b.GetWorker(), ev)
	}
}

// Apply applies an entry.
func (v *View) Apply(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		v.ApplyEvent(e.GetWorker(), ev)
	}
}

// ApplyEvent applies one event of a worker.
func (v *View) ApplyEvent(worker string, ev *kvcastv1.RouterEvent) {
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		storeBlocks(v.rank(worker, ev.GetDpRank()).tier(ev.GetTier()), kind.Stored)
	case *kvcastv1.RouterEvent_Removed:
		set := v.rank(worker, ev.GetDpRank()).tier(ev.GetTier())
		for _, h := range kind.Removed.GetBlockHashes() {
			delete(set, h)
		}
	case *kvcastv1.RouterEvent_Cleared:
		v.rank(worker, ev.GetDpRank()).clear(kind.Cleared)
	case *kvcastv1.RouterEvent_Gap:
		r := v.rank(worker, ev.GetDpRank())
		r.gaps = append(r.gaps, kind.Gap)
		if kind.Gap.GetReason() == kvcastv1.Gap_REASON_REPLAY_UNPROVED {
			r.unproved |= tiersNamed(kind.Gap.GetTiers())
		} else {
			r.incomplete |= tiersNamed(kind.Gap.GetTiers())
		}
	case *kvcastv1.RouterEvent_Resolved:
		if slices.Contains(kind.Resolved.GetReasons(), kvcastv1.Gap_REASON_REPLAY_UNPROVED) {
			v.rank(worker, ev.GetDpRank()).unproved = 0
		}
	case *kvcastv1.RouterEvent_GroupsOmitted:
		v.rank(worker, ev.GetDpRank()).groupsOmitted = true
	case *kvcastv1.RouterEvent_Groups:
		v.rank(worker, ev.GetDpRank()).groups = kind.Groups
	case *kvcastv1.RouterEvent_GroupStored:
		v.rank(worker, ev.GetDpRank()).hold(ev.GetTier(), kind.GroupStored.GetGroup(), kind.GroupStored.GetBlockHashes(), true)
	case *kvcastv1.RouterEvent_GroupRemoved:
		v.rank(worker, ev.GetDpRank()).hold(ev.GetTier(), kind.GroupRemoved.GetGroup(), kind.GroupRemoved.GetBlockHashes(), false)
	case *kvcastv1.RouterEvent_WorkerAdded:
		v.workers[worker] = newViewWorker(kind.WorkerAdded)
	case *kvcastv1.RouterEvent_WorkerRemoved:
		delete(v.workers, worker)
	}
}

func (r *viewRank) clear(c *kvcastv1.Cleared) {
	for _, t := range c.GetTiers() {
		delete(r.tiers, t)
		maps.DeleteFunc(r.held, func(b groupBlock, _ struct{}) bool { return b.tier == t })
	}
	if len(c.GetTiers()) == 0 {
		clear(r.tiers)
		clear(r.held)
		if c.GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED {
			r.groupsOmitted, r.groups = false, nil
		}
	}
	r.incomplete &^= tiersNamed(c.GetTiers())
	r.unproved &^= tiersNamed(c.GetTiers())
	if c.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
		// The view is now empty; the engine is not.
		r.incomplete |= tiersNamed(c.GetTiers())
	}
}

// degrade adds the reasons of a snapshot for tiers.
func (r *viewRank) degrade(reasons []kvcastv1.DegradedReason, tiers []kvcastv1.Tier) {
	for _, reason := range reasons {
		if reason == kvcastv1.DegradedReason_DEGRADED_REASON_REPLAY_UNPROVED {
			r.unproved |= tiersNamed(tiers)
		} else {
			r.incomplete |= tiersNamed(tiers)
		}
	}
}

// tierSet is a set of tiers: bit n is tier n.
type tierSet uint32

// tiersNamed returns the tiers that an event names: all if it names none.
func tiersNamed(tiers []kvcastv1.Tier) (set tierSet) {
	if len(tiers) == 0 {
		return ^tierSet(0)
	}
	for _, t := range tiers {
		set |= 1 << (uint(t) & 31)
	}
	return set
}

func (v *View) rank(worker string, dpRank uint32) *viewRank {
	w := v.workers[worker]
	if w == nil {
		w = newViewWorker(nil)
		v.workers[worker] = w
	}
	r := w.ranks[dpRank]
	if r == nil {
		r = &viewRank{tiers: make(map[kvcastv1.Tier]map[uint64]Block), held: make(map[groupBlock]struct{})}
		w.ranks[dpRank] = r
	}
	return r
}

func newViewWorker(added *kvcastv1.WorkerAdded) *viewWorker {
	return &viewWorker{added: added, ranks: make(map[uint32]*viewRank)}
}

func (r *viewRank) tier(t kvcastv1.Tier) map[uint64]Block {
	set := r.tiers[t]
	if set == nil {
		set = make(map[uint64]Block)
		r.tiers[t] = set
	}
	return set
}

// known returns the state of a dp rank, or nil if there is none.
func (v *View) known(worker string, dpRank uint32) *viewRank {
	if w := v.workers[worker]; w != nil {
		return w.ranks[dpRank]
	}
	return nil
}

// set returns a read-only set, or nil if there is none.
func (v *View) set(worker string, dpRank uint32, tier kvcastv1.Tier) map[uint64]Block {
	if r := v.known(worker, dpRank); r != nil {
		return r.tiers[tier]
	}
	return nil
}

// Workers returns the names of the known workers, ascending.
func (v *View) Workers() []string { return slices.Sorted(maps.Keys(v.workers)) }

// Ranks returns the dp ranks of a worker that events have named, ascending.
func (v *View) Ranks(worker string) []uint32 {
	w := v.workers[worker]
	if w == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(w.ranks))
}

// Blocks returns a copy of the set of blocks of a rank and tier.
func (v *View) Blocks(worker string, dpRank uint32, tier kvcastv1.Tier) map[uint64]struct{} {
	blocks := make(map[uint64]struct{})
	for h := range v.set(worker, dpRank, tier) {
		blocks[h] = struct{}{}
	}
	return blocks
}

// Contents returns a copy of the blocks of a rank and tier, with all their attributes.
func (v *View) Contents(worker string, dpRank uint32, tier kvcastv1.Tier) map[uint64]Block {
	blocks := make(map[uint64]Block)
	maps.Copy(blocks, v.set(worker, dpRank, tier))
	return blocks
}

// Count returns the number of blocks of a rank and tier.
func (v *View) Count(worker string, dpRank uint32, tier kvcastv1.Tier) int {
	return len(v.set(worker, dpRank, tier))
}

// Digest returns the digest of the blocks of a rank and tier, as in WorkerDigest.
func (v *View) Digest(worker string, dpRank uint32, tier kvcastv1.Tier) uint64 {
	return digest(v.set(worker, dpRank, tier))
}

// Gaps returns the gaps reported for a dp rank since its worker was added, in order.
func (v *View) Gaps(worker string, dpRank uint32) []*kvcastv1.Gap {
	if r := v.known(worker, dpRank); r != nil {
		return slices.Clone(r.gaps)
	}
	return nil
}

// Incomplete reports whether the sets of a dp rank may be wrong: a gap was reported, and the rank
// has not been empty since.
func (v *View) Incomplete(worker string, dpRank uint32) bool {
	r := v.known(worker, dpRank)
	return r != nil && r.incomplete != 0
}

// Unproved reports whether blocks of a dp rank were read from a replay socket that is not known to be the engine's.
func (v *View) Unproved(worker string, dpRank uint32) bool {
	r := v.known(worker, dpRank)
	return r != nil && r.unproved != 0
}

// IncompleteIn reports whether the set of a dp rank in a tier may be wrong, for either reason.
func (v *View) IncompleteIn(worker string, dpRank uint32, tier kvcastv1.Tier) bool {
	r := v.known(worker, dpRank)
	return r != nil && (r.incomplete|r.unproved)&tiersNamed([]kvcastv1.Tier{tier}) != 0
}

// GroupsOmitted reports whether a dp rank also caches other attention groups than the main group,
// so that the engine can reuse at most a prefix in the sets.
func (v *View) GroupsOmitted(worker string, dpRank uint32) bool {
	return v.known(worker, dpRank).hasGroupsOmitted()
}

// isIncomplete is false for an unknown rank.
func (r *viewRank) isIncomplete() bool { return r != nil && r.incomplete|r.unproved != 0 }

// hasGroupsOmitted is false for an unknown rank.
func (r *viewRank) hasGroupsOmitted() bool { return r != nil && r.groupsOmitted }

// Digest returns the XOR of splitmix64 over a set of block hashes; 0 if the set is empty.
func Digest(blocks map[uint64]struct{}) uint64 { return digest(blocks) }

func digest[V any](blocks map[uint64]V) uint64 {
	var d uint64
	for h := range blocks {
		d ^= splitmix64(h)
	}
	return d
}

// splitmix64 returns the first output of Vigna's SplitMix64 generator with seed x:
// https://prng.di.unimi.it/splitmix64.c.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Block has the attributes of a block, as stores reported them.
type Block struct {
	Parent     uint64
	HasParent  bool
	TokensHash uint64
	// Hashed reports whether TokensHash is known.
	Hashed    bool
	BlockSize uint32
	// LoRA is empty for the base model.
	LoRA string
}

// storeBlocks puts blocks into a set. The newest store of a block determines its attributes, but a
// store without tokens_hashes leaves the known ones unchanged.
func storeBlocks(set map[uint64]Block, s *kvcastv1.Stored) {
	b := Block{
		Parent: s.GetParentHash(), HasParent: s.ParentHash != nil,
		BlockSize: s.GetBlockSize(), LoRA: s.GetLoraName(),
	}
	for i, h := range s.GetBlockHashes() {
		if b.Hashed = i < len(s.GetTokensHashes()); b.Hashed {
			b.TokensHash = s.GetTokensHashes()[i]
		}
		if _, present := set[h]; !present || b.Hashed {
			set[h] = b
		}
		b.Parent, b.HasParent = h, true
	}
}

// groupDigest returns the number of pairs of an attention group and a block in a tier of a dp rank, and their digest as in WorkerDigest.
func (v *View) groupDigest(worker string, dpRank uint32, tier kvcastv1.Tier) (pairs, digest uint64) {
	if r := v.known(worker, dpRank); r != nil {
		for b := range r.held {
			if b.tier == tier {
				pairs++
				digest ^= splitmix64(b.hash ^ splitmix64(uint64(b.group)))
			}
		}
	}
	return pairs, digest
}

// GroupBlocks returns the blocks of an attention group other than the main group in a tier of a dp rank.
func (v *View) GroupBlocks(worker string, dpRank uint32, tier kvcastv1.Tier, group uint32) map[uint64]struct{} {
	blocks := make(map[uint64]struct{})
	if r := v.known(worker, dpRank); r != nil {
		for b := range r.held {
			if b.tier == tier && b.group == group {
				blocks[b.hash] = struct{}{}
			}
		}
	}
	return blocks
}

// Groups returns the attention groups of a dp rank that were described last; nil if none are.
func (v *View) Groups(worker string, dpRank uint32) *kvcastv1.Groups {
	if r := v.known(worker, dpRank); r != nil {
		return r.groups
	}
	return nil
}
