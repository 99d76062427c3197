package ingest

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

// apply executes actions that follow from another input than a message.
func (p *publisher) apply(now time.Time, actions []sequence.Action) {
	in := p.worker.shared.intake(p.worker)
	defer p.worker.shared.recycle(in)
	defer in.release()
	p.applyWith(in, now, actions)
}

// applyWith executes actions, and updates the status and the timer. It decodes batches in the intake.
func (p *publisher) applyWith(in *intake, now time.Time, actions []sequence.Action) {
	for i := range actions {
		p.execute(in, now, &actions[i])
	}
	p.updateStatus()
	p.schedule(now)
}

func (p *publisher) execute(in *intake, now time.Time, a *sequence.Action) {
	w := p.worker
	if w.shared.config.Durable {
		p.cursor.Apply(a)
	}
	switch a.Kind {
	case sequence.Deliver:
		p.deliver(in, a.Batch)
	case sequence.ReportGap:
		p.reportGap(in, now, a)
	case sequence.ReportBegin:
		p.reportBegin(now, a)
	case sequence.ReportRestart:
		p.reportRestart(now, a)
	case sequence.ReportProved:
		p.reportProved(now, a.Seq)
	case sequence.ReportForeign:
		p.reportForeign(in, now, a)
	case sequence.ReportConflict:
		w.metrics.inc(conflictsTotal)
		p.warn("two publishers use the same topic and rank: their batches cannot be distinguished")
	case sequence.ReportSilent:
		p.warn("connection is silent, and the engine does not reply")
	case sequence.ReportAbsent:
		w.log.Warn("source has had no connection for the grace time; other sources of the worker are connected",
			"source", p.source, "rank", p.rank, "grace", w.shared.config.Grace)
	case sequence.AttemptConnection:
		p.attempt(func() {
			now := time.Now()
			p.apply(now, p.machine.AttemptFailed(now, w.connected()))
		})
	case sequence.RequestReplay:
		p.requestReplay(*a.Request)
	case sequence.RequestSnapshot:
		p.requestSnapshot(*a.Request)
	case sequence.CancelReplay:
		p.endReplay()
	case sequence.BeginReread:
		p.warn("lost batches can be replayed: everything is read again", "first_seq", a.Seq)
		p.discard(now, a.Seq)
	case sequence.BeginRestore:
		p.discard(now, a.Seq)
	case sequence.EndRestore:
		p.endRestore(now, a)
	case sequence.AbortRestore:
		p.abortRestore(in, now, a)
	case sequence.RejectSnapshot:
		p.warn("snapshot not used: it has no batch after the last one read", "snapshot_seq", a.Seq)
	case sequence.SnapshotFailed:
		p.warn("no snapshot: batches that no replay brings are reported as lost")
	case sequence.Reconnect:
		p.warn("reconnecting: the connection is silent")
		p.reconnect(false)
	case sequence.OpenReplacement:
		p.reconnect(true)
	case sequence.RepairStarted:
		w.metrics.incLabeled(replaysTotal, a.Repair.Cause.String())
	case sequence.RepairDone:
		w.metrics.inc(replaysDoneTotal)
		p.tooLong = nil
		p.endRepair(nil)
		if r := a.Repair; r.Batches > 0 {
			p.status.update(func(s *SourceStatus) { s.Repairs++ })
			p.observeRepair(now, a, true)
			w.log.Info("replay done", "source", p.source, "rank", p.rank, "cause", r.Cause.String(),
				"batches", r.Batches, "requests", r.Requests, "took", now.Sub(r.Began))
		}
	case sequence.RepairFailed:
		w.metrics.inc(replaysFailedTotal)
		p.endRepair(p.replayErr)
		p.observeRepair(now, a, false)
	case sequence.RepairHole:
		w.log.Info("replay has a hole, requesting it again", "source", p.source, "rank", p.rank,
			"last_seq", a.Seq, "batches", a.Repair.Batches)
	case sequence.Reject:
		in.decode(a.Batch)
		if errors.Is(in.err, transport.ErrTooLong) {
			p.tooLong = in.err
		}
		w.reject(in, "source", p.source, "rank", p.rank, "seq", a.Batch.Seq)
	case sequence.DropDuplicate:
		w.metrics.inc(duplicatesTotal)
	case sequence.DropStale:
		w.metrics.inc(staleTotal)
	case sequence.DropOverflow:
		w.metrics.inc(reorderDropsTotal)
	}
}

