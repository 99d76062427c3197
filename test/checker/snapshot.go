package checker

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// snapshot is the state of the Checker within a snapshot.
type snapshot struct {
	// minEndSeq is the lowest seq at which the snapshot may end.
	minEndSeq uint64
	// worker is the last announced worker, whose blocks follow.
	worker string
	// entries reports whether all workers have been received, so that entries follow.
	entries bool
	// missingParents are the parents that have not been received, with their received children.
	missingParents map[blockKey][]uint64
}

// blockKey identifies a block of a worker.
type blockKey struct {
	rank uint32
	tier kvcastv1.Tier
	hash uint64
}

// snapshotBegin checks a SnapshotBegin, and discards the state.
func (c *Checker) snapshotBegin(msg *kvcastv1.SubscribeResponse) error {
	if err := checkUnplaced(msg); err != nil {
		return err
	}
	epoch := msg.GetSnapshotBegin().GetEpoch()
	switch {
	case epoch == "":
		return broken(Protocol, "SnapshotBegin without an epoch")
	case c.server != "" && epoch != c.server:
		return broken(Protocol, "SnapshotBegin of epoch %q in a stream of epoch %q", epoch, c.server)
	case c.phase == phaseAccepted && c.req.GetGapPolicy() == kvcastv1.GapPolicy_GAP_POLICY_FAIL:
		return broken(Protocol, "a snapshot where the stream had to go on or to fail")
	case c.phase == phaseAccepted:
		c.snap.minEndSeq = c.head
	}
	c.snap = snapshot{minEndSeq: c.snap.minEndSeq, missingParents: make(map[blockKey][]uint64)}
	c.phase, c.server = phaseSnapshot, epoch
	c.discard()
	c.epoch = epoch
	return nil
}

// discard discards the state, as a router does on SnapshotBegin, except the reported losses.
func (c *Checker) discard() {
	c.state, c.stateFilter = statePartial, nil
	c.fromStart, c.allWorkersSeen = false, false
	c.head, c.lastSeq, c.streamStartSeq, c.snapshotSeq = 0, 0, 0, 0
	clear(c.seen)
	clear(c.workers)
	c.view.Reset()
}

// snapshotPart checks a message after SnapshotBegin, up to and including SnapshotEnd.
func (c *Checker) snapshotPart(msg *kvcastv1.SubscribeResponse) error {
	if msg.GetSnapshotEnd() != nil {
		return c.snapshotEnd(msg)
	}
	if err := checkUnplaced(msg); err != nil {
		return err
	}
	switch {
	case msg.GetProgress() != nil:
		return checkAlive(msg)
	case len(msg.GetEntries()) > 0:
		c.snap.entries = true
		return c.snapshotEntries(msg.GetEntries())
	case c.snap.entries:
		return broken(Snapshot, "workers or blocks after the entries")
	case msg.GetSnapshotWorker() != nil:
		return c.snapshotWorker(msg.GetSnapshotWorker())
	}
	for _, b := range msg.GetSnapshotBlocks() {
		if err := c.snapshotBlocks(b); err != nil {
			return err
		}
	}
	return nil
}

func (c *Checker) snapshotWorker(sw *kvcastv1.SnapshotWorker) error {
	name, model := sw.GetWorker(), sw.GetAdded().GetModel()
	switch {
	case name == "":
		return broken(Protocol, "a worker of the snapshot without a name")
	case sw.GetAdded() == nil:
		return broken(Protocol, "worker %q of the snapshot without its WorkerAdded", name)
	case sw.GetLastEventId() == 0:
		return broken(Protocol, "worker %q of the snapshot without a last_event_id", name)
	case c.workers[name] != nil:
		return broken(Snapshot, "worker %q twice", name)
	}
	if what := c.filter.excludedPart(name, model); what != "" {
		return broken(Filtered, "the snapshot holds %s", what)
	}
	w := c.worker(name)
	w.presence, w.model, w.lastID, w.whole = presenceAdded, model, sw.GetLastEventId(), true
	for _, r := range sw.GetRanks() {
		rank := w.rank(r.GetDpRank())
		rank.groupsOmitted = r.GetGroupsOmitted()
		rank.ambiguous = slices.Contains(r.GetReasons(), kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT)
	}
	c.view.ApplyWorker(sw)
	for _, r := range sw.GetRanks() {
		if c.view.Unproved(name, r.GetDpRank()) { // a Resolved may follow
			w.rank(r.GetDpRank()).omissions = map[kvcastv1.Gap_Reason]tierSet{kvcastv1.Gap_REASON_REPLAY_UNPROVED: tiersNamed(nil)}
		}
	}
	for _, rank := range sw.GetIncompleteRanks() {
		if c.view.Incomplete(name, rank) {
			c.reported[rankKey{name, rank}]++
		}
	}
	c.snap.worker = name
	clear(c.snap.missingParents)
	return nil
}

