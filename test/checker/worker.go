package checker

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxEntry is the size in bytes above which an entry is cut between two events. The server's own
// count may differ by cutSlack, because it includes more than the events (the seq is set late).
const (
	maxEntry = 3 << 20
	cutSlack = 64
)

// presence is whether the stream has added or removed a worker.
type presence int

const (
	presenceUnknown presence = iota // no event of the worker was seen
	presenceAdded
	presenceRemoved
	// presenceUnannounced: the snapshot did not announce the worker, but its entries name it. The
	// worker must be removed before the snapshot ends.
	presenceUnannounced
)

// worker is the state of a worker between entries.
type worker struct {
	presence presence
	model    string
	lastID   uint64
	lastSeq  uint64 // of its last delivered entry; 0 if there is none
	// whole reports whether every event since it was added has been seen.
	whole bool
	ranks map[uint32]*rank
}

// rank is the state of a dp rank.
type rank struct {
	// The last entry of this rank.
	seq        uint64
	engineTime int64
	ingestTime int64
	size       int
	// cleared reports whether the rank was empty once, so that all its blocks have been seen.
	cleared bool
	// omissions are the tiers in which Gaps have reported a reason of reasonsSentOnce since the tier was cleared.
	omissions map[kvcastv1.Gap_Reason]tierSet
	// groupsOmitted reports whether GroupsOmitted was received and still holds.
	groupsOmitted bool
	// ambiguous reports whether two publishers were reported since the rank was cleared. Each batch of both is delivered then, also the same
	// one twice.
	ambiguous bool
}

// worker returns the state of a worker, for modification.
func (c *Checker) worker(name string) *worker {
	w := c.workers[name]
	if w == nil {
		w = &worker{ranks: make(map[uint32]*rank)}
		c.workers[name] = w
	}
	return w
}

func (w *worker) rank(n uint32) *rank {
	r := w.ranks[n]
	if r == nil {
		r = &rank{}
		w.ranks[n] = r
	}
	return r
}

// follow checks an event against the previous events of its worker.
func (c *Checker) follow(w *worker, e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) error {
	if err := c.followID(w, e, ev); err != nil {
		return err
	}
	added := ev.GetWorkerAdded()
	switch {
	case added != nil && (w.presence == presenceAdded || w.presence == presenceUnannounced):
		return broken(Protocol, "worker %q of entry %d is added again", e.GetWorker(), e.GetSeq())
	case added != nil:
		w.presence, w.model, w.whole = presenceAdded, e.GetModel(), true
		clear(w.ranks)
	case w.presence == presenceRemoved:
		return broken(Protocol, "entry %d is of worker %q, which was removed", e.GetSeq(), e.GetWorker())
	case w.presence == presenceUnknown && c.phase == phaseSnapshot:
		w.presence, w.model = presenceUnannounced, e.GetModel()
	case w.presence == presenceUnknown && c.fromStart:
		return broken(Protocol, "entry %d is of worker %q, which was not added", e.GetSeq(), e.GetWorker())
	case w.presence == presenceUnknown && c.allWorkersSeen:
		return broken(Snapshot, "entry %d is of worker %q, which was neither announced nor added", e.GetSeq(), e.GetWorker())
	case w.presence == presenceUnknown:
		w.presence, w.model = presenceAdded, e.GetModel()
	}
	if e.GetModel() != w.model {
		return broken(Protocol, "entry %d is of model %q, its worker of %q", e.GetSeq(), e.GetModel(), w.model)
	}
	if ev.GetWorkerRemoved() != nil {
		w.presence = presenceRemoved
	}
	if ev.DpRank != nil {
		if repeated := w.rank(ev.GetDpRank()).follow(ev); repeated != "" {
			return broken(Protocol, "entry %d repeats %s of worker %q, rank %d",
				e.GetSeq(), repeated, e.GetWorker(), ev.GetDpRank())
		}
	}
	w.lastSeq = e.GetSeq()
	return nil
}

