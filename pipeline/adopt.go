package pipeline

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
)

// errDropped is why the lane of a dropped worker fails.
var errDropped = errors.New("the worker was dropped")

// Adopt continues with the workers of a Recovery that has the pipeline's Config. Until a worker is added again, it stays in the stream;
// RemoveWorker removes it. The blocks count against the budgets, even beyond their limits. Workers whose state is lost are removed from the
// stream. Workers that the Recovery knows as removed continue their event ids when they are added. The Recovery must not be used any more.
//
// It returns an error, and has discarded the Recovery, if one of its workers has a lane already or Close was called.
func (p *Pipeline) Adopt(r *Recovery) error {
	lost, err := p.adopt(r)
	if err != nil {
		r.Discard()
		return fmt.Errorf("adopt recovered workers: %w", err)
	}
	for _, name := range lost {
		p.RemoveWorker(name, feed.RemovedDisconnected)
	}
	return nil
}

// adopt adds the lanes of a Recovery. It returns the workers whose state is lost.
func (p *Pipeline) adopt(r *Recovery) (lost []string, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errors.New("the pipeline is closed")
	}
	names := slices.Sorted(maps.Keys(r.workers))
	for _, name := range names {
		if p.lanes[name] != nil {
			return nil, fmt.Errorf("worker %q is in the pipeline already", name)
		}
	}
	p.adopted++
	p.removed.merge(&r.removed)
	p.obsolete = append(p.obsolete, r.obsolete...)
	appended := p.totals.appended.Load()
	for _, name := range names {
		w := r.workers[name]
		if w.lane == nil {
			w.lane = newLane(&r.cfg, feed.Worker{Name: name, Model: w.model})
			lost = append(lost, name)
		}
		p.removed.resume(name)
		p.resume(w, appended)
	}
	p.totals.appended.Add(r.appended)
	return lost, nil
}

// resume adds the lane of a recovered worker, and counts the children of the blocks of engines that announce blocks. appended is
// checkpointTotals.appended before the entries of the worker.
func (p *Pipeline) resume(w *recoveredWorker, appended int64) {
	l := w.lane
	l.lock() // others get to know it when its blocks of lower tiers are counted
	defer l.unlock()
	l.lastEventID = w.lastEventID
	p.attach(l)
	for rank, r := range l.ranks {
		l.resumeRank(rank, r)
	}
	for a := range l.announcements.All() {
		if r := l.ranks[a.GetDpRank()]; r != nil && r.tables[kvblock.TierDevice] != nil && l.consolidation != dedup {
			for !r.tables[kvblock.TierDevice].countChildren() {
			}
		}
	}
	l.counts = laneCounts{}
	l.entry.appended = journal.Acknowledged(w.seq)
	l.unclaimed = true
	if s := l.log; s != nil {
		s.first = w.changes
		s.rawIDs = slices.Clone(l.lastRawIDs)
		s.position.needed, s.position.size, s.position.at = w.needed, w.checkpoint, appended
		p.totals.stored.Add(w.checkpoint)
	}
	if w.needed.exists {
		seq, _ := acknowledged(w.needed.append)
		p.retainAfter = min(p.retainAfter, seq-1)
	}
	p.lanes[w.name] = l
}

// resumeRank reserves the blocks and attributes of a recovered rank in the lane's budgets.
func (l *Lane) resumeRank(rank uint32, r *rankState) {
	l.tableBlocks.Adjust(int64(r.blocks()))
	for tier, t := range &r.tables {
		if t != nil {
			l.countLower(kvblock.Tier(tier), t.blocks.table.Len())
			t.attrs.SetBudget(l.attributes)
		}
	}
	if tracker := l.tracker(rank); tracker != nil {
		tracker.SetEvict(l.reserveEvicting)
		l.log.recordTracker(tracker, rank)
	}
}

// continuePending emits the pending run of a recovered lane, or starts its timer, since the worker was added again.
func (l *Lane) continuePending() {
	switch {
	case l.pending.empty():
	case l.cfg.Timeout == 0 || l.room() <= 0:
		l.flushAlone(flushBatchEnd)
	default:
		l.startTimer()
	}
}

// SetEventIDFloor makes the event ids of a worker that has no lane follow id, or the id that the pipeline knows of the
// worker if that is larger. Drop forgets it.
func (p *Pipeline) SetEventIDFloor(name string, id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.removed.raise(removedWorker{name: strings.ToValidUTF8(name, "\uFFFD"), lastID: id, stored: true})
}

// Flush emits the pending events of a worker, closes its lane, and waits until its entries are acknowledged, so that another
// pipeline can continue with the worker. Later calls of the lane have no effect, and neither has RemoveWorker. Drop must
// follow, also after an error. When ctx is done, an append in progress is canceled, and fails. The error is that of a failed
// append or of ctx; it is nil if there is no such worker.
func (p *Pipeline) Flush(ctx context.Context, name string) error {
	l := p.lane(name)
	if l == nil {
		return nil
	}
	defer context.AfterFunc(ctx, func() { l.cancelAppends(errDropped) })()
	if err := l.close(); err != nil {
		return err
	}
	return l.awaitAcknowledged(ctx)
}

// Drop forgets a worker, since it is another pipeline's now. It emits nothing. Later calls of its lane have no effect, and an
// append in progress is canceled. Nothing is known of the worker afterwards, as if it had never been added.
func (p *Pipeline) Drop(name string) {
	name = strings.ToValidUTF8(name, "\uFFFD")
	p.mu.Lock()
	l := p.lanes[name]
	delete(p.lanes, name)
	p.removed.resume(name)
	p.obsolete = slices.DeleteFunc(p.obsolete, func(obsolete string) bool { return obsolete == name })
	p.mu.Unlock()
	if l == nil {
		return
	}
	l.cancelAppends(errDropped)
	l.lock()
	defer l.unlock()
	l.leave()
	l.fail(errDropped)
}
