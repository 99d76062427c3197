// Package indextest builds entries for tests.
package indextest

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// EntryOf returns an entry of worker w and model m.
func EntryOf(seq uint64, events ...*kvcastv1.RouterEvent) *kvcastv1.Entry {
	return &kvcastv1.Entry{Seq: seq, Worker: "w", Model: "m", Events: events}
}

// Event returns an event of a dp rank. The kind is a *kvcastv1.Stored or the like; nil is a kind of a later version. Blocks are in device memory.
func Event(rank uint32, kind any) *kvcastv1.RouterEvent {
	e := &kvcastv1.RouterEvent{DpRank: &rank}
	switch kind := kind.(type) {
	case *kvcastv1.Stored:
		e.Tier, e.Event = kvcastv1.Tier_TIER_DEVICE, &kvcastv1.RouterEvent_Stored{Stored: kind}
	case *kvcastv1.Removed:
		e.Tier, e.Event = kvcastv1.Tier_TIER_DEVICE, &kvcastv1.RouterEvent_Removed{Removed: kind}
	case *kvcastv1.Cleared:
		e.Event = &kvcastv1.RouterEvent_Cleared{Cleared: kind}
	case *kvcastv1.Gap:
		e.Event = &kvcastv1.RouterEvent_Gap{Gap: kind}
	case *kvcastv1.GroupsOmitted:
		e.Event = &kvcastv1.RouterEvent_GroupsOmitted{GroupsOmitted: kind}
	case *kvcastv1.Groups:
		e.Event = &kvcastv1.RouterEvent_Groups{Groups: kind}
	case *kvcastv1.GroupStored:
		e.Tier, e.Event = kvcastv1.Tier_TIER_DEVICE, &kvcastv1.RouterEvent_GroupStored{GroupStored: kind}
	case *kvcastv1.GroupRemoved:
		e.Tier, e.Event = kvcastv1.Tier_TIER_DEVICE, &kvcastv1.RouterEvent_GroupRemoved{GroupRemoved: kind}
	case *kvcastv1.WorkerAdded:
		e.DpRank, e.Event = nil, &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: kind}
	case *kvcastv1.WorkerRemoved:
		e.DpRank, e.Event = nil, &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: kind}
	case nil:
	default:
		panic(fmt.Sprintf("no event has a %T", kind))
	}
	return e
}

// Stored returns a chain without parent, whose tokens hashes are the block hashes plus 1000.
func Stored(hashes ...uint64) *kvcastv1.Stored {
	s := &kvcastv1.Stored{BlockHashes: hashes, BlockSize: 16}
	for _, h := range hashes {
		s.TokensHashes = append(s.TokensHashes, h+1000)
	}
	return s
}

// Removed returns a removal of blocks.
func Removed(hashes ...uint64) *kvcastv1.Removed { return &kvcastv1.Removed{BlockHashes: hashes} }
