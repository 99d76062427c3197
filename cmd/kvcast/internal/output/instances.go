package output

import (
	"slices"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// HasOwners reports whether the workers are those of servers that share a journal.
func HasOwners(workers []*kvcastv1.WorkerStatus) bool {
	return slices.ContainsFunc(workers, func(w *kvcastv1.WorkerStatus) bool { return w.GetOwner() != nil })
}

// Owner returns the owner of a worker: the name of an instance, or - for none.
func Owner(w *kvcastv1.WorkerStatus) string {
	switch o := w.GetOwner(); {
	case o.GetInstanceId() == "":
		return "-"
	case o.GetHandedOver():
		return InstanceName(o.GetInstanceId()) + " (handed over)"
	default:
		return InstanceName(o.GetInstanceId())
	}
}

// InstanceName returns the name of an instance: the first characters of its id, which is random.
func InstanceName(id string) string { return Printable(id[:min(len(id), 8)]) }

// InstanceState returns the state of an instance: live, draining, cut off (from the engines) or dead.
func InstanceState(i *kvcastv1.InstanceStatus) string {
	switch {
	case !i.GetLive():
		return "dead"
	case i.GetDraining():
		return "draining"
	case i.GetCutOff():
		return "cut off"
	default:
		return "live"
	}
}

// InstanceStarted returns when an instance has started, in UTC.
func InstanceStarted(i *kvcastv1.InstanceStatus) string {
	return time.Unix(0, i.GetStartTimeUnixNano()).UTC().Format(time.RFC3339)
}
