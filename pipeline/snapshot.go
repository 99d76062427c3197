package pipeline

import (
	"context"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Cut is what a worker held at one entry, or nearly: some blocks are as they
// were at a later one. Whoever applies the worker's entries after Seq has its
// state exactly, since applying an event twice changes nothing.
type Cut struct {
	// Seq is that of the last entry that all of the cut includes.
	Seq uint64
	// Worker is its record at Seq.
	Worker *kvcastv1.SnapshotWorker
	// Blocks yields what it holds as encoded kvcast.v1.SnapshotBlocks, of some
	// 64 KiB each, a parent before its children where it is held. The memory is
	// the caller's, see Reuse. It takes the worker's lane for short turns while it
	// is read, and ends early when the context does. A table is copied while it is
	// read; where others are, so that there is no room, it waits for theirs, and
	// yields nothing (nil) each second so that the reader knows. It ends with an error
	// where the blocks are not all there: the worker's entries could not be appended.
	Blocks iter.Seq2[[]byte, error]
	// Reuse takes the memory of a piece back, for pieces to come; nil where nobody
	// does. Who keeps a piece does not call it.
	Reuse func(piece []byte)
}

// Workers returns the names of the workers that a filter takes, in order.
func (p *Pipeline) Workers(match func(worker, model string) bool) []string {
	var names []string
	for _, l := range p.matching(match) {
		names = append(names, l.worker)
	}
	return names
}

// Cut begins to read what a worker holds in the tiers given. ok is false where
// there is no such worker, or no longer.
func (p *Pipeline) Cut(ctx context.Context, worker string, tiers journal.Tiers) (c Cut, ok bool, err error) {
	p.mu.Lock()
	l := p.lanes[worker]
	p.mu.Unlock()
	if l == nil {
		return Cut{}, false, nil
	}
	l.mu.Lock()
	if l.gone {
		l.mu.Unlock()
		return Cut{}, false, nil
	}
	appended, err := l.entry.appended, l.failed
	record := l.record()
	ranks := slices.Sorted(maps.Keys(l.ranks))
	l.mu.Unlock()
	if err != nil {
		return Cut{}, false, err
	}
	seq, err := l.wait(ctx, appended)
	if err != nil {
		return Cut{}, false, err
	}
	return Cut{Seq: seq, Worker: record, Reuse: reusePiece, Blocks: func(yield func([]byte, error) bool) {
		for _, rank := range ranks {
			for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
				if tiers&journal.TierBit(uint8(tier)) == 0 {
					continue
				}
				if !p.tellTable(ctx, l, place{rank, tier}, func(piece []byte) bool { return yield(piece, nil) }) {
					return
				}
			}
		}
		if err := l.acknowledged(ctx); err != nil {
			yield(nil, err)
		}
	}}, true, nil
}

// tellTable yields what a table holds, from a copy that it has room for.
func (p *Pipeline) tellTable(ctx context.Context, l *Lane, at place, yield func([]byte) bool) bool {
	slots, attrs := l.tableSize(at)
	if slots == 0 {
		return true
	}
	bytes := copyBytes(slots, attrs)
	if !p.copies.take(ctx, bytes, func() bool { return yield(nil) }) {
		return false
	}
	defer p.copies.give(bytes)
	table := l.copyTable(ctx, at, slots, attrs)
	defer table.free()
	return ctx.Err() == nil && table.encode(l.worker, eventHead{rank: at.rank, tier: at.tier}, yield)
}

// tableSize is what is copied of a table: how many slots it has, and how many
// attributes.
func (l *Lane) tableSize(at place) (slots, attrs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.table(at)
	if t == nil {
		return 0, 0
	}
	for s := range t.blocks.table.Segments() {
		slots += len(s.Slots)
	}
	return slots, len(t.attrs.slots)
}

// record is the worker's record as it is now.
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

// rankNames returns the ranks that were configured or heard of, in order.
func (l *Lane) rankNames() []uint32 {
	names := slices.AppendSeq(slices.Clone(l.added.GetRanks()), maps.Keys(l.ranks))
	slices.Sort(names)
	return slices.Compact(names)
}

// maxCopies bounds the memory of copies of tables that are being read, all together;
// a copy of a table that is larger by itself is made alone. A million blocks take
// some 50 MB.
const maxCopies = 64 << 20

// limiter gives out bytes, up to a limit, in the order in which they are asked for:
// a large request is not overtaken for ever by small ones. Whoever asks waits, so
// many as there are snapshots being sent.
type limiter struct {
	limit int

	mu      sync.Mutex // guards all below
	given   int
	waiting []*ask
}

type ask struct {
	bytes   int
	granted chan struct{}
}

// fits tells whether so many bytes can be given now.
func (l *limiter) fits(bytes int) bool { return l.given == 0 || l.given+bytes <= l.limit }

// waitBeat is how often whoever waits for bytes is told that it does.
const waitBeat = time.Second

// take waits for so many bytes, until ctx is done, or until waiting, which it calls
// each waitBeat, returns false. Where it returns true, give has to give them back.
func (l *limiter) take(ctx context.Context, bytes int, waiting func() bool) bool {
	l.mu.Lock()
	if len(l.waiting) == 0 && l.fits(bytes) {
		l.given += bytes
		l.mu.Unlock()
		return true
	}
	a := &ask{bytes: bytes, granted: make(chan struct{})}
	l.waiting = append(l.waiting, a)
	l.mu.Unlock()
	beats := time.NewTicker(waitBeat)
	defer beats.Stop()
	for wanted := true; wanted; {
		select {
		case <-a.granted:
			return true
		case <-beats.C:
			wanted = waiting()
		case <-ctx.Done():
			wanted = false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, a)
	if i < 0 {
		return true // it was granted just now
	}
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.grant() // what is behind it may fit
	return false
}

// give gives bytes back.
func (l *limiter) give(bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given -= bytes
	l.grant()
}

func (l *limiter) grant() {
	for len(l.waiting) > 0 && l.fits(l.waiting[0].bytes) {
		l.given += l.waiting[0].bytes
		close(l.waiting[0].granted)
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
}
