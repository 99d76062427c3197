package checker

import (
	"slices"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// checkEntryForm finds errors in an entry that do not depend on previous ones.
func checkEntryForm(e *kvcastv1.Entry) error {
	if e.GetWorker() == "" {
		return broken(Protocol, "entry %d names no worker", e.GetSeq())
	}
	if len(e.GetEvents()) == 0 {
		return broken(Atomic, "entry %d has no events", e.GetSeq())
	}
	for _, ev := range e.GetEvents() {
		if what := eventFault(e, ev); what != "" {
			return broken(Protocol, "event %d of entry %d: %s", ev.GetEventId(), e.GetSeq(), what)
		}
		if aboutWorker(ev) && len(e.GetEvents()) > 1 {
			return broken(Atomic, "entry %d holds more than the event about its worker", e.GetSeq())
		}
	}
	return nil
}

// aboutWorker reports whether an event is about the worker as a whole.
func aboutWorker(ev *kvcastv1.RouterEvent) bool {
	return ev.GetWorkerAdded() != nil || ev.GetWorkerRemoved() != nil
}

// eventFault returns the error in the form of an event; empty if it has none.
func eventFault(e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) string {
	if ev.GetEventId() == 0 {
		return "no event_id"
	}
	if ev.GetEvent() == nil {
		return "no kind"
	}
	if aboutWorker(ev) {
		switch {
		case ev.DpRank != nil:
			return "a dp_rank on an event about the worker"
		case e.GetEngineTimeUnixNano() != 0 || e.GetIngestTimeUnixNano() != 0:
			return "a time on an event about the worker"
		}
	} else if ev.DpRank == nil {
		return "no dp_rank"
	}
	blocks := ev.GetStored() != nil || ev.GetRemoved() != nil || ev.GetGroupStored() != nil || ev.GetGroupRemoved() != nil
	switch {
	case blocks && !realTier(ev.GetTier()):
		return "no tier"
	case !blocks && ev.GetTier() != kvcastv1.Tier_TIER_UNSPECIFIED:
		return "a tier on an event that is not of blocks"
	}
	return kindFault(e, ev)
}

// reasonsWithoutBatches are the reasons of gaps without missing batches.
var reasonsWithoutBatches = []kvcastv1.Gap_Reason{
	kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, kvcastv1.Gap_REASON_SHARED_TIER, kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES,
	kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH, kvcastv1.Gap_REASON_UNKNOWN_CONTENT,
	kvcastv1.Gap_REASON_TIER_NOT_CLEARED, kvcastv1.Gap_REASON_REPLAY_UNPROVED, kvcastv1.Gap_REASON_REPLAY_FOREIGN, kvcastv1.Gap_REASON_COPIES_UNSURE,
	kvcastv1.Gap_REASON_CONNECTOR_TIER, kvcastv1.Gap_REASON_RELAYED,
}

func kindFault(e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) string {
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		return storedFault(kind.Stored)
	case *kvcastv1.RouterEvent_Removed:
		if len(kind.Removed.GetBlockHashes()) == 0 {
			return "removes no block"
		}
	case *kvcastv1.RouterEvent_Cleared:
		tiers := kind.Cleared.GetTiers()
		switch {
		case !isDefined(kvcastv1.Cleared_Reason_name, kind.Cleared.GetReason()):
			return "cleared without a reason"
		case slices.ContainsFunc(tiers, func(t kvcastv1.Tier) bool { return !realTier(t) }):
			return "cleared of no tier"
		}
	case *kvcastv1.RouterEvent_Gap:
		switch {
		case !isDefined(kvcastv1.Gap_Reason_name, kind.Gap.GetReason()):
			return "a gap without a reason"
		case kind.Gap.GetFirstSeq() > kind.Gap.GetLastSeq():
			return "a gap that ends before it begins"
		case slices.ContainsFunc(kind.Gap.GetTiers(), func(t kvcastv1.Tier) bool { return !realTier(t) }):
			return "a gap in no tier"
		case len(kind.Gap.GetDetail()) > 200:
			return "a gap with a long detail"
		case slices.Contains(reasonsWithoutBatches, kind.Gap.GetReason()) && (kind.Gap.GetMissedBatches() > 0 || kind.Gap.GetLastSeq() > 0):
			return "a gap where no batch is missing, and batches that are"
		}
	case *kvcastv1.RouterEvent_Groups:
		return groupsFault(kind.Groups)
	case *kvcastv1.RouterEvent_GroupStored:
		return groupStoredFault(kind.GroupStored)
	case *kvcastv1.RouterEvent_GroupRemoved:
		if len(kind.GroupRemoved.GetBlockHashes()) == 0 {
			return "removes no block of a group"
		}
	case *kvcastv1.RouterEvent_WorkerAdded:
		if kind.WorkerAdded.GetModel() != e.GetModel() {
			return "added with another model than the entry's"
		}
	case *kvcastv1.RouterEvent_WorkerRemoved:
		if !isDefined(kvcastv1.WorkerRemoved_Reason_name, kind.WorkerRemoved.GetReason()) {
			return "removed without a reason"
		}
	}
	return ""
}

