package checker_test

import (
	"slices"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const epoch = "e1"

// stream is a request and its responses.
type stream struct {
	req  *kvcastv1.SubscribeRequest
	msgs []*kvcastv1.SubscribeResponse
}

func at(seq uint64) *kvcastv1.Position { return &kvcastv1.Position{Epoch: epoch, Seq: seq} }

func fromEarliest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
}

func fromLatest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}}
}

func fromAfter(seq uint64) *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_After{After: at(seq)}}
}

func accepted(mode kvcastv1.Accepted_Mode, seq, newest uint64) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{
		Position: at(seq),
		Accepted: &kvcastv1.Accepted{Epoch: epoch, OldestSeq: 1, NewestSeq: newest, Mode: mode},
	}
}

func message(prev uint64, entries ...*kvcastv1.Entry) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{
		Entries: entries, Position: at(entries[len(entries)-1].GetSeq()), PrevSeq: prev,
	}
}

func progress(prev, seq uint64, digests ...*kvcastv1.WorkerDigest) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{
		Progress: &kvcastv1.Progress{Workers: digests}, Position: at(seq), PrevSeq: prev,
	}
}

// entry is a batch of worker w; each has engine and ingest times of its own.
func entry(seq uint64, w string, events ...*kvcastv1.RouterEvent) *kvcastv1.Entry {
	return &kvcastv1.Entry{
		Seq: seq, Worker: w, Model: "m-" + w, Events: events,
		EngineTimeUnixNano: int64(1e9 + seq*1000), IngestTimeUnixNano: int64(2e9 + seq*1000),
	}
}

func added(seq uint64, w string, id uint64) *kvcastv1.Entry {
	return &kvcastv1.Entry{Seq: seq, Worker: w, Model: "m-" + w, Events: []*kvcastv1.RouterEvent{{
		EventId: id,
		Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{
			Model: "m-" + w, BlockSize: 16, Ranks: []uint32{0},
		}},
	}}}
}

func removed(seq uint64, w string, id uint64) *kvcastv1.Entry {
	return &kvcastv1.Entry{Seq: seq, Worker: w, Model: "m-" + w, Events: []*kvcastv1.RouterEvent{{
		EventId: id,
		Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
			Reason: kvcastv1.WorkerRemoved_REASON_DEREGISTERED,
		}},
	}}}
}

func store(id uint64, rank uint32, hashes ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank), Tier: kvcastv1.Tier_TIER_DEVICE,
		Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
			BlockHashes: hashes, TokensHashes: slices.Clone(hashes), BlockSize: 16,
		}},
	}
}

func remove(id uint64, rank uint32, hashes ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank), Tier: kvcastv1.Tier_TIER_DEVICE,
		Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: hashes}},
	}
}

func clearAll(id uint64, rank uint32, reason kvcastv1.Cleared_Reason, tiers ...kvcastv1.Tier) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank),
		Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{Reason: reason, Tiers: tiers}},
	}
}

func gap(id uint64, rank uint32) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank),
		Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{
			Reason: kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, MissedBatches: 2, FirstSeq: 7, LastSeq: 8,
		}},
	}
}

func omitGroups(id uint64, rank uint32) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank),
		Event: &kvcastv1.RouterEvent_GroupsOmitted{GroupsOmitted: &kvcastv1.GroupsOmitted{}},
	}
}

func set(hashes ...uint64) map[uint64]struct{} {
	blocks := make(map[uint64]struct{})
	for _, h := range hashes {
		blocks[h] = struct{}{}
	}
	return blocks
}

func fromSnapshot() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}}
}

// announced is an Accepted that a snapshot follows.
func announced(oldest, newest uint64) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch: epoch, OldestSeq: oldest, NewestSeq: newest, Mode: kvcastv1.Accepted_MODE_SNAPSHOT,
	}}
}

func snapshotBegin() *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: epoch}}
}

func snapshotWorker(w string, lastID uint64, incomplete ...uint32) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{SnapshotWorker: &kvcastv1.SnapshotWorker{
		Worker: w, Added: &kvcastv1.WorkerAdded{Model: "m-" + w}, LastEventId: lastID, IncompleteRanks: incomplete,
	}}
}

func snapshotBlocks(w string, events ...*kvcastv1.RouterEvent) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{{Worker: w, Events: events}}}
}

func snapshotEntries(entries ...*kvcastv1.Entry) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Entries: entries}
}

func snapshotEnd(seq uint64) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{
		SnapshotEnd: &kvcastv1.SnapshotEnd{Position: at(seq)}, Position: at(seq), PrevSeq: seq,
	}
}

// child returns a store that continues a block.
func child(id uint64, rank uint32, parent uint64, hashes ...uint64) *kvcastv1.RouterEvent {
	ev := store(id, rank, hashes...)
	ev.GetStored().ParentHash = proto.Uint64(parent)
	return ev
}

func onDisk(ev *kvcastv1.RouterEvent) *kvcastv1.RouterEvent {
	ev.Tier = kvcastv1.Tier_TIER_DISK
	return ev
}

// overfull returns the Gap of a rank with too many blocks.
func overfull(id uint64, rank uint32) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{EventId: id, DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TOO_MANY_BLOCKS},
	}}
}
