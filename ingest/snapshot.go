package ingest

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

// errSnapshotUnwanted ends a snapshot that the machine does not want.
var errSnapshotUnwanted = errors.New("the rest is not wanted")

// requestSnapshot sends a request for a snapshot in a goroutine of its own.
func (p *publisher) requestSnapshot(r sequence.Request) {
	p.worker.log.Debug("requesting a snapshot", "source", p.source, "rank", p.rank, "cause", r.Cause.String())
	p.cancelReplay = p.worker.spawn(func(ctx context.Context) { p.snapshot(ctx, r) })
}

// snapshot sends a request for a snapshot, and passes it to the machine as it arrives. It is called without the worker's mutex.
func (p *publisher) snapshot(ctx context.Context, r sequence.Request) {
	w := p.worker
	locked := p.whileRead(ctx)
	var reader wire.SnapshotReader = new(wire.VLLMSnapshot)
	if p.status.Engine == feed.EngineSGLang {
		reader = &wire.SGLangSnapshot{Rank: p.rank}
	}
	q := transport.SnapshotRequest{
		Endpoint: r.Endpoint, Frames: reader.Request(), Worker: w.snapshots,
		Waited: func(d time.Duration) { locked(func() { p.machine.Waited(r.ID, d) }) },
		Sent:   func() { locked(func() { p.machine.Sent(r.ID) }) },
	}
	err := w.shared.replays.Snapshot(ctx, q, func(frame []byte, more bool) (done bool, err error) {
		part, err := reader.Next(frame, more)
		if err != nil {
			return false, err
		}
		wanted := true
		in := w.shared.intake(w)
		defer w.shared.recycle(in)
		switch part.Kind {
		case wire.SnapshotHeader:
			locked(func() {
				now := time.Now()
				var actions []sequence.Action
				header := sequence.Batch{Seq: part.Seq, Publisher: part.Publisher, Epoch: part.Epoch}
				actions, wanted = p.machine.SnapshotHeader(now, r.ID, &header)
				p.applyWith(in, now, actions)
			})
		case wire.SnapshotBatch, wire.SnapshotRecords:
			locked(func() {
				defer in.release()
				if part.Kind == wire.SnapshotBatch {
					in.arrive(sequence.Batch{Payload: part.Payload})
					in.load()
				} else {
					in.loadRecords(part.Payload)
				}
				now := time.Now()
				var actions []sequence.Action
				actions, wanted = p.machine.SnapshotBatch(now, r.ID, &in.arrival)
				p.applyWith(in, now, actions)
			})
		case wire.SnapshotNothing:
		}
		if !wanted {
			return false, errSnapshotUnwanted
		}
		return part.End, nil
	})
	locked(func() {
		now := time.Now()
		if err != nil {
			w.metrics.inc(snapshotsFailedTotal)
			if !errors.Is(err, errSnapshotUnwanted) { // the machine has said why
				p.warn("snapshot failed", "endpoint", r.Endpoint, "error", err)
			}
		}
		p.apply(now, p.machine.ReplayEnded(now, r.ID, outcomeOf(err)))
	})
}

// discard discards the blocks of the publisher, because a snapshot or a replay of all its batches follows.
func (p *publisher) discard(now time.Time, seq uint64) {
	p.forgetIncarnation()
	p.discardBlocks(now.UnixNano(), seq, true)
}

// abortRestore discards the blocks of a part of a snapshot, and reports the loss, with which the cursor is stored: if
// kvcast ends before that, a later run discards the part again.
func (p *publisher) abortRestore(in *intake, now time.Time, a *sequence.Action) {
	p.warn("snapshot not used: it ended early, and its blocks are discarded")
	p.discardBlocks(now.UnixNano(), 0, false)
	p.reportGap(in, now, a)
}

// endRestore records that a snapshot was used.
func (p *publisher) endRestore(now time.Time, a *sequence.Action) {
	p.recordSeq(a.Seq)
	p.worker.metrics.inc(snapshotsTotal)
	p.status.update(func(s *SourceStatus) { s.Snapshots++ })
	p.worker.log.Info("snapshot of the engine's cache used", "source", p.source, "rank", p.rank,
		"cause", a.Repair.Cause.String(), "snapshot_seq", a.Seq, "batches", a.Repair.Batches, "took", now.Sub(a.Repair.Began))
	if len(p.ranks) > 0 {
		p.worker.lane.Batch(&feed.Batch{
			Source: p.source, Rank: p.ranks[0], Seq: a.Seq, CopyRule: p.copyRule, IngestTime: now.UnixNano(), Progress: p.progress(true),
		})
	}
}

// discardBlocks clears the ranks of the publisher. store reports whether the calls of the lane store the cursor: those of
// BeginRestore and BeginReread make a later kvcast discard all blocks again.
func (p *publisher) discardBlocks(at int64, seq uint64, store bool) {
	for _, r := range p.ranks {
		p.rules.Reset(r)
		p.worker.lane.Batch(&feed.Batch{
			Source: p.source, Rank: r, Seq: seq, CopyRule: p.copyRule, IngestTime: at,
			Events:   []wire.Event{{Kind: wire.KindCleared}},
			Progress: p.progress(store),
		})
	}
}