// reasonsSentOnce are the reasons of Gaps that are sent once for each tier until it is cleared.
var reasonsSentOnce = []kvcastv1.Gap_Reason{
	kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES, kvcastv1.Gap_REASON_EVENTS_SKIPPED,
	kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH, kvcastv1.Gap_REASON_UNKNOWN_CONTENT, kvcastv1.Gap_REASON_TIER_NOT_CLEARED,
	kvcastv1.Gap_REASON_REPLAY_UNPROVED, kvcastv1.Gap_REASON_COPIES_UNSURE, kvcastv1.Gap_REASON_CONNECTOR_TIER,
	kvcastv1.Gap_REASON_RELAYED,
}

// follow applies an event to its rank. It returns what the event repeats although it still holds;
// empty if the event is correct.
func (r *rank) follow(ev *kvcastv1.RouterEvent) (repeated string) {
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Cleared:
		for reason := range r.omissions {
			r.omissions[reason] &^= tiersNamed(kind.Cleared.GetTiers())
		}
		if len(kind.Cleared.GetTiers()) > 0 {
			return ""
		}
		reason := kind.Cleared.GetReason()
		r.ambiguous = false
		r.cleared = r.cleared || reason != kvcastv1.Cleared_REASON_UNREPAIRED_GAP
		r.groupsOmitted = r.groupsOmitted && reason != kvcastv1.Cleared_REASON_ENGINE_RESTARTED
	case *kvcastv1.RouterEvent_Gap:
		reason := kind.Gap.GetReason()
		r.ambiguous = r.ambiguous || reason == kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER
		if !slices.Contains(reasonsSentOnce, reason) {
			return ""
		}
		tiers := tiersNamed(kind.Gap.GetTiers())
		if r.omissions[reason]&tiers == tiers {
			return reason.String()
		}
		if r.omissions == nil {
			r.omissions = make(map[kvcastv1.Gap_Reason]tierSet)
		}
		r.omissions[reason] |= tiers
	case *kvcastv1.RouterEvent_Resolved:
		for _, reason := range kind.Resolved.GetReasons() {
			if r.omissions[reason] == 0 {
				return "Resolved of " + reason.String()
			}
			delete(r.omissions, reason)
		}
	case *kvcastv1.RouterEvent_GroupsOmitted:
		if r.groupsOmitted {
			return "GroupsOmitted"
		}
		r.groupsOmitted = true
	}
	return ""
}

func (c *Checker) followID(w *worker, e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) error {
	id, want := ev.GetEventId(), w.lastID+1
	// A worker that was present with another model may have used ids before. The server keeps the
	// ids of 16,384 removed workers, more than any test has.
	hidden := len(c.filter.models) > 0 && ev.GetWorkerAdded() != nil
	holes := len(c.filter.tiers) > 0 && w.lastID > 0
	first := w.lastID == 0 && !c.fromStart
	w.lastID = id
	if id == want || (id > want && (hidden || holes || first)) {
		return nil
	}
	return broken(GapFree, "event_id %d of worker %q in entry %d, want %d",
		id, e.GetWorker(), e.GetSeq(), want)
}

// checkWhole finds entries that are part of an engine batch although the whole batch fits, and entries that are too large.
func (c *Checker) checkWhole(w *worker, e *kvcastv1.Entry) error {
	size := proto.Size(e)
	if len(e.GetEvents()) > 1 && size > maxEntry+cutSlack {
		return broken(Atomic, "entry %d has %d bytes and is not cut", e.GetSeq(), size)
	}
	first := e.GetEvents()[0]
	if first.DpRank == nil {
		return nil
	}
	r := w.rank(first.GetDpRank())
	// A filter by tier removes the bytes that would explain a cut.
	if !c.opts.Tails && !r.ambiguous && len(c.filter.tiers) == 0 && r.seq != 0 && e.GetEngineTimeUnixNano() != 0 &&
		r.engineTime == e.GetEngineTimeUnixNano() && r.ingestTime == e.GetIngestTimeUnixNano() {
		next := protowire.SizeTag(kvcastv1.EntryEventsField) + protowire.SizeBytes(proto.Size(first))
		if r.size+next+cutSlack <= maxEntry {
			return broken(Atomic, "entries %d and %d of worker %q, rank %d, are one batch cut in two",
				r.seq, e.GetSeq(), e.GetWorker(), first.GetDpRank())
		}
	}
	r.seq, r.size = e.GetSeq(), size
	r.engineTime, r.ingestTime = e.GetEngineTimeUnixNano(), e.GetIngestTimeUnixNano()
	return nil
}
