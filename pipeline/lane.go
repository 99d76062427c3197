package pipeline

import (
	"context"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	"github.com/kvcast/kvcast/pipeline/internal/groups"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Lane is one worker's part of the pipeline. It has no goroutine of its own: ingest calls it, and the timer of a pending run does.
type Lane struct {
	worker        string
	cfg           Config
	limits        limits
	consolidation consolidation
	sourceNames   []string // by source
	// tableBlocks is the budget of the tables' blocks; nil for dedup, where trackers reserve the blocks of tables too.
	tableBlocks *budget.Budget
	attributes  *budget.Budget // of the tables' attributes
	// peer is the address whose parts of the budgets the lane uses, until closeBudgets.
	peer         netip.Addr
	closeBudgets func()
	failures     chan<- error // see Pipeline.Failed
	// cancelAppends ends an append that blocks, and makes later ones fail.
	cancelAppends context.CancelCauseFunc
	// holders has the lane after it had blocks in lower tiers. lower is their number; it changes under the lock.
	holders *holders
	lower   atomic.Int64
	membership

	// turn is held during a call of the lane. An append of the call may wait for as long as the journal does not answer, so
	// only what may wait as long locks turn: lock does. It is locked before the pipeline's lock.
	turn sync.Mutex
	// mu guards the fields below. It is not held while an append waits: whoever locks mu alone reads the state after an event
	// of a call, and must not change what calls use. Nobody locks the mu of two lanes.
	mu         sync.Mutex
	end        laneEnd
	ranks      map[uint32]*rankState
	recent     *rankState // that rank has returned last; nil: none
	lastRawIDs []uint64   // by source index
	pending    run
	prefetched bool        // prefetch loaded the blocks of the current batch
	timer      *time.Timer // flushes the pending run after Config.Timeout; nil if there is none
	laneOutput
	judge
	isHolder    bool     // holders has the lane
	groupHashes []uint64 // reused
}

// membership is a lane's worker as the pipeline has it.
type membership struct {
	// desc is the worker as it was added. unclaimed reports whether it was recovered and not added since. Both are
	// guarded by the pipeline's lock and change only before the lane is used.
	desc      feed.Worker
	unclaimed bool
	// earlier is the removed worker of the same name; nil if it is not known.
	earlier *removedWorker
}

// laneEnd is why a lane takes no calls any more.
type laneEnd struct {
	closed bool  // no further events are emitted
	behind bool  // a call was ignored, since the lane was closed
	failed error // of a failed append, after which the state is discarded
	fenced bool  // it failed, which Config.Fenced reports
	left   bool  // the worker was removed or dropped
}

// laneOutput is what a lane emits, logs and counts.
type laneOutput struct {
	lastEventID uint64
	entry       entry
	log         *stateLog // nil if the journal is not durable
	counts      laneCounts
	// event is reused by emitChanges.
	event wire.Event
}

// judge has what the effects of stores and removes on the copies of blocks follow from.
type judge struct {
	announcements copies.Detector
	engineBlocks  engineBlocks
	// eventIndex is that of the current event in its batch, and root the last store of the main group without a parent before it.
	eventIndex int
	root       groups.Root
}

// rankState is the state of one dp rank: an engine with its own cache.
type rankState struct {
	number uint32
	tables [kvblock.TierEnd]*table
	// reported are the reasons of the Gaps that were emitted since the tier was cleared: bit n is reason n. used are the
	// tiers that blocks were stored in since all were cleared. They follow from the emitted events.
	reported [kvblock.TierEnd]gapReasons
	used     kvblock.Tiers
	// unseen are the tiers below device memory that were in doubt and that the engine had not used when it cleared its device memory, which ended the
	// doubts. If it uses one later, the tier may have older blocks. They follow from the emitted events. With several sources, each has its own.
	unseen kvblock.Tiers
	// chunkTokens is that of the last Gap that has some, since the lane was made.
	chunkTokens uint32
	// groupsOmitted reports whether GroupsOmitted was emitted and still holds. Only emit sets it.
	groupsOmitted bool
	// groups are those of the last Groups that was emitted and still holds; nil: none. Only emit sets them.
	groups *kvcastv1.Groups
	// otherGroups has the blocks of attention groups other than the main group.
	otherGroups groups.Rank
	// sources is nil for a worker with one source.
	sources *rankSources
	evicted *evicted // nil: none
}

var _ feed.Lane = (*Lane)(nil)

// lock locks the lane for a call, which may append.
func (l *Lane) lock() {
	l.turn.Lock()
	l.mu.Lock()
}

func (l *Lane) unlock() {
	l.mu.Unlock()
	l.turn.Unlock()
}

// Batch applies a batch of a source. Its events become one entry.
func (l *Lane) Batch(b *feed.Batch) {
	l.lock()
	defer l.unlock()
	if l.end.closed {
		l.end.behind = true
		return
	}
	l.entry.begin(b.EngineTime, b.IngestTime)
	l.log.progress(&b.Progress)
	l.announcements.BeginBatch()
	l.root = groups.Root{}
	l.prefetch(b)
	if b.GroupsOmitted || b.Groups != nil {
		l.omitGroups(b.Rank)
		l.describeGroups(b)
	}
	for i := range b.Events {
		e := &b.Events[i]
		l.eventIndex = i
		l.countRawID(b.Source, e.RawID)
		if e.ReplacesBlockSize {
			l.replaceBlockSize(e.BlockSize)
		}
		if e.Tier > kvblock.TierDevice && e.Kind != wire.KindCleared && l.isUnseen(b, e.Tier) {
			l.doubtNotCleared(b, 1<<e.Tier)
		}
		switch {
		case e.Group != 0:
			l.applyGroup(b, e)
		case e.Kind == wire.KindStored && 0 < len(e.TokensHashes) && len(e.TokensHashes) < len(e.BlockHashes):
			known, rest := splitByContent(e)
			l.applyStore(b, &known)
			l.applyStore(b, &rest)
		case e.Kind == wire.KindStored:
			l.applyStore(b, e)
		case l.consolidation != oneSource:
			l.consolidate(b, e)
		case e.Kind == wire.KindRemoved:
			l.remove(b, l.removeParts(b, e))
		case e.Kind == wire.KindCleared:
			l.flush(flushUnmergeable)
			l.clearEvent(b, e)
		}
	}
	l.reachRawID(b.Source, b.LastRawID)
	l.deferFlush()
	if b.Proved {
		l.resolveUnproved(b)
	}
	if b.CopyRule == feed.CopyRuleDetected && l.announcements.Announces(b.Rank, b.Source) {
		l.doubt(b, feed.Doubt{Reason: feed.GapCopiesUnsure, Tiers: 1 << kvblock.TierDevice})
	}
	l.reportDoubts(b)
	l.payOwed()
	l.prefetched = false
	l.commit()
}

// applyStore applies a store whose blocks all have tokens hashes, or none.
func (l *Lane) applyStore(b *feed.Batch, e *wire.Event) {
	if e.HashesOnly {
		l.doubtUnknown(b, e)
	}
	if e.Inputs == wire.InputsNotSent && l.consolidation == dedup {
		e = l.named(b, e)
	} else if e.Inputs == wire.InputsNotSent && l.doubtCopies(b, e) {
		l.storeWithoutContent(b, e, "a store lacks the salts or images that its blocks have")
		return
	}
	if l.consolidation != oneSource {
		l.consolidate(b, e)
	} else {
		l.store(b, e)
	}
}

// splitByContent splits a store into the blocks with known content and the others.
func splitByContent(e *wire.Event) (known, rest wire.Event) {
	n, size := len(e.TokensHashes), int(e.BlockSize)
	known, rest = *e, *e
	known.BlockHashes, rest.BlockHashes = e.BlockHashes[:n], e.BlockHashes[n:]
	known.Tokens, rest.Tokens = e.Tokens[:min(len(e.Tokens), n*size)], nil
	rest.TokensHashes = nil
	rest.Parent, rest.HasParent = e.BlockHashes[n-1], true
	return known, rest
}

// maxPrefetch is the number of blocks up to which a batch is prefetched as a whole. So many entries and slots fit into a first-level cache.
const maxPrefetch = 128

// prefetch loads what is needed to find a batch's blocks, so that the cache misses of all its events
// overlap. If it does nothing, flush prefetches each run: the tables have other hashes than the batch if
// there are several sources, and with a timeout, the run may be flushed much later.
func (l *Lane) prefetch(b *feed.Batch) {
	r, n := l.findRank(b.Rank), 0
	for i := range b.Events {
		n += len(b.Events[i].BlockHashes)
	}
	if r == nil || n < 2 || n > maxPrefetch || l.consolidation != oneSource || l.cfg.Timeout > 0 {
		return
	}
	for i := range b.Events {
		e := &b.Events[i]
		if t := r.tables[e.Tier]; t != nil {
			t.blocks.table.Prefetch(e.BlockHashes)
		}
	}
	l.prefetched = true
}

// Gap emits that batches are missing. The rank is then incomplete, and each block has one copy, since removes of other copies may have been
// lost. With OnGapClear, or when generations are exhausted, it clears the rank's blocks instead. The rank is incomplete then too, since the
// engine may have blocks. OnGapClear does not apply to a late join, at which no block can be stale.
func (l *Lane) Gap(g feed.Gap) {
	l.lock()
	defer l.unlock()
	if l.flushAlone(flushUnmergeable); l.end.closed {
		l.end.behind = true
		return
	}
	l.entry.begin(0, g.At)
	l.log.progress(&g.Progress)
	l.reachRawID(g.Source, g.LastRawID)
	r := l.rank(g.Rank)
	reportAlways := g.Reason == feed.GapJoinedLate || g.Reason == feed.GapReplayForeign // there is no stale block
	if l.cfg.OnGap == OnGapClear && !reportAlways || !l.beginGap(g.Rank, r, g.Source) {
		l.clear(g.Rank, kvcastv1.Cleared_REASON_UNREPAIRED_GAP)
		l.markIncomplete(g.Rank, r, allSources)
	} else {
		l.markIncomplete(g.Rank, r, g.Source)
		l.emit(&kvcastv1.RouterEvent{DpRank: &g.Rank, Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{
			Reason:        kvcastv1.Gap_Reason(g.Reason),
			MissedBatches: g.Missed,
			FirstSeq:      g.FirstSeq,
			LastSeq:       g.LastSeq,
			Detail:        detailOf(g.Detail),
		}}})
	}
	l.counts.gaps++
	l.counts.missedBatches = add(l.counts.missedBatches, g.Missed)
	l.commit()
}

