package pipeline

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Of attention groups other than the main group, a lane keeps the hashes of blocks and the number of their copies: a physical
// block belongs to one group, so that copies are counted for each tier and group. Their events are not merged with those of other
// batches. They are never evicted: a rank that is full refuses further ones.

// groupKey identifies the blocks of an attention group in a tier.
type groupKey struct {
	// group is one more than the engine's number, as in wire.Event.
	group uint8
	tier  kvblock.Tier
}

// groupBlocks are the blocks of an attention group in a tier, by hash.
type groupBlocks struct {
	table      hashtable.Table[groupBlock]
	generation uint8 // the number of gaps
}

// groupBlock is a block's copies.Count, as of a generation: after the next gap, it has one copy.
type groupBlock struct {
	further            uint16
	unsure, generation uint8
}

func (g *groupBlocks) count(b groupBlock) copies.Count {
	if b.generation != g.generation {
		return copies.Count{}
	}
	return copies.Count{Further: uint32(b.further), Unsure: uint32(b.unsure)}
}

func (g *groupBlocks) block(c copies.Count) groupBlock {
	return groupBlock{uint16(min(c.Further, math.MaxUint16)), uint8(min(c.Unsure, math.MaxUint8)), g.generation}
}

// store stores a block. op is the effect if the block exists.
func (g *groupBlocks) store(hash uint64, op copies.Op) {
	b, existed := g.table.Put(hash)
	c := copies.Count{}
	if existed {
		c = g.count(b.Value)
		c.Stored(op)
	}
	b.Value = g.block(c)
}

// remove applies a remove of a block, and reports whether to emit it, as table.remove does.
func (g *groupBlocks) remove(hash uint64, op copies.Op) (gone bool) {
	b := g.table.Find(hash)
	if b == nil {
		return op <= copies.RemoveDownTo || op == copies.RemoveCopy
	}
	c := g.count(b.Value)
	if c.Removed(op, false) {
		g.table.Delete(b)
		return true
	}
	b.Value = g.block(c)
	return false
}

func (g *groupBlocks) has(hash uint64) bool { return g.table.Find(hash) != nil }

// gap leaves one copy of each block.
func (g *groupBlocks) gap() {
	if g.generation++; g.generation == 0 { // blocks may be of an earlier generation 0
		for b := range g.table.All() {
			b.Value = groupBlock{}
		}
	}
}

// groupBlocks returns the blocks of a group, and creates them if necessary.
func (r *rankState) groupBlocks(key groupKey) *groupBlocks {
	g := r.groupTables[key]
	if g == nil {
		if r.groupTables == nil {
			r.groupTables = make(map[groupKey]*groupBlocks)
		}
		g = &groupBlocks{table: hashtable.New[groupBlock]()}
		r.groupTables[key] = g
	}
	return g
}

// numGroupBlocks returns the number of blocks of all groups but the main group.
func (r *rankState) numGroupBlocks() (n int) {
	for _, g := range r.groupTables {
		n += g.table.Len()
	}
	return n
}

// hasGroupBlocks reports whether a group other than the main group has blocks in a tier.
func (r *rankState) hasGroupBlocks(tier kvblock.Tier) bool {
	for key, g := range r.groupTables {
		if key.tier == tier && g.table.Len() > 0 {
			return true
		}
	}
	return false
}

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
	key := groupKey{e.Group, e.Tier}
	if e.Kind == wire.KindStored {
		l.storeGroup(b, key, e.BlockHashes, l.judgeGroup(b, e))
		return
	}
	l.removeGroup(b, key, e)
}

// storeGroup stores blocks of a group, as many as fit into the rank, and emits those that have a further copy.
func (l *Lane) storeGroup(b *feed.Batch, key groupKey, hashes []uint64, as judgement) {
	r := l.rank(b.Rank)
	g := r.groupBlocks(key)
	g.table.Prefetch(hashes)
	room := l.cfg.MaxBlocksPerRank - r.blocks()
	var refused [consolidate.NumRefusals]int
	stored := l.groupHashes[:0]
	for _, hash := range hashes {
		exists := g.has(hash)
		switch {
		case exists && as.op == copies.AddNothing, !exists && as.ignoresNew:
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
			if as.suspectsNew {
				l.suspect(r, key, hash)
			}
		}
		g.store(hash, as.op)
		stored = append(stored, hash)
	}
	l.groupHashes = keepHashes(stored)
	l.emitGroup(b.Rank, key, kvcastv1.RouterEventGroupStoredField, stored, as.op)
	if as.suspectsNew && len(r.suspects) > 0 && l.announcements.Seen(b.Rank, b.Source) {
		l.doubt(b, feed.Doubt{Reason: feed.GapCopiesUnsure, Tiers: 1 << key.tier, Detail: "a store of another attention group may be an announcement"})
	}
	for why, n := range refused {
		l.reportRefused(r, b.Rank, 1<<key.tier, consolidate.Refusal(why), n)
	}
}

// removeGroup removes the blocks of an event from a group, and emits those that are gone.
func (l *Lane) removeGroup(b *feed.Batch, key groupKey, e *wire.Event) {
	r := l.rank(b.Rank)
	g := r.groupBlocks(key)
	g.table.Prefetch(e.BlockHashes)
	before := g.table.Len()
	gone := l.groupHashes[:0]
	logged := runKey{rank: b.Rank, tier: key.tier, group: key.group}
	detected := copies.Remove
	if l.announcements.Announces(b.Rank, b.Source) {
		detected = copies.RemoveCopy
	}
	for i, hash := range e.BlockHashes {
		if op := copies.RemoveOp(b.CopyRule, e, i, detected); g.remove(hash, op) {
			gone = append(gone, hash)
		} else {
			l.log.suppress(&logged, l.entry.events, op, hash)
		}
	}
	l.log.endSuppressed(&logged, l.entry.events)
	l.groupHashes = keepHashes(gone)
	l.tableBlocks.Release(int64(before - g.table.Len()))
	l.counts.removesSuppressed += uint64(len(e.BlockHashes) - len(gone))
	l.emitGroup(b.Rank, key, kvcastv1.RouterEventGroupRemovedField, gone, 0)
}