// observeRepair notifies the observer that a repair has ended.
func (p *publisher) observeRepair(now time.Time, a *sequence.Action, complete bool) {
	if o := p.worker.shared.config.Observer; o != nil {
		r := a.Repair
		o.RepairEnded(feed.RepairEnd{
			Worker: p.worker.desc.Name, Rank: p.rank, Cause: r.Cause.String(), Batches: r.Batches, Took: now.Sub(r.Began), Complete: complete,
		})
	}
}

func (p *publisher) endRepair(err error) {
	if p.repairEnded != nil {
		p.repairEnded(err)
	}
}

// deliver passes a batch to the lane. A malformed batch was reported as lost.
func (p *publisher) deliver(in *intake, b *sequence.Batch) {
	if !b.Restored {
		defer p.recordSeq(b.Seq) // after the batch has been passed on: readers take it for applied
	}
	if b.Replayed && !b.Restored {
		p.worker.metrics.inc(replayedTotal)
	}
	if b.Malformed {
		return
	}
	now := b.ReceivedAt
	in.decode(b)
	rank := p.rankOf(in)
	if !p.addRank(now, rank) {
		p.rules.SkipRaw(1)
		p.worker.refuse(refusedRanks)
		return
	}
	p.rules.Admit(in.batch, rank, &in.counts)
	p.worker.metrics.batch(in.batch.Events, &in.counts)
	in.out = feed.Batch{
		Source:        p.source,
		Rank:          rank,
		Seq:           b.Seq,
		CopyRule:      p.copyRule,
		IngestTime:    now.UnixNano(),
		Events:        in.batch.Events,
		GroupsOmitted: in.batch.GroupsOmitted,
		Groups:        in.batch.Groups,
		Doubts:        p.doubts(in, rank, b.Seq),
		LastRawID:     p.rules.RawID(),
		Progress:      p.progress(true),
	}
	if b.Restored {
		in.out.CopyRule = feed.CopyRuleCounted // a snapshot announces nothing
	}
	if b.Unproved {
		in.out.Doubts = append(in.out.Doubts, feed.Doubt{Reason: feed.GapReplayUnproved, Tiers: kvblock.AllTiers})
	}
	if in.batch.HasTime && !b.Restored {
		in.out.EngineTime = unixNano(in.batch.Time)
	}
	if in.batch.HasTime && !b.Replayed { // a replayed batch is as old as it is
		delay := now.Sub(time.Unix(0, in.out.EngineTime)) // saturates
		p.status.update(func(s *SourceStatus) { s.EngineDelay, s.HasEngineDelay = delay, true })
	}
	p.worker.lane.Batch(&in.out)
	if slices.ContainsFunc(in.batch.Events, func(ev wire.Event) bool { return ev.Kind == wire.KindCleared }) && p.mixed(rank) {
		p.reportMixed(now, rank, true)
	}
	in.out.Events = nil // the decoder reuses their memory
	in.decoded = nil    // Admit has changed the decoded batch
}

// recordSeq updates the last seq in the status and the metrics.
func (p *publisher) recordSeq(seq uint64) {
	p.status.update(func(s *SourceStatus) { s.LastSeq, s.Started = seq, true })
}

// reportGap reports a gap for each rank of the publisher, because each may have lost the batches.
func (p *publisher) reportGap(in *intake, now time.Time, a *sequence.Action) {
	if len(p.ranks) == 0 {
		rank := p.rank
		if a.Batch != nil {
			in.decode(a.Batch)
			rank = p.rankOf(in)
		}
		p.addRank(now, rank)
	}
	p.incomplete = true
	p.rules.SkipRaw(a.Missed)
	p.worker.metrics.inc(gapsTotal)
	p.worker.metrics.add(missedTotal, a.Missed)
	args := []any{"reason", a.Reason.String(), "missed", a.Missed, "first_seq", a.First, "last_seq", a.Last}
	detail := ""
	if p.tooLong != nil {
		args = append(args, "cause", p.tooLong)
		detail = p.tooLong.Error()
	}
	if a.Reason == feed.GapReplayForeign {
		detail = p.machine.ReplayEndpoint()
	}
	if a.Missed > 0 {
		p.tooLong = nil
	}
	p.warn("batches lost", args...)
	for i, r := range p.ranks {
		p.worker.lane.Gap(feed.Gap{
			Progress:  p.progress(i == len(p.ranks)-1),
			Source:    p.source,
			Rank:      r,
			Reason:    a.Reason,
			FirstSeq:  a.First,
			LastSeq:   a.Last,
			Missed:    a.Missed,
			LastRawID: p.rules.RawID(),
			Detail:    detail,
			At:        now.UnixNano(),
		})
	}
}

