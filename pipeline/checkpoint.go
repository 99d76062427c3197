package pipeline

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// RemovedWorkers is the name of the checkpoint that has the event ids of removed workers. No worker has that name.
const RemovedWorkers = ""

// Checkpoint is the state of a worker, or of the removed workers, from which Recovery.Checkpoint continues.
type Checkpoint struct {
	// Data is to be stored once Appended is acknowledged, in place of the last checkpoint of the same name. Then
	// Pipeline.CheckpointStored must be called.
	Data     []byte
	Appended journal.Pending

	lane     *Lane // nil: the removed workers
	position checkpointPosition
	removed  []removedWorker // those that no earlier checkpoint has
}

// checkpointPosition is the state of a lane's log at its checkpoints, and what was appended since.
type checkpointPosition struct {
	// made is the number of checkpoints. changes is the number of the lane's changes at the last of them, and offset the
	// size of those of them that wait.
	made, changes uint64
	offset        int
	// needed is the first entry after the last stored checkpoint, next the first after the last checkpoint.
	needed, next appendedEntry
	// totals are of all lanes. at is totals.appended at the last stored checkpoint, and size that checkpoint's.
	totals   *checkpointTotals
	at, size int64
}

// appendedEntry is an entry in the journal, or none.
type appendedEntry struct {
	append journal.Pending
	exists bool
}

// checkpointTotals are sums over all lanes.
type checkpointTotals struct {
	appended atomic.Int64 // bytes of entries
	stored   atomic.Int64 // bytes of the last stored checkpoints
}

const (
	// checkpointWaiting is the size of waiting changes after which a worker's next checkpoint is due.
	checkpointWaiting = 256 << 10
)

// entryAppended counts an appended entry of a size.
func (c *checkpointPosition) entryAppended(a journal.Pending, size int) {
	for _, first := range []*appendedEntry{&c.needed, &c.next} {
		if !first.exists {
			*first = appendedEntry{a, true}
		}
	}
	c.offset = 0
	c.totals.appended.Add(int64(size))
}

// due reports whether the lane has appended entries since its last stored checkpoint, and all lanes together enough bytes.
func (c *checkpointPosition) due(bytes int64) bool {
	return c.needed.exists && c.totals.appended.Load()-c.at >= max(bytes, c.totals.stored.Load())
}

// CheckpointDue returns the names of the checkpoints to make: of workers whose entries since their last checkpoint are
// old or whose state has changed much without an entry, and RemovedWorkers if workers were removed.
func (p *Pipeline) CheckpointDue() (names []string) {
	p.mu.Lock()
	lanes := maps.Clone(p.lanes)
	if p.cfg.Durable && !p.cfg.Shared && len(p.removed.needed()) > 0 {
		names = append(names, RemovedWorkers)
	}
	p.mu.Unlock()
	oldest := uint64(0)
	if p.cfg.Oldest != nil {
		oldest = p.cfg.Oldest()
	}
	for _, name := range slices.Sorted(maps.Keys(lanes)) {
		l := lanes[name]
		l.mu.Lock()
		if l.log != nil && l.end.failed == nil &&
			(l.log.position.due(p.cfg.CheckpointBytes) || len(l.log.changes) >= checkpointWaiting || l.log.position.isOlder(oldest)) {
			names = append(names, name)
		}
		l.mu.Unlock()
	}
	return names
}

// isOlder reports whether recovery needs an entry before a seq.
func (c *checkpointPosition) isOlder(seq uint64) bool {
	if seq <= 1 || !c.needed.exists {
		return false
	}
	needed, ok := acknowledged(c.needed.append)
	return ok && needed < seq
}