// removeParts removes the parts of blocks that a remove of the main group names, and returns the event without them. Their hashes are not
// those of blocks.
func (l *Lane) removeParts(b *feed.Batch, e *wire.Event) *wire.Event {
	if l.rank(b.Rank).groupTables == nil || !e.HasGroupIdx || e.GroupIdx < 0 || e.GroupIdx >= math.MaxUint8 {
		return e
	}
	key := groupKey{uint8(e.GroupIdx) + 1, e.Tier}
	g := l.rank(b.Rank).groupTables[key]
	if g == nil || !slices.ContainsFunc(e.BlockHashes, g.has) {
		return e
	}
	parts, rest := selectBlocks(e, g.has), selectBlocks(e, func(hash uint64) bool { return !g.has(hash) })
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
func (l *Lane) emitGroup(rank uint32, key groupKey, kind protowire.Number, hashes []uint64, op copies.Op) {
	for part := range slices.Chunk(hashes, l.cfg.MaxBlocks) {
		l.entry.group(l.head(rank, key.tier), kind, uint32(key.group)-1, part)
		if kind == kvcastv1.RouterEventGroupStoredField {
			l.rank(rank).used |= 1 << key.tier
			l.log.storeOp(l.entry.events-1, op, len(part))
			l.counts.events[eventsGroupStored]++
		} else {
			l.counts.events[eventsGroupRemoved]++
		}
	}
}

// dropGroups drops the blocks of a tier in all groups but the main group.
func (l *Lane) dropGroups(r *rankState, tier kvblock.Tier) {
	r.suspects = slices.DeleteFunc(r.suspects, func(s suspectBlock) bool { return s.key.tier == tier })
	for key, g := range r.groupTables {
		if key.tier == tier {
			l.tableBlocks.Release(int64(g.table.Len()))
			delete(r.groupTables, key)
		}
	}
}

// sortedGroups returns the keys of all groups' blocks.
func (r *rankState) sortedGroups() []groupKey {
	return slices.SortedFunc(maps.Keys(r.groupTables), func(a, b groupKey) int {
		return int(a.group)<<8 + int(a.tier) - int(b.group)<<8 - int(b.tier)
	})
}

// state returns the blocks as they are in a checkpoint.
func (g *groupBlocks) state(rank uint32, key groupKey) *statev1.Table {
	s := &statev1.Table{DpRank: rank, Tier: uint32(key.tier), Group: uint32(key.group)}
	s.BlockHashes = make([]uint64, 0, g.table.Len())
	for b := range g.table.All() {
		s.BlockHashes = append(s.BlockHashes, b.Key())
		if c := g.count(b.Value); c != (copies.Count{}) {
			s.CopiedHashes = append(s.CopiedHashes, b.Key())
			s.FurtherCopies, s.UnsureStores = append(s.FurtherCopies, c.Further), append(s.UnsureStores, c.Unsure)
		}
	}
	return s
}

// restore restores blocks from a checkpoint.
func (g *groupBlocks) restore(s *statev1.Table) error {
	if n := len(s.GetCopiedHashes()); len(s.GetFurtherCopies()) != n || len(s.GetUnsureStores()) != n {
		return fmt.Errorf("%d blocks with %d copies and %d unsure stores", n, len(s.GetFurtherCopies()), len(s.GetUnsureStores()))
	}
	for _, hash := range s.GetBlockHashes() {
		if _, existed := g.table.Put(hash); existed {
			return fmt.Errorf("block %d is there twice", hash)
		}
	}
	for i, hash := range s.GetCopiedHashes() {
		b := g.table.Find(hash)
		if b == nil {
			return fmt.Errorf("copies of block %d, which is missing", hash)
		}
		b.Value = g.block(copies.Count{Further: s.GetFurtherCopies()[i], Unsure: s.GetUnsureStores()[i]})
	}
	return nil
}

// storedGroup returns the group of stored state.
func storedGroup(group uint32) (uint8, error) {
	if group == 0 || group > math.MaxUint8 {
		return 0, fmt.Errorf("attention group %d", group)
	}
	return uint8(group), nil
}

// group applies an encoded GroupStored or GroupRemoved.
func (a *application) group(r *rankState, tier kvblock.Tier, kind protowire.Number, b []byte) error {
	group, hashes, err := encode.GroupBlocks(b, a.hashes[:0])
	if err != nil {
		return fmt.Errorf("decode blocks of an attention group: %w", err)
	}
	a.hashes = hashes
	name, err := storedGroup(uint32(min(group, math.MaxUint8)) + 1)
	if err != nil {
		return err
	}
	ops, err := restoreOps(a.ops, len(a.hashes))
	if err != nil {
		return err
	}
	a.ops = nil
	g := r.groupBlocks(groupKey{name, tier})
	g.table.Prefetch(a.hashes)
	for i, hash := range a.hashes {
		if kind == kvcastv1.RouterEventGroupStoredField {
			op := copies.Add
			if ops != nil {
				op = ops[i]
			}
			g.store(hash, op)
		} else {
			g.remove(hash, copies.RemoveAll)
		}
	}
	return nil
}