func (c *Checker) snapshotBlocks(b *kvcastv1.SnapshotBlocks) error {
	switch {
	case b.GetWorker() == "":
		return broken(Protocol, "blocks of the snapshot without a worker")
	case b.GetWorker() != c.snap.worker:
		return broken(Snapshot, "blocks of worker %q, but the worker before them is %q", b.GetWorker(), c.snap.worker)
	case len(b.GetEvents()) == 0:
		return broken(Protocol, "blocks of worker %q without an event", b.GetWorker())
	}
	for _, ev := range b.GetEvents() {
		if what := blocksFault(ev); what != "" {
			return broken(Protocol, "blocks of worker %q: %s", b.GetWorker(), what)
		}
		if !c.filter.hasTier(ev.GetTier()) {
			return broken(Filtered, "the snapshot holds blocks of worker %q in tier %v", b.GetWorker(), ev.GetTier())
		}
		if err := c.snapshotStored(ev); err != nil {
			return err
		}
	}
	return nil
}

// snapshotStored checks blocks against the previous ones, and applies them.
func (c *Checker) snapshotStored(ev *kvcastv1.RouterEvent) error {
	name, stored := c.snap.worker, ev.GetStored()
	if g := ev.GetGroupStored(); g != nil {
		r := c.view.rank(name, ev.GetDpRank())
		for _, hash := range g.GetBlockHashes() {
			if _, twice := r.held[groupBlock{ev.GetTier(), g.GetGroup(), hash}]; twice {
				return broken(Snapshot, "block %016x of group %d of worker %q, rank %d, %v, twice", hash, g.GetGroup(), name, ev.GetDpRank(), ev.GetTier())
			}
		}
		c.view.ApplyEvent(name, ev)
		return nil
	}
	key := blockKey{rank: ev.GetDpRank(), tier: ev.GetTier()}
	set := c.view.set(name, key.rank, key.tier)
	within := make(map[uint64]struct{}, len(stored.GetBlockHashes()))
	for _, h := range stored.GetBlockHashes() {
		_, before := set[h]
		_, now := within[h]
		if before || now {
			return broken(Snapshot, "block %016x of worker %q, rank %d, %v, twice", h, name, key.rank, key.tier)
		}
		within[h] = struct{}{}
	}
	if _, ok := set[stored.GetParentHash()]; stored.ParentHash != nil && !ok {
		key.hash = stored.GetParentHash()
		c.snap.missingParents[key] = append(c.snap.missingParents[key], stored.GetBlockHashes()[0])
	}
	c.view.ApplyEvent(name, ev)
	for _, h := range stored.GetBlockHashes() {
		key.hash = h
		for _, child := range c.snap.missingParents[key] {
			if !c.view.descends(name, key.rank, h, child) {
				return broken(Snapshot, "block %016x of worker %q, rank %d, %v, after its child %016x",
					h, name, key.rank, key.tier, child)
			}
		}
		delete(c.snap.missingParents, key)
	}
	return nil
}

// descends reports whether a block of a dp rank is a descendant of another one, in any tiers. If a parent descends from
// its child, the two have no order.
func (v *View) descends(worker string, rank uint32, hash, from uint64) bool {
	visited := make(map[uint64]struct{})
	for next := []uint64{hash}; len(next) > 0; {
		hash := next[0]
		next = next[1:]
		if _, again := visited[hash]; again {
			continue
		}
		visited[hash] = struct{}{}
		for tier := range kvcastv1.Tier_name {
			b, ok := v.set(worker, rank, kvcastv1.Tier(tier))[hash]
			switch {
			case !ok || !b.HasParent:
			case b.Parent == from:
				return true
			default:
				next = append(next, b.Parent)
			}
		}
	}
	return false
}

func (c *Checker) snapshotEntries(entries []*kvcastv1.Entry) error {
	if err := c.checkOrder(entries); err != nil {
		return err
	}
	return c.apply(entries)
}

// snapshotEnd checks a SnapshotEnd, which completes the view.
func (c *Checker) snapshotEnd(msg *kvcastv1.SubscribeResponse) error {
	pos, q := msg.GetPosition(), msg.GetPosition().GetSeq()
	switch {
	case pos == nil:
		return broken(Protocol, "SnapshotEnd without a position")
	case !proto.Equal(pos, msg.GetSnapshotEnd().GetPosition()):
		return broken(Protocol, "SnapshotEnd at %v in a message at %v", msg.GetSnapshotEnd().GetPosition(), pos)
	case pos.GetEpoch() != c.epoch:
		return broken(Protocol, "SnapshotEnd of epoch %q in a snapshot of epoch %q", pos.GetEpoch(), c.epoch)
	case msg.GetPrevSeq() != q:
		return broken(GapFree, "SnapshotEnd at %d with prev_seq %d", q, msg.GetPrevSeq())
	case q < c.lastSeq:
		return broken(Snapshot, "it ends at %d, behind its entry %d", q, c.lastSeq)
	case q < c.snap.minEndSeq:
		return broken(Snapshot, "it ends at %d, behind position %d that it follows", q, c.snap.minEndSeq)
	}
	for _, name := range slices.Sorted(maps.Keys(c.workers)) {
		if c.workers[name].presence == presenceUnannounced {
			return broken(Snapshot, "worker %q is there at its end, but was neither announced nor added", name)
		}
	}
	c.state, c.stateFilter = stateComplete, c.req.GetFilter()
	c.fromStart, c.allWorkersSeen = q == 0, true
	c.head, c.streamStartSeq, c.snapshotSeq = q, q, q
	c.phase = phaseAccepted
	if c.call == callSnapshot {
		c.phase = phaseEnded
	}
	return nil
}