// reportProved reports that the replay socket is the publisher's, after batches that it had replayed before that was known.
func (p *publisher) reportProved(now time.Time, seq uint64) {
	for i, r := range p.ranks {
		p.worker.lane.Batch(&feed.Batch{
			Source: p.source, Rank: r, Seq: seq, CopyRule: p.copyRule, IngestTime: now.UnixNano(), Proved: true,
			Progress: p.progress(i == len(p.ranks)-1),
		})
	}
}

// reportForeign discards what a replay socket of another engine has replayed.
func (p *publisher) reportForeign(in *intake, now time.Time, a *sequence.Action) {
	p.warn("replay socket belongs to another engine: its batches differ from those that this one publishes", "replay", p.machine.ReplayEndpoint(),
		"hint", "give each worker the replay endpoint of its own engine; the socket is asked again in a minute")
	p.worker.blockSize.Forget()
	p.discardBlocks(now.UnixNano(), 0, false)
	p.forgetIncarnation()
	p.reportGap(in, now, a)
}

// reportBegin reports the first batch read of an incarnation. If earlier batches were published before
// first contact, the ranks joined late.
func (p *publisher) reportBegin(now time.Time, a *sequence.Action) {
	p.incomplete = a.Missed > 0
	args := []any{"source", p.source, "rank", p.rank, "seq", a.Seq, "incomplete", p.incomplete}
	switch {
	case !p.incomplete:
	case a.Seq == feed.EngineLLMDSim.FirstSeq() && p.namesPod:
		args = append(args, "hint", "the engine's first batch, 0, was not received; if it is an llm-d simulator, whose first is 1, set engine to llm-d-sim")
	case p.machine.ReplayEndpoint() == "":
		args = append(args, "hint", "batches before this one were not received, and there is no replay socket")
	default:
		args = append(args, "hint", "batches before this one were neither received nor replayed")
	}
	p.worker.log.Info("first batch read", args...)
	if !p.incomplete || !a.FirstContact {
		return
	}
	p.before.first, p.before.last = a.First, a.Last
	for _, r := range p.ranks {
		p.reportJoinedLate(now, r)
	}
}

// reportRestart reports that the engine restarted.
func (p *publisher) reportRestart(now time.Time, a *sequence.Action) {
	switch a.Evidence {
	case sequence.EvidenceBatch:
		p.warn("engine restarted", "seq", a.Seq)
	case sequence.EvidenceReplay:
		p.warn("engine restarted: its replay has other batches", "seq", a.Seq)
	case sequence.EvidenceConflict:
	}
	p.worker.blockSize.Forget() // the engine may have another configuration
	p.worker.metrics.inc(restartsTotal)
	p.status.update(func(s *SourceStatus) { s.Restarts++ })
	p.forgetIncarnation()
	for i, r := range p.ranks {
		p.rules.Reset(r)
		p.worker.lane.Restarted(feed.Restart{
			Source: p.source, Rank: r, At: now.UnixNano(), Progress: p.progress(i == len(p.ranks)-1),
		})
		if p.sharesRank(r) {
			p.reportMixed(now, r, i == len(p.ranks)-1)
		}
	}
}

// unixNano converts seconds to nanoseconds. It returns 0 if they do not fit into an int64.
func unixNano(seconds float64) int64 {
	whole, fraction := math.Modf(seconds)
	if math.Abs(whole) >= math.MaxInt64/1e9-1 {
		return 0
	}
	return int64(whole)*1e9 + int64(math.Round(fraction*1e9))
}