// Restarted emits that the engine restarted with an empty cache.
func (l *Lane) Restarted(r feed.Restart) {
	l.lock()
	defer l.unlock()
	if l.flushAlone(flushUnmergeable); l.end.closed {
		l.end.behind = true
		return
	}
	l.entry.begin(0, r.At)
	l.log.progress(&r.Progress)
	if l.consolidation == oneSource {
		l.clear(r.Rank, kvcastv1.Cleared_REASON_ENGINE_RESTARTED)
	} else {
		b := feed.Batch{Source: r.Source, Rank: r.Rank, IngestTime: r.At}
		l.clearSource(&b, l.rank(r.Rank), kvcastv1.Cleared_REASON_ENGINE_RESTARTED, 0)
		l.flush(flushUnmergeable)
	}
	l.commit()
}

// countRawID counts the ids missing between a source's previous raw event id and that of an event.
func (l *Lane) countRawID(source int, id uint64) {
	if id > 0 {
		l.reachRawID(source, id-1)
	}
	last := l.lastRawID(source)
	*last = max(*last, id)
}

// reachRawID counts the ids missing after a source's previous raw event id, up to this id.
func (l *Lane) reachRawID(source int, id uint64) {
	if last := l.lastRawID(source); id > *last {
		l.counts.rawEventHoles = add(l.counts.rawEventHoles, id-*last)
		*last = id
	}
}