// Checkpoint returns the state of a worker, or of the removed workers, which ingest's state of the worker becomes part of. ingest must be
// its state after the last call of the worker's lane. The lane is locked for some 20 ns a block. ok is false if there is no such worker, if
// its state is lost after a failed append, or while a call of its lane is in progress, which may wait for an append.
func (p *Pipeline) Checkpoint(worker string, ingest []byte) (_ Checkpoint, ok bool) {
	if worker == RemovedWorkers && p.cfg.Durable && !p.cfg.Shared {
		return p.checkpointRemoved(), true
	}
	l := p.lane(worker)
	if l == nil || !l.turn.TryLock() {
		return Checkpoint{}, false
	}
	l.mu.Lock()
	defer l.unlock()
	if l.log == nil || l.end.failed != nil || l.end.behind || l.end.left {
		return Checkpoint{}, false
	}
	at := &l.log.position
	at.made++
	at.changes, at.offset, at.next = l.log.first+l.log.waiting, len(l.log.changes), appendedEntry{}
	c := Checkpoint{Data: l.checkpoint(ingest), Appended: l.entry.appended, lane: l, position: *at}
	c.position.at = at.totals.appended.Load()
	return c, true
}

// checkpointRemoved returns the checkpoint RemovedWorkers. It includes workers that were added again and of which no
// checkpoint is stored since: if their WorkerAdded gets lost, they are still removed.
func (p *Pipeline) checkpointRemoved() Checkpoint {
	p.mu.Lock()
	state, unstored := p.removed.state()
	lanes := maps.Clone(p.lanes)
	p.mu.Unlock()
	for _, l := range lanes {
		l.mu.Lock()
		if l.earlier != nil && l.earlier.isDurable() && l.log.position.size == 0 {
			state.Workers = append(state.Workers, l.earlier.state())
		}
		l.mu.Unlock()
	}
	data := appendState(nil, &statev1.Checkpoint{Version: stateVersion, RemovedWorkers: state})
	return Checkpoint{Data: data, removed: unstored}
}

// CheckpointStored reports that a checkpoint is stored. Recovery then needs neither the worker's earlier entries nor the
// changes that wait for its next entry.
func (p *Pipeline) CheckpointStored(c Checkpoint) {
	l := c.lane
	if l == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.retire(c.removed)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end.left {
		return
	}
	at := &l.log.position
	at.totals.stored.Add(int64(len(c.Data)) - at.size)
	at.at, at.size = c.position.at, int64(len(c.Data))
	if at.made != c.position.made {
		return // a later checkpoint was made: its position is not stored yet
	}
	at.needed = at.next
	if at.offset > 0 {
		l.log.dropWaiting(at.offset, at.changes-l.log.first)
	}
}

// retire makes the checkpoints of removed workers obsolete. The lock is held.
func (p *Pipeline) retire(removed []removedWorker) {
	p.removed.setStored(removed)
	for _, w := range removed {
		p.obsolete = append(p.obsolete, w.name)
	}
}

// ObsoleteCheckpoints returns the names of workers whose stored checkpoints are to be deleted, each once: the workers are
// removed, which the stored checkpoint RemovedWorkers includes. With Config.Shared, the entries that removed them are
// acknowledged, and RetainAfter retains these entries until this call.
func (p *Pipeline) ObsoleteCheckpoints() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.Shared && len(p.removed.needed()) > 0 {
		_, acknowledged := p.removed.state()
		p.retire(acknowledged)
	}
	names := slices.DeleteFunc(p.obsolete, func(name string) bool { return p.lanes[name] != nil })
	p.obsolete = nil
	return names
}

// RetainAfter returns the seq after which recovery needs the entries, given the newest seq of the journal. Only Adopt may decrease it.
func (p *Pipeline) RetainAfter(newest uint64) uint64 {
	p.mu.Lock()
	needed, lanes, adopted := p.removed.needed(), maps.Clone(p.lanes), p.adopted
	p.mu.Unlock()
	unknown := false
	for _, l := range lanes {
		l.mu.Lock()
		switch {
		case l.log == nil:
		case l.log.position.needed.exists:
			needed = append(needed, l.log.position.needed.append)
		case l.entry.appending: // recovery needs the entry, whose seq is not known
			unknown = true
		}
		l.mu.Unlock()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if unknown || p.adopted != adopted { // workers that were adopted meanwhile may need earlier entries
		return p.retainAfter
	}
	for _, a := range needed {
		seq, ok := acknowledged(a)
		if !ok {
			return p.retainAfter // the entry may be visible already
		}
		newest = min(newest, seq-1)
	}
	p.retainAfter = max(p.retainAfter, newest)
	return p.retainAfter
}

// acknowledged returns the seq of an append; ok is false if it is in flight or has failed.
func acknowledged(a journal.Pending) (seq uint64, ok bool) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 32 { // Wait chooses at random between a result and the end of the context
		if seq, err := a.Wait(ctx); err == nil {
			return seq, true
		}
	}
	return 0, false
}

