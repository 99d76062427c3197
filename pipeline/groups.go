package pipeline

import (
	"fmt"
	"math"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	"github.com/kvcast/kvcast/pipeline/internal/groups"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Blocks of attention groups other than the main group are in events of their own, which are not merged with those of other batches. They
// are never evicted: a rank that is full refuses further ones.

// describeGroups emits the groups of a rank if they have changed.
func (l *Lane) describeGroups(b *feed.Batch) {
	r := l.rank(b.Rank)
	if b.Groups == nil || b.Groups == r.groups || proto.Equal(b.Groups, r.groups) {
		return
	}
	l.flush(flushUnmergeable)
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(b.Rank), Event: &kvcastv1.RouterEvent_Groups{Groups: b.Groups}})
}

// applyGroup applies an event of another attention group than the main group.
func (l *Lane) applyGroup(b *feed.Batch, e *wire.Event) {
	if len(e.BlockHashes) == 0 {
		return
	}
	key := groups.Key{Group: e.Group, Tier: e.Tier}
	if e.Kind == wire.KindStored {
		l.storeGroup(b, key, e.BlockHashes, l.rank(b.Rank).otherGroups.Judge(b, e, l.root, l.announcements.Announces(b.Rank, b.Source)))
		return
	}
	l.removeGroup(b, key, e)
}

// storeGroup stores blocks of a group, as many as fit into the rank, and emits those that have a further copy.
func (l *Lane) storeGroup(b *feed.Batch, key groups.Key, hashes []uint64, as groups.Judgement) {
	r := l.rank(b.Rank)
	g := r.otherGroups.Blocks(key)
	g.Prefetch(hashes)
	room := l.cfg.MaxBlocksPerRank - r.blocks()
	var refused [consolidate.NumRefusals]int
	stored := l.groupHashes[:0]
	for _, hash := range hashes {
		exists := g.Has(hash)
		switch {
		case exists && as.Op == copies.AddNothing, !exists && as.IgnoresNew:
			continue
		case exists:
		case room <= 0:
			refused[consolidate.RefusedRank]++
			continue
		case !l.tableBlocks.Reserve(1):
			refused[consolidate.RefusedTotal]++
			continue
		default:
			room--
			if as.SuspectsNew {
				r.otherGroups.Suspect(key, hash)
			}
		}
		g.Store(hash, as.Op)
		stored = append(stored, hash)
	}
	l.groupHashes = keepHashes(stored)
	l.emitGroup(b.Rank, key, kvcastv1.RouterEventGroupStoredField, stored, as.Op)
	if as.SuspectsNew && r.otherGroups.HasSuspects() && l.announcements.Seen(b.Rank, b.Source) {
		l.doubt(b, feed.Doubt{Reason: feed.GapCopiesUnsure, Tiers: 1 << key.Tier, Detail: "a store of another attention group may be an announcement"})
	}
	for why, n := range refused {
		l.reportRefused(r, b.Rank, 1<<key.Tier, consolidate.Refusal(why), n)
	}
}

// removeGroup removes the blocks of an event from a group, and emits those that are gone.
func (l *Lane) removeGroup(b *feed.Batch, key groups.Key, e *wire.Event) {
	r := l.rank(b.Rank)
	g := r.otherGroups.Blocks(key)
	g.Prefetch(e.BlockHashes)
	before := g.Len()
	gone := l.groupHashes[:0]
	logged := runKey{rank: b.Rank, tier: key.Tier, group: key.Group}
	detected := copies.Remove
	if l.announcements.Announces(b.Rank, b.Source) {
		detected = copies.RemoveCopy
	}
	for i, hash := range e.BlockHashes {
		if op := copies.RemoveOp(b.CopyRule, e, i, detected); g.Remove(hash, op) {
			gone = append(gone, hash)
		} else {
			l.log.suppress(&logged, l.entry.events, op, hash)
		}
	}
	l.log.endSuppressed(&logged, l.entry.events)
	l.groupHashes = keepHashes(gone)
	l.tableBlocks.Release(int64(before - g.Len()))
	l.counts.removesSuppressed += uint64(len(e.BlockHashes) - len(gone))
	l.emitGroup(b.Rank, key, kvcastv1.RouterEventGroupRemovedField, gone, 0)
}

// removeParts removes the parts of blocks that a remove of the main group names, and returns the event without them. Their hashes are not
// those of blocks.
func (l *Lane) removeParts(b *feed.Batch, e *wire.Event) *wire.Event {
	if !e.HasGroupIdx || e.GroupIdx < 0 || e.GroupIdx >= math.MaxUint8 {
		return e
	}
	key := groups.Key{Group: uint8(e.GroupIdx) + 1, Tier: e.Tier}
	g := l.rank(b.Rank).otherGroups.Find(key)
	if g.Len() == 0 || !slices.ContainsFunc(e.BlockHashes, g.Has) {
		return e
	}
	parts, rest := selectBlocks(e, g.Has), selectBlocks(e, func(hash uint64) bool { return !g.Has(hash) })
	l.removeGroup(b, key, &parts)
	return &rest
}