// lastRawID returns a source's previous raw event id.
func (l *Lane) lastRawID(source int) *uint64 {
	for len(l.lastRawIDs) <= source {
		l.lastRawIDs = append(l.lastRawIDs, 0)
	}
	return &l.lastRawIDs[source]
}

// add adds to a counter, which saturates: engines choose the ids, so that n can be any number.
func add(counter, n uint64) uint64 {
	if counter > math.MaxUint64-n {
		return math.MaxUint64
	}
	return counter + n
}

// store appends a store to the pending run, and emits the run if it is full.
func (l *Lane) store(b *feed.Batch, e *wire.Event) {
	n := len(e.BlockHashes)
	if n == 0 {
		return
	}
	blockTokens := int(e.BlockSize)
	key := runKey{
		kind: wire.KindStored, rank: b.Rank, tier: e.Tier,
		lora: e.LoRAName, salt: e.CacheSalt, blockSize: e.BlockSize,
		hashed: len(e.TokensHashes) == n,
		tokens: l.cfg.EmitTokenIDs && blockTokens > 0 && blockTokens <= l.limits.runTokens && len(e.Tokens) >= n*blockTokens,
	}
	if l.cfg.EmitSessionIDs && e.Rare != nil {
		key.note = noteOf(e.Rare.Note)
	}
	l.flushIncompatible(&key)
	// Some engines write 0 for the parent of a first block.
	hasParent := e.HasParent && (e.Parent != 0 || l.known(b.Rank, 0))
	if key.hashed && l.contradicts(b, e, hasParent) {
		l.storeWithoutContent(b, e, "a store says of a block that device memory holds that it has another parent")
		return
	}
	if !l.pending.empty() && (!hasParent || e.Parent != l.pending.last()) {
		l.flush(flushParent)
	}
	op := copies.Add
	if l.consolidation != dedup {
		op = l.storeOp(b, e, !hasParent)
	}
	l.extendRun(b, &key, e, hasParent, op)
}

