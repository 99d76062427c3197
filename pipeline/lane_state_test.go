package pipeline

import (
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// LaneState is all state of a lane that recovery restores.
type LaneState struct {
	LastEventID   uint64
	Blocks        map[Place]map[uint64]BlockState
	Ranks         map[uint32]RankState // without those in which nothing is set
	RawIDs        map[int]uint64       // without 0
	Announcements map[EngineCounts]bool
	Pending       string // encoded
	Trackers      map[uint32]string
	Units         int64 // of Config.Blocks
}

// EngineCounts are the counts of an engine that may announce blocks.
type EngineCounts struct {
	Rank   uint32
	Source int
	Counts copies.Counts
}

// BlockState is the state of a block in a table.
type BlockState struct {
	Parent    uint64
	HasParent bool
	Stale     bool
	Attrs     attribute.Set
	Copies    copies.Count
}

// RankState is the state of a rank apart from its blocks.
type RankState struct {
	Reported      string // by tier, and unseen tiers
	Used          kvblock.Tiers
	GroupsOmitted bool
	Groups        string // encoded
	GroupBlocks   string // by group and tier, with the copies of each block
	Incomplete    string // by source, and unseen tiers
	Tiers         string
}

// StateOf returns the state of a lane.
func StateOf(lane feed.Lane) LaneState {
	l := lane.(*Lane)
	l.mu.Lock()
	defer l.mu.Unlock()
	return StateOfLocked(l)
}

// StateOfLocked is StateOf for an append, during which the lane is locked.
func StateOfLocked(lane feed.Lane) LaneState {
	l := lane.(*Lane)
	l.checkLower()
	state := LaneState{
		LastEventID: l.lastEventID, Blocks: make(map[Place]map[uint64]BlockState), Ranks: make(map[uint32]RankState),
		RawIDs: make(map[int]uint64), Announcements: make(map[EngineCounts]bool), Trackers: make(map[uint32]string),
	}
	for number, r := range l.ranks {
		if l.consolidation != dedup {
			state.Units += int64(r.blocks())
		}
		for tier, t := range r.tables {
			if t != nil && t.blocks.table.Len() > 0 {
				state.Blocks[Place{Rank: number, Tier: kvcastv1.Tier(tier)}] = t.state()
			}
		}
		rank := RankState{Used: r.used, GroupsOmitted: r.groupsOmitted}
		if r.groups != nil {
			rank.Groups = string(appendState(nil, r.groups))
		}
		for _, key := range r.otherGroups.Keys() {
			if blocks := maps.Collect(r.otherGroups.Find(key).All()); len(blocks) > 0 {
				rank.GroupBlocks += fmt.Sprint(key, blocks)
			}
		}
		if r.reported != ([kvblock.TierEnd]gapReasons{}) {
			rank.Reported = fmt.Sprint(r.reported)
		}
		if r.unseen != 0 {
			rank.Reported += fmt.Sprint(" unseen ", r.unseen)
		}
		if r.sources != nil && anyTiers(append(slices.Clone(r.sources.incomplete), r.sources.unseen...)) {
			rank.Incomplete = fmt.Sprintf("%d unseen %d", r.sources.incomplete, r.sources.unseen)
		}
		if r.sources != nil && slices.ContainsFunc(r.sources.tiers, func(t kvblock.Tiers) bool { return t != 0 }) {
			for _, tiers := range r.sources.tiers {
				rank.Tiers += string(rune('a' + tiers))
			}
		}
		if r.sources != nil && r.sources.tracker != nil {
			state.Units += 2 * int64(r.sources.tracker.Len())
			for _, names := range r.sources.tracker.Names() {
				state.Units += int64(names)
			}
			empty := consolidate.New(len(l.sourceNames), 1, nil, nil, new(consolidate.Counts))
			if s := string(r.sources.tracker.AppendState(nil)); s != string(empty.AppendState(nil)) {
				state.Trackers[number] = s
			}
		}
		if rank != (RankState{}) {
			state.Ranks[number] = rank
		}
	}
	for source, id := range l.lastRawIDs {
		if id != 0 {
			state.RawIDs[source] = id
		}
	}
	for a := range l.announcements.All() {
		counts := copies.Counts{Announcements: a.GetCount(), Certain: a.GetCount() - a.GetLoads(), Branches: a.GetBranches()}
		state.Announcements[EngineCounts{a.GetDpRank(), int(a.GetSource()), counts}] = true
	}
	if !l.pending.empty() {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(l.pending.state())
		if err != nil {
			panic(err)
		}
		state.Pending = string(b)
	}
	return state
}

// state returns the blocks of a table.
func (t *table) state() map[uint64]BlockState {
	all := make(map[uint64]BlockState)
	t.blocks.all(func(b *slot) {
		s := BlockState{
			HasParent: b.Value.flags&flagParent != 0, Stale: t.blocks.isStale(b), Attrs: t.attrs.At(b.Value.attr),
		}
		if s.HasParent {
			s.Parent = b.Value.parent
		}
		if b.Value.flags&flagCopies != 0 {
			s.Copies = t.copies[b.Key()]
		}
		all[b.Key()] = s
	})
	return all
}

// Lanes returns the lanes of a pipeline, by name.
func (p *Pipeline) Lanes() map[string]feed.Lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[string]feed.Lane)
	for name, l := range maps.All(p.lanes) {
		all[name] = l
	}
	return all
}

// CheckpointBytes returns the size of the stored checkpoints: the pipeline's total, and the sum over its lanes.
func (p *Pipeline) CheckpointBytes() (total, sum int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lanes {
		l.mu.Lock()
		if l.log != nil {
			sum += l.log.position.size
		}
		l.mu.Unlock()
	}
	return p.totals.stored.Load(), sum
}
