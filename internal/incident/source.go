package incident

import (
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

var _ feed.Observer = (*Log)(nil)

// RepairEnded implements feed.Observer.
func (l *Log) RepairEnded(r feed.RepairEnd) {
	kind := kvcastv1.IncidentKind_INCIDENT_KIND_REPAIR_FAILED
	if r.Complete {
		kind = kvcastv1.IncidentKind_INCIDENT_KIND_REPAIRED
	}
	l.Add(&kvcastv1.Incident{
		Kind: kind, Worker: r.Worker, DpRank: &r.Rank, Reason: r.Cause, Batches: r.Batches, DurationNano: uint64(max(0, r.Took)),
	})
}

// ConnectionChanged implements feed.Observer.
func (l *Log) ConnectionChanged(worker string, rank uint32, up bool, after time.Duration) {
	kind := kvcastv1.IncidentKind_INCIDENT_KIND_SOURCE_DOWN
	if up {
		kind = kvcastv1.IncidentKind_INCIDENT_KIND_SOURCE_UP
	}
	l.Add(&kvcastv1.Incident{Kind: kind, Worker: worker, DpRank: &rank, DurationNano: uint64(max(0, after))})
}

// AddEvent adds the incident that an event is, if it is one. It is for follow.Follower.Observe.
func (l *Log) AddEvent(from index.Origin, event *kvcastv1.RouterEvent) {
	i := &kvcastv1.Incident{Worker: from.Worker, DpRank: event.DpRank, Seq: from.Seq, TimeUnixNano: from.IngestTime}
	switch kind := event.GetEvent().(type) {
	case *kvcastv1.RouterEvent_WorkerAdded:
		i.Kind = kvcastv1.IncidentKind_INCIDENT_KIND_WORKER_ADDED
	case *kvcastv1.RouterEvent_WorkerRemoved:
		i.Kind, i.Reason = kvcastv1.IncidentKind_INCIDENT_KIND_WORKER_REMOVED, kind.WorkerRemoved.GetReason().String()
	case *kvcastv1.RouterEvent_Cleared:
		i.Tiers = kind.Cleared.GetTiers()
		switch reason := kind.Cleared.GetReason(); reason {
		case kvcastv1.Cleared_REASON_ENGINE_RESTARTED:
			i.Kind = kvcastv1.IncidentKind_INCIDENT_KIND_ENGINE_RESTARTED
		case kvcastv1.Cleared_REASON_UNREPAIRED_GAP:
			i.Kind, i.Reason = kvcastv1.IncidentKind_INCIDENT_KIND_GAP, reason.String()
		default:
			i.Kind, i.Reason = kvcastv1.IncidentKind_INCIDENT_KIND_CLEARED, reason.String()
		}
	case *kvcastv1.RouterEvent_Gap:
		i.Kind, i.Reason = kvcastv1.IncidentKind_INCIDENT_KIND_GAP, kind.Gap.GetReason().String()
		i.Tiers, i.Detail = kind.Gap.GetTiers(), kind.Gap.GetDetail()
		i.Batches, i.FirstSeq, i.LastSeq = kind.Gap.GetMissedBatches(), kind.Gap.GetFirstSeq(), kind.Gap.GetLastSeq()
		if kind.Gap.GetReason() == kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER {
			i.Kind = kvcastv1.IncidentKind_INCIDENT_KIND_CONFLICT
		}
	default: // it is a property of the engine, or of a later version
		return
	}
	l.Add(i)
}