// maxNote bounds session ids and reasons in events, in bytes.
const maxNote = 256

// noteOf returns a text if it is short enough to be emitted, and else nothing.
func noteOf(text string) string {
	if len(text) > maxNote {
		return ""
	}
	return text
}

// remove applies a remove, and below device memory the removes of the blocks of the chunks that it names.
func (l *Lane) remove(b *feed.Batch, e *wire.Event) {
	note := ""
	if l.cfg.EmitReasons && e.Rare != nil {
		note = noteOf(e.Rare.Note)
	}
	l.removeBlocks(b, e, note)
	if e.Tier <= kvblock.TierDevice || l.consolidation == dedup {
		return
	}
	t := l.rank(b.Rank).tables[e.Tier]
	// The blocks may stay in the table until the run is flushed, so that those of this event are listed: each is removed once.
	var listed map[uint64]struct{}
	for i, hash := range e.BlockHashes {
		part := wire.PartBefore(hash)
		if !t.has(part) {
			continue
		}
		if listed == nil {
			listed = make(map[uint64]struct{}, len(e.BlockHashes))
			for _, named := range e.BlockHashes {
				listed[named] = struct{}{}
			}
		}
		key, op := runKey{kind: wire.KindRemoved, rank: b.Rank, tier: e.Tier, note: note}, copies.RemoveOp(b.CopyRule, e, i, copies.Remove)
		for ; t.has(part); part = wire.PartBefore(part) {
			if _, twice := listed[part]; twice {
				break
			}
			listed[part] = struct{}{}
			l.flushIncompatible(&key)
			l.extendRun(b, &key, &wire.Event{BlockHashes: []uint64{part}}, false, op)
		}
	}
}

// removeBlocks appends a remove to the pending run, and emits the run if it is full.
func (l *Lane) removeBlocks(b *feed.Batch, e *wire.Event, note string) {
	if len(e.BlockHashes) == 0 {
		return
	}
	key := runKey{kind: wire.KindRemoved, rank: b.Rank, tier: e.Tier, note: note}
	l.flushIncompatible(&key)
	if l.consolidation == dedup {
		l.extendRun(b, &key, e, false, copies.Remove)
		return
	}
	detected := l.removeOp(b, e)
	if e.Rare == nil {
		l.extendRun(b, &key, e, false, copies.RemoveOp(b.CopyRule, e, 0, detected))
		return
	}
	for i := range e.BlockHashes { // the operations may differ
		one := wire.Event{BlockHashes: e.BlockHashes[i : i+1]}
		l.extendRun(b, &key, &one, false, copies.RemoveOp(b.CopyRule, e, i, detected))
	}
}

// extendRun appends an event's blocks to the pending run, which has that key or is empty. It
// emits the run whenever it is full, so that a pending run has room for a block.
func (l *Lane) extendRun(b *feed.Batch, key *runKey, e *wire.Event, hasParent bool, op copies.Op) {
	r, parent, size := &l.pending, e.Parent, int(key.blockSize)
	for i, n := 0, len(e.BlockHashes); i < n; {
		if r.empty() {
			r.key, r.parent, r.hasParent = *key, parent, hasParent
		}
		end := min(n, i+l.room())
		r.inputs = r.inputs || e.Inputs == wire.InputsSent
		r.appendOps(op, end-i)
		r.hashes = append(r.hashes, e.BlockHashes[i:end]...)
		if key.hashed {
			r.tokensHashes = append(r.tokensHashes, e.TokensHashes[i:end]...)
		}
		if key.tokens {
			r.tokens = append(r.tokens, e.Tokens[i*size:end*size]...)
		}
		i, parent, hasParent = end, r.last(), true
		if l.room() == 0 {
			l.flush(flushMaxBlocks)
		}
	}
	r.engineTime, r.ingestTime = b.EngineTime, b.IngestTime
}

// room returns how many more blocks may join the pending run.
func (l *Lane) room() int {
	room := l.cfg.MaxBlocks - len(l.pending.hashes)
	if l.pending.key.tokens {
		room = min(room, (l.limits.runTokens-len(l.pending.tokens))/int(l.pending.key.blockSize))
	}
	return room
}

