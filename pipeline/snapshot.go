package pipeline

import (
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Snapshot is the state of a worker's ranks after one entry. Some blocks may be of later entries. The
// state is exact after applying the entries after Seq, since events may be applied twice.
type Snapshot struct {
	// Seq is the seq of the last entry that the snapshot includes completely.
	Seq uint64
	// Worker is the worker's record at Seq.
	Worker *kvcastv1.SnapshotWorker
	// Blocks yields encoded kvcast.v1.SnapshotBlocks of some 64 KiB each, parents before their
	// children. The caller owns the memory, and may return it with Reuse. Blocks locks the
	// worker's lane for short times, and copies one table at a time. While it waits for the
	// memory of a copy, it yields nil each second. It ends early when the context is done, and
	// with an error if an append of the worker failed.
	Blocks iter.Seq2[[]byte, error]
	// Reuse takes back the memory of a yielded piece; calling it is optional.
	Reuse func(piece []byte)
}

// Workers returns the names of the workers that match selects, sorted.
func (p *Pipeline) Workers(match func(worker, model string) bool) []string {
	var names []string
	for _, l := range p.matching(match) {
		names = append(names, l.worker)
	}
	return names
}

// Snapshot begins a snapshot of a worker in some tiers. ok is false if there is no such worker.
func (p *Pipeline) Snapshot(ctx context.Context, worker string, tiers journal.Tiers) (s Snapshot, ok bool, err error) {
	p.mu.Lock()
	l := p.lanes[worker]
	p.mu.Unlock()
	if l == nil {
		return Snapshot{}, false, nil
	}
	l.mu.Lock()
	if l.gone {
		l.mu.Unlock()
		return Snapshot{}, false, nil
	}
	appended, err := l.entry.appended, l.failed
	record := l.record()
	ranks := slices.Sorted(maps.Keys(l.ranks))
	l.mu.Unlock()
	if err != nil {
		return Snapshot{}, false, err
	}
	seq, err := l.wait(ctx, appended)
	if err != nil {
		return Snapshot{}, false, err
	}
	return Snapshot{Seq: seq, Worker: record, Reuse: reusePiece, Blocks: func(yield func([]byte, error) bool) {
		for _, rank := range ranks {
			for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
				if tiers&journal.TierBit(uint8(tier)) == 0 {
					continue
				}
				if !p.encodeTable(ctx, l, place{rank, tier}, func(piece []byte) bool { return yield(piece, nil) }) {
					return
				}
			}
		}
		if err := l.awaitAcknowledged(ctx); err != nil {
			yield(nil, err)
		}
	}}, true, nil
}

// encodeTable yields a table's blocks from a copy, and reports whether to continue.
func (p *Pipeline) encodeTable(ctx context.Context, l *Lane, at place, yield func([]byte) bool) bool {
	slots, attrs := l.tableSize(at)
	if slots == 0 {
		return true
	}
	bytes := copyBytes(slots, attrs)
	if !p.acquireCopy(ctx, bytes, func() bool { return yield(nil) }) {
		return false
	}
	defer p.releaseCopy(bytes)
	table := l.copyTable(ctx, at, slots, attrs)
	defer table.free()
	return ctx.Err() == nil && table.encode(l.worker, eventHead{rank: at.rank, tier: at.tier}, yield)
}

// tableSize returns the numbers of blocks and attributes of a table to copy.
func (l *Lane) tableSize(at place) (blocks, attrs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.table(at)
	if t == nil {
		return 0, 0
	}
	return t.blocks.len(), t.attrs.Slots()
}

// record returns the worker's current record.
func (l *Lane) record() *kvcastv1.SnapshotWorker {
	added := proto.CloneOf(l.added)
	added.Ranks, added.BlockSize = l.rankNames(), l.blockSize
	r := &kvcastv1.SnapshotWorker{Worker: l.worker, Added: added, LastEventId: l.lastEventID}
	for _, rank := range added.GetRanks() {
		if s := l.ranks[rank]; s != nil && s.incomplete {
			r.IncompleteRanks = append(r.IncompleteRanks, rank)
		}
	}
	return r
}

// rankNames returns the ranks that were configured or had an event, sorted.
func (l *Lane) rankNames() []uint32 {
	names := slices.AppendSeq(slices.Clone(l.added.GetRanks()), maps.Keys(l.ranks))
	slices.Sort(names)
	return slices.Compact(names)
}

// maxCopyBytes bounds the memory of all copies of tables together; a larger table is copied while no
// other copy exists. A million blocks are 32 MB.
const maxCopyBytes = 64 << 20

// waitInterval is the interval at which a waiting snapshot yields nil.
const waitInterval = time.Second

// acquireCopy waits for the memory of a copy, which releaseCopy releases. It calls waiting every
// waitInterval. It returns false if waiting does, or when ctx is done.
func (p *Pipeline) acquireCopy(ctx context.Context, bytes int, waiting func() bool) bool {
	n := int64(min(bytes, maxCopyBytes))
	if p.copies.TryAcquire(n) {
		return true
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	acquired := make(chan error, 1)
	go func() { acquired <- p.copies.Acquire(ctx, n) }()
	ticker := time.NewTicker(waitInterval)
	defer ticker.Stop()
	for {
		select {
		case err := <-acquired:
			return err == nil
		case <-ticker.C:
		}
		if !waiting() {
			cancel()
			if err := <-acquired; err == nil {
				p.copies.Release(n)
			}
			return false
		}
	}
}

func (p *Pipeline) releaseCopy(bytes int) { p.copies.Release(int64(min(bytes, maxCopyBytes))) }