// checkpoint returns the encoded kvcast.state.v1.Checkpoint of the lane.
func (l *Lane) checkpoint(ingest []byte) []byte {
	lane := &statev1.Lane{
		Worker: workerState(&l.desc), LastEventId: l.lastEventID, Changes: l.log.first + l.log.waiting, Ingest: ingest,
	}
	size := len(ingest) + 4096
	for _, rank := range slices.Sorted(maps.Keys(l.ranks)) {
		r := l.ranks[rank]
		state := &statev1.Rank{DpRank: rank, GroupsOmitted: r.groupsOmitted, Groups: r.groups}
		r.stateReported(state)
		if r.sources != nil {
			state.Sources = l.rankSourcesState(rank)
		}
		if tracker := l.tracker(rank); tracker != nil {
			state.Tracker = tracker.AppendState(nil)
			size += len(state.Tracker)
		}
		lane.Ranks = append(lane.Ranks, state)
		for _, t := range r.tables {
			if t != nil {
				size += tableBlockBytes*t.blocks.table.Len() + tableCopiesBytes*len(t.copies) + 4096
			}
		}
	}
	for source, id := range l.lastRawIDs {
		lane.RawEventIds = append(lane.RawEventIds, &statev1.RawEventId{Source: uint32(source), Id: id})
	}
	lane.Announcements = slices.Collect(l.announcements.All())
	if !l.pending.empty() {
		lane.Pending = l.pending.state()
	}
	b := appendState(make([]byte, 0, size), &statev1.Checkpoint{Version: stateVersion, Lane: lane})
	for _, r := range lane.Ranks {
		for tier, t := range l.ranks[r.DpRank].tables {
			if t != nil && t.blocks.table.Len() > 0 {
				b = t.appendState(b, r.DpRank, kvblock.Tier(tier))
			}
		}
		others := &l.ranks[r.DpRank].otherGroups
		for _, key := range others.Keys() {
			if g := others.Find(key); g.Len() > 0 {
				b = appendMessage(b, statev1.CheckpointTablesField, g.State(r.DpRank, key))
			}
		}
	}
	return b
}

const (
	// tableBlockBytes and tableCopiesBytes are the encoded sizes of a block in a table, and of its copies.
	tableBlockBytes  = 8 + 8 + 4
	tableCopiesBytes = 8 + 4 + 4

	// Bits of kvcast.state.v1.Table.block_info.
	infoParent    = 1 << 0
	infoStale     = 1 << 1
	infoAttrShift = 2
)