// storeOp returns the effect of a store on blocks that exist, and lets the detector of
// announcements examine the store. No run may be pending if the store is rooted.
func (l *Lane) storeOp(b *feed.Batch, e *wire.Event, rooted bool) copies.Op {
	if copies.Detects(b.CopyRule, e) {
		l.engineBlocks = engineBlocks{l, b}
		lower := l.usesLowerTiers(b.Rank)
		if lower {
			l.countChildren(b, e.Tier) // the detector asks for them
		}
		if l.announcements.Store(b.Rank, b.Source, e, rooted, lower, &l.engineBlocks) {
			l.countChildren(b, e.Tier)
		}
	}
	op := copies.StoreOp(b.CopyRule, e, rooted)
	if op == copies.AddUnsure && b.Groups != nil {
		op = l.judgeRoot(b, e)
	}
	if l.rank(b.Rank).otherGroups.HasSuspects() && l.announcements.Announces(b.Rank, b.Source) {
		l.takeBack(b.Rank)
	}
	return op
}

// removeOp returns the effect of a remove, unless the event or the source's rule says otherwise.
func (l *Lane) removeOp(b *feed.Batch, e *wire.Event) copies.Op {
	switch {
	case !copies.Detects(b.CopyRule, e) || !l.announcements.Announces(b.Rank, b.Source):
		return copies.Remove
	case l.usesLowerTiers(b.Rank) && !l.announcements.Branches(b.Rank, b.Source):
		return copies.RemoveCopy
	case l.countChildren(b, e.Tier):
		return copies.RemoveAnnounced
	default:
		return copies.Remove
	}
}

// usesLowerTiers reports whether blocks of a rank have been stored in tiers below device memory. Trackers do not tell tiers apart.
func (l *Lane) usesLowerTiers(rank uint32) bool {
	return l.consolidation != dedup && l.rank(rank).used&kvblock.LowerTiers != 0
}

// engineBlocks are the blocks of the engine that a batch is from.
type engineBlocks struct {
	lane  *Lane
	batch *feed.Batch
}

var _ copies.Blocks = (*engineBlocks)(nil)

func (s *engineBlocks) HasAll(e *wire.Event) bool {
	t, tr := s.lane.rank(s.batch.Rank).tables[e.Tier], s.lane.tracker(s.batch.Rank)
	for _, hash := range e.BlockHashes {
		if tr != nil && !tr.Has(s.batch.Source, hash) || tr == nil && !t.has(hash) {
			return false
		}
	}
	return true
}

func (s *engineBlocks) LowerHasAll(e *wire.Event) bool {
	lower := s.lane.rank(s.batch.Rank).tables[kvblock.TierDevice+1:]
	for _, hash := range e.BlockHashes {
		if !slices.ContainsFunc(lower, func(t *table) bool { return t.has(hash) }) {
			return false
		}
	}
	return true
}

func (s *engineBlocks) HasChild(block uint64) bool {
	t := s.lane.rank(s.batch.Rank).tables[kvblock.TierDevice]
	if t == nil || !t.children.complete {
		return false
	}
	b := t.blocks.table.Find(block)
	return b != nil && b.Value.flags&flagChildren != 0
}

// countChildren starts or continues counting the children of a source's blocks, and reports whether all are counted.
func (l *Lane) countChildren(b *feed.Batch, tier kvblock.Tier) bool {
	if tr := l.tracker(b.Rank); tr != nil {
		return tr.CountChildren(b.Source)
	}
	return l.newTable(l.rank(b.Rank), tier).countChildren()
}

// flushIncompatible emits the pending run unless it has the same key.
func (l *Lane) flushIncompatible(key *runKey) {
	if l.pending.empty() {
		return
	}
	if why, differs := l.pending.key.differs(key); differs {
		l.flush(why)
	}
}

// deferFlush lets the next batch extend the pending run, for up to Config.Timeout. If the timeout is 0, it emits the run.
func (l *Lane) deferFlush() {
	switch {
	case l.cfg.Timeout == 0:
		l.flush(flushBatchEnd)
	case !l.pending.empty() && l.timer == nil:
		l.pending.cloneStrings()
		l.startTimer()
	}
}

// startTimer starts the timer of the pending run.
func (l *Lane) startTimer() {
	var timer *time.Timer
	timer = time.AfterFunc(l.cfg.Timeout, func() {
		l.lock()
		defer l.unlock()
		if l.timer == timer { // else the run was flushed while this function waited for the lock
			l.flushAlone(flushTimeout)
		}
	})
	l.timer = timer
}