// groupsFault returns the error in the form of Groups; empty if it has none.
func groupsFault(g *kvcastv1.Groups) string {
	mains := 0
	for i, group := range g.GetGroups() {
		if i > 0 && group.GetIndex() <= g.GetGroups()[i-1].GetIndex() {
			return "groups that are not ascending"
		}
		if group.GetMain() {
			mains++
		}
	}
	switch {
	case len(g.GetGroups()) == 0 && g.GetMissing() == "":
		return "no group"
	case mains > 1:
		return "two main groups"
	case len(g.GetMissing()) > 200:
		return "groups with a long text"
	case g.GetHashing() != nil && (g.GetUnit() == 0 || g.GetHashing().GetAlgorithm() == kvcastv1.BlockHashing_ALGORITHM_UNSPECIFIED):
		return "hashing without a unit or an algorithm"
	}
	return ""
}

// blocksFault returns the error in the form of an event of snapshot blocks; empty if it has none.
func blocksFault(ev *kvcastv1.RouterEvent) string {
	switch {
	case ev.GetStored() == nil && ev.GetGroupStored() == nil:
		return "an event that is no store"
	case ev.GetEventId() != 0:
		return "an event_id"
	case ev.DpRank == nil:
		return "no dp_rank"
	case !realTier(ev.GetTier()):
		return "no tier"
	case len(ev.GetStored().GetTokenIds()) > 0:
		return "token_ids"
	case ev.GetGroupStored() != nil:
		return groupStoredFault(ev.GetGroupStored())
	}
	return storedFault(ev.GetStored())
}

func groupStoredFault(g *kvcastv1.GroupStored) string {
	if len(g.GetBlockHashes()) == 0 {
		return "stores no block of a group"
	}
	return ""
}

func storedFault(s *kvcastv1.Stored) string {
	blocks, size := len(s.GetBlockHashes()), int(s.GetBlockSize())
	switch {
	case blocks == 0:
		return "stores no block"
	case len(s.GetTokensHashes()) != 0 && len(s.GetTokensHashes()) != blocks:
		return "tokens_hashes are not as many as block_hashes"
	case len(s.GetTokensHashes()) != 0 && size == 0:
		return "tokens_hashes without a block_size"
	case len(s.GetTokenIds()) != 0 && len(s.GetTokenIds()) != blocks*size:
		return "token_ids are not block_size for each block"
	case s.LoraName != nil && s.GetLoraName() == "":
		return "an empty lora_name"
	}
	return ""
}

func realTier(t kvcastv1.Tier) bool { return isDefined(kvcastv1.Tier_name, t) }

// isDefined reports whether an enum value is defined in the contract and not zero.
func isDefined[E ~int32](names map[int32]string, e E) bool {
	_, ok := names[int32(e)]
	return ok && e != 0
}

// maxMessage is the maximum size in bytes of a message with more than one entry, or with the
// digests of more than one worker.
const maxMessage = 1 << 20

// checkShape finds errors in a message that do not depend on previous ones.
func (c *Checker) checkShape(msg *kvcastv1.SubscribeResponse) error {
	if msg == nil {
		return broken(Protocol, "a nil message")
	}
	parts := 0
	for _, there := range []bool{
		len(msg.GetEntries()) > 0, msg.GetAccepted() != nil, msg.GetProgress() != nil,
		msg.GetSnapshotBegin() != nil, msg.GetSnapshotWorker() != nil,
		len(msg.GetSnapshotBlocks()) > 0, msg.GetSnapshotEnd() != nil,
	} {
		if there {
			parts++
		}
	}
	// ReplayResponse has no Progress: a position alone has the same meaning.
	alone := c.call == callReplay && parts == 0 && msg.GetPosition() != nil
	if parts != 1 && !alone {
		return broken(Protocol, "a message with %d parts, not one", parts)
	}
	digests := msg.GetProgress().GetWorkers()
	several := len(digests) > 0 && digests[0].GetWorker() != digests[len(digests)-1].GetWorker()
	if len(msg.GetEntries()) > 1 || len(msg.GetSnapshotBlocks()) > 0 || several {
		if size := proto.Size(msg); size > maxMessage {
			return broken(Protocol, "a message of %d bytes with %d entries, more than %d",
				size, len(msg.GetEntries()), maxMessage)
		}
	}
	return nil
}

// partOfSnapshot reports whether a message may occur only within a snapshot.
func partOfSnapshot(msg *kvcastv1.SubscribeResponse) bool {
	return msg.GetSnapshotWorker() != nil || len(msg.GetSnapshotBlocks()) > 0 || msg.GetSnapshotEnd() != nil
}

// checkLink finds errors between a message's position and the previous one.
func (c *Checker) checkLink(msg *kvcastv1.SubscribeResponse) error {
	if msg.GetPosition() == nil {
		return broken(Protocol, "a message without a position")
	}
	if got := msg.GetPosition().GetEpoch(); got != c.epoch {
		return broken(Protocol, "position of epoch %q in a stream of epoch %q", got, c.epoch)
	}
	if got := msg.GetPrevSeq(); got != c.head {
		return broken(GapFree, "prev_seq %d, but the position before was %d", got, c.head)
	}
	return nil
}

// checkUnplaced finds a position in a message that must not have one.
func checkUnplaced(msg *kvcastv1.SubscribeResponse) error {
	if msg.GetPosition() != nil || msg.GetPrevSeq() != 0 {
		return broken(Protocol, "position %d and prev_seq %d while the state is partial",
			msg.GetPosition().GetSeq(), msg.GetPrevSeq())
	}
	return nil
}