// appendState appends the table as field tables of a kvcast.state.v1.Checkpoint.
func (t *table) appendState(b []byte, rank uint32, tier kvblock.Tier) []byte {
	head := &statev1.Table{DpRank: rank, Tier: uint32(tier)}
	for id, set := range t.attrs.All() {
		head.Attributes = append(head.Attributes, &statev1.Attributes{Id: id, LoraName: set.LoRA, BlockSize: set.BlockSize})
	}
	encodedHead := appendState(nil, head)
	n, copied := t.blocks.table.Len(), len(t.copies)
	size := len(encodedHead)
	for _, array := range []int{8 * n, 8 * n, 4 * n, 8 * copied, 4 * copied, 4 * copied} {
		if array > 0 {
			size += encode.SizeLength(array)
		}
	}
	b = encode.AppendLength(b, statev1.CheckpointTablesField, size)
	b = append(b, encodedHead...)
	array := func(field protowire.Number, size int) (elements []byte) {
		b = encode.AppendLength(b, field, size)
		start := len(b)
		b = slices.Grow(b, size)[:start+size]
		return b[start:]
	}
	// The capacity of b is sufficient: it is not moved between two arrays.
	b = slices.Grow(b, size-len(encodedHead))
	hashes := array(statev1.TableBlockHashesField, 8*n)
	parents := array(statev1.TableParentHashesField, 8*n)
	infos := array(statev1.TableBlockInfoField, 4*n)
	i := 0
	for block := range t.blocks.table.All() {
		v := &block.Value
		info := v.attr << infoAttrShift
		parent := uint64(0)
		if v.flags&flagParent != 0 {
			info |= infoParent
			parent = v.parent
		}
		if t.blocks.isStale(block) {
			info |= infoStale
		}
		binary.LittleEndian.PutUint64(hashes[8*i:], block.Key())
		binary.LittleEndian.PutUint64(parents[8*i:], parent)
		binary.LittleEndian.PutUint32(infos[4*i:], info)
		i++
	}
	if copied == 0 {
		return b
	}
	hashes = array(statev1.TableCopiedHashesField, 8*copied)
	further := array(statev1.TableFurtherCopiesField, 4*copied)
	unsure := array(statev1.TableUnsureStoresField, 4*copied)
	i = 0
	for hash, c := range t.copies {
		binary.LittleEndian.PutUint64(hashes[8*i:], hash)
		binary.LittleEndian.PutUint32(further[4*i:], c.Further)
		binary.LittleEndian.PutUint32(unsure[4*i:], c.Unsure)
		i++
	}
	return b
}

// rankSourcesState returns the state of a rank's sources; without sources if the rank has none.
func (l *Lane) rankSourcesState(rank uint32) *statev1.RankSources {
	state := &statev1.RankSources{DpRank: rank}
	r := l.ranks[rank]
	if r == nil || r.sources == nil {
		return state
	}
	for source, incomplete := range r.sources.incomplete {
		if incomplete != 0 {
			state.Incomplete = append(state.Incomplete, uint32(source))
		}
		if r.sources.unproved[source] {
			state.Unproved = append(state.Unproved, uint32(source))
		}
	}
	state.Tiers, state.IncompleteTiers, state.UnseenTiers = tierBytes(r.sources.tiers), tierBytes(r.sources.incomplete), tierBytes(r.sources.unseen)
	return state
}

// tierBytes returns sets of tiers as they are stored: empty if all are.
func tierBytes(sets []kvblock.Tiers) (b []byte) {
	if !anyTiers(sets) {
		return nil
	}
	for _, tiers := range sets {
		b = append(b, byte(tiers))
	}
	return b
}

// state returns the state of a run that is not empty.
func (r *run) state() *statev1.Run {
	state := &statev1.Run{
		Removes: r.key.kind == wire.KindRemoved,
		DpRank:  r.key.rank, Tier: uint32(r.key.tier),
		LoraName: r.key.lora, CacheSalt: []byte(r.key.salt), BlockSize: r.key.blockSize,
		BlockHashes: r.hashes, TokensHashes: r.tokensHashes, TokenIds: r.tokens,
		EngineTimeUnixNano: r.engineTime, IngestTimeUnixNano: r.ingestTime,
	}
	if r.hasParent {
		state.ParentHash = &r.parent
	}
	if len(r.ops) > 0 {
		state.Ops = new(statev1.CopyOps)
		for n, op := range runsOf(r.ops) {
			state.Ops.Lengths = append(state.Ops.Lengths, uint32(n))
			state.Ops.Ops = append(state.Ops.Ops, uint32(op))
		}
	}
	return state
}

func workerState(w *feed.Worker) *statev1.Worker {
	state := &statev1.Worker{
		Name: w.Name, Model: w.Model, BlockSize: w.BlockSize, Endpoint: w.Endpoint, Labels: w.Labels, Ranks: w.Ranks,
		Consolidate: string(w.Consolidate), Pool: w.Pool, Pools: w.Pools,
	}
	for _, engine := range w.Sources {
		state.Sources = append(state.Sources, string(engine))
	}
	return state
}