// selectBlocks returns a remove of the selected blocks of a remove.
func selectBlocks(e *wire.Event, selected func(hash uint64) bool) wire.Event {
	part := *e
	part.BlockHashes = nil
	var copiesLeft []uint32
	for i, hash := range e.BlockHashes {
		if !selected(hash) {
			continue
		}
		part.BlockHashes = append(part.BlockHashes, hash)
		if e.Rare != nil && i < len(e.Rare.RemainingCopies) {
			copiesLeft = append(copiesLeft, e.Rare.RemainingCopies[i])
		}
	}
	if copiesLeft != nil {
		rare := *e.Rare
		rare.RemainingCopies = copiesLeft
		part.Rare = &rare
	}
	return part
}

// keepHashes returns the memory of hashes that is kept for the next event.
func keepHashes(hashes []uint64) []uint64 {
	if cap(hashes) > maxIdleTokens {
		return nil
	}
	return hashes
}

// emitGroup adds events for blocks of a group, if there are any. op is the effect of stores on blocks that exist.
func (l *Lane) emitGroup(rank uint32, key groups.Key, kind protowire.Number, hashes []uint64, op copies.Op) {
	for part := range slices.Chunk(hashes, l.cfg.MaxBlocks) {
		event := encode.AppendGroup(l.entry.buf, kvcastv1.EntryEventsField, l.head(rank, key.Tier), kind, uint32(key.Group)-1, part)
		l.entry.added(event, 1<<key.Tier)
		if kind == kvcastv1.RouterEventGroupStoredField {
			l.rank(rank).used |= 1 << key.Tier
			l.log.storeOp(l.entry.events-1, op, len(part))
		}
		l.counts.events[kind]++
	}
}

// group applies an encoded GroupStored or GroupRemoved.
func (a *application) group(r *rankState, tier kvblock.Tier, kind protowire.Number, b []byte) error {
	group, hashes, err := encode.GroupBlocks(b, a.hashes[:0])
	if err != nil {
		return fmt.Errorf("decode blocks of an attention group: %w", err)
	}
	a.hashes = hashes
	key, err := groups.KeyOf(uint32(min(group, math.MaxUint8))+1, tier)
	if err != nil {
		return err
	}
	ops, err := restoreOps(a.ops, len(a.hashes))
	if err != nil {
		return err
	}
	a.ops = nil
	g := r.otherGroups.Blocks(key)
	g.Prefetch(a.hashes)
	for i, hash := range a.hashes {
		if kind == kvcastv1.RouterEventGroupStoredField {
			op := copies.Add
			if ops != nil {
				op = ops[i]
			}
			g.Store(hash, op)
		} else {
			g.Remove(hash, copies.RemoveAll)
		}
	}
	return nil
}

// judgeRoot returns the effect of a store of the main group without a parent on blocks that exist, in a rank with several groups.
func (l *Lane) judgeRoot(b *feed.Batch, e *wire.Event) copies.Op {
	held := l.engineBlocks.HasAll(e)
	l.root = groups.RootOf(e, held)
	if !held {
		return copies.AddUnsure
	}
	switch l.rank(b.Rank).otherGroups.SiblingsOf(e, b.Events[l.eventIndex+1:], b.Groups) {
	case groups.SiblingsOfCopies:
		return copies.Add
	case groups.SiblingsAnnounce:
		l.announcements.SetAnnounces(b.Rank, b.Source)
		return copies.AddNothing
	default:
		return copies.AddUnsure
	}
}

// takeBack removes the suspects of a rank: its engine has been found to announce blocks, so that its groups may never have held them.
func (l *Lane) takeBack(rank uint32) {
	r := l.rank(rank)
	for _, s := range r.otherGroups.TakeSuspects() {
		g := r.otherGroups.Find(s.Key)
		switch {
		case !g.Has(s.Hash): // removed since
		case g.Remove(s.Hash, copies.RemoveCopy):
			l.tableBlocks.Release(1)
			l.emitGroup(rank, s.Key, kvcastv1.RouterEventGroupRemovedField, []uint64{s.Hash}, 0)
		default:
			key := runKey{rank: rank, tier: s.Key.Tier, group: s.Key.Group}
			l.log.suppress(&key, l.entry.events, copies.RemoveCopy, s.Hash)
			l.log.endSuppressed(&key, l.entry.events)
		}
	}
}
