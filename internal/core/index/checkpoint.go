package index

import (
	"bytes"
	"context"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index/expected"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Checkpoint returns the state of a worker after the entry seq, for Restore; ok is false if the worker does not exist, or
// ctx ends. Some blocks may be of later entries, up to Seq. It holds up the index's writer like Snapshot.Blocks.
func (x *Index) Checkpoint(ctx context.Context, name string) (state *statev1.IndexWorker, seq uint64, ok bool) {
	s, state, ok := x.beginCheckpoint(name)
	if !ok {
		return nil, 0, false
	}
	for piece := range s.Blocks(ctx, kvblock.AllEvents) {
		state.Blocks = append(state.Blocks, bytes.Clone(piece))
		s.Reuse(piece)
	}
	return state, s.Seq, ctx.Err() == nil
}

func (x *Index) beginCheckpoint(name string) (s Snapshot, state *statev1.IndexWorker, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.workers[name]
	if w == nil {
		return Snapshot{}, nil, false
	}
	state = &statev1.IndexWorker{Worker: w.record(), LastSeq: w.lastSeq, Added: w.added}
	for _, r := range w.ranks {
		state.Ranks = append(state.Ranks, &statev1.IndexRank{DpRank: r.number, UsedTiers: uint32(r.usedTiers), LastGap: r.lastGap})
	}
	return Snapshot{Seq: x.seq, Worker: state.GetWorker(), TokenIDs: true, index: x}, state, true
}

// Restore adds a worker from a checkpoint. An error means that the checkpoint is damaged; part of the
// worker may then be added, which Forget removes.
func (x *Index) Restore(state *statev1.IndexWorker) error {
	x.ApplySnapshotWorker(state.GetWorker())
	for i, b := range state.GetBlocks() {
		if err := x.restoreBlocks(state.GetWorker().GetWorker(), b); err != nil {
			return fmt.Errorf("blocks %d of %d: %w", i+1, len(state.GetBlocks()), err)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.worker(state.GetWorker().GetWorker(), "")
	w.lastSeq, w.added = state.GetLastSeq(), state.GetAdded()
	for _, r := range state.GetRanks() {
		to := x.rank(w, r.GetDpRank())
		to.usedTiers, to.lastGap = uint8(r.GetUsedTiers()), r.GetLastGap()
	}
	return nil
}

// restoreBlocks is ApplySnapshotBlocks for encoded blocks, which must be those of a worker.
func (x *Index) restoreBlocks(name string, b []byte) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.applyQueue() // after an error
	var w *worker
	size := uint32(0)
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err != nil {
			return err
		}
		b = rest
		switch {
		case f.Type != protowire.BytesType:
			return fmt.Errorf("field %d is not an event", f.Number)
		case f.Number == kvcastv1.SnapshotBlocksWorkerField:
			if string(f.Bytes) != name {
				return fmt.Errorf("blocks of another worker, %q", f.Bytes)
			}
			w = x.workers[name]
			size = w.blockSize
		case w == nil:
			return fmt.Errorf("no worker before field %d", f.Number)
		case f.Number == kvcastv1.SnapshotBlocksEventsField:
			if w, err = x.applyEncodedEvent(w, f.Bytes); err != nil {
				return err
			}
		}
	}
	x.applyQueue()
	if w != nil && size != 0 {
		x.setBlockSize(w, size)
	}
	x.blocks.Sweep()
	return nil
}

// ApplyBody applies the entry of a seq, encoded without the seq, as in journal.Record.
func (x *Index) ApplyBody(seq uint64, body []byte) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.applyQueue()
	if _, err := x.applyEncodedEntry(seq, body); err != nil {
		return fmt.Errorf("entry %d: %w", seq, err)
	}
	return nil
}

// Advance makes a seq the last entry applied, if it is larger. The state after the entry must be that of the index, as
// when the entry is of a worker that was restored from a later checkpoint.
func (x *Index) Advance(seq uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.seq = max(x.seq, seq)
}

// Forget removes a worker, if it exists, without an entry.
func (x *Index) Forget(name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if w := x.workers[name]; w != nil {
		x.removeWorker(w)
	}
}

// Reset makes the index empty.
func (x *Index) Reset() {
	x.mu.Lock()
	defer x.mu.Unlock()
	empty := New()
	empty.RetainTokenIDs(x.blocks.TokenIDLimit())
	if x.KeepsBlockHashes() {
		empty.KeepBlockHashes()
	}
	x.blocks, x.workers, x.byName, x.models, x.numPools = empty.blocks, empty.workers, nil, empty.models, 0
	x.seq, x.learners, x.decoder = 0, 0, decoder{}
	x.order.Store(nil)
	x.expected.change(func(*expected.Set[*rank]) { x.expected.set = empty.expected.set })
	x.learnAdopted()
}
