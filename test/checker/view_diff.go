package checker

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Diff compares two views: the workers, their WorkerAdded if both know it, and for each dp rank and
// tier the blocks with all their attributes. It returns one line per difference, "-" for what only
// v has and "+" for what only other has, and nothing if the views are equal.
//
// Diff compares whether a rank is incomplete, and whether it has omitted groups, if both views have the WorkerAdded of its
// worker. It ignores the gaps of a rank, which a snapshot does not list, and the block_size and ranks of a worker, which a snapshot reports with current
// values.
func (v *View) Diff(other *View) string {
	var b strings.Builder
	for _, name := range union(v.workers, other.workers) {
		mine, theirs := v.workers[name], other.workers[name]
		switch {
		case theirs == nil:
			fmt.Fprintf(&b, "- worker %q\n", name)
		case mine == nil:
			fmt.Fprintf(&b, "+ worker %q\n", name)
		default:
			diffAdded(&b, name, mine.added, theirs.added)
			diffRanks(&b, name, mine.ranks, theirs.ranks)
			if mine.added != nil && theirs.added != nil {
				diffReports(&b, name, mine.ranks, theirs.ranks)
			}
		}
	}
	return b.String()
}

func diffAdded(b *strings.Builder, name string, mine, theirs *kvcastv1.WorkerAdded) {
	if mine == nil || theirs == nil {
		return
	}
	same := mine.GetModel() == theirs.GetModel() && mine.GetEndpoint() == theirs.GetEndpoint() &&
		maps.Equal(mine.GetLabels(), theirs.GetLabels())
	if !same {
		fmt.Fprintf(b, "- worker %q: %v\n+ worker %q: %v\n", name, mine, name, theirs)
	}
}

func diffRanks(b *strings.Builder, name string, mine, theirs map[uint32]*viewRank) {
	for _, n := range union(mine, theirs) {
		var my, their map[kvcastv1.Tier]map[uint64]Block
		if r := mine[n]; r != nil {
			my = r.tiers
		}
		if r := theirs[n]; r != nil {
			their = r.tiers
		}
		for _, tier := range union(my, their) {
			place := fmt.Sprintf("worker %q, rank %d, %v", name, n, tier)
			diffBlocks(b, place, my[tier], their[tier])
		}
	}
}

// diffReports compares what events have reported about ranks, apart from their blocks.
func diffReports(b *strings.Builder, name string, mine, theirs map[uint32]*viewRank) {
	for _, n := range union(mine, theirs) {
		diffReport(b, name, n, "incomplete", mine[n].isIncomplete(), theirs[n].isIncomplete())
		diffReport(b, name, n, "groups omitted", mine[n].hasGroupsOmitted(), theirs[n].hasGroupsOmitted())
	}
}

func diffReport(b *strings.Builder, name string, rank uint32, report string, here, there bool) {
	switch {
	case here && !there:
		fmt.Fprintf(b, "- worker %q, rank %d: %s\n", name, rank, report)
	case there && !here:
		fmt.Fprintf(b, "+ worker %q, rank %d: %s\n", name, rank, report)
	}
}

func diffBlocks(b *strings.Builder, place string, mine, theirs map[uint64]Block) {
	for _, h := range union(mine, theirs) {
		my, here := mine[h]
		their, there := theirs[h]
		if here && there && my == their {
			continue
		}
		if here {
			fmt.Fprintf(b, "- %s: block %016x %+v\n", place, h, my)
		}
		if there {
			fmt.Fprintf(b, "+ %s: block %016x %+v\n", place, h, their)
		}
	}
}

// union returns the keys of both maps, ascending.
func union[K interface {
	~string | ~int32 | ~uint32 | ~uint64
}, V any](a, b map[K]V) []K {
	keys := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(keys)
	return slices.Compact(keys)
}
