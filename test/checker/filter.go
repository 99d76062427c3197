package checker

import (
	"fmt"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// filter is the requested Filter, with values derived from it.
type filter struct {
	workers, models []string
	tiers           []kvcastv1.Tier
}

func newFilter(f *kvcastv1.Filter) filter {
	return filter{workers: f.GetWorkers(), models: f.GetModels(), tiers: f.GetTiers()}
}

// orEmpty returns the filter, or an empty filter for nil.
func orEmpty(f *kvcastv1.Filter) *kvcastv1.Filter {
	if f == nil {
		return &kvcastv1.Filter{}
	}
	return f
}

// all reports whether the filter passes every entry.
func (f filter) all() bool {
	return len(f.workers) == 0 && len(f.models) == 0 && len(f.tiers) == 0
}

// check finds content outside the filter.
func (f filter) check(e *kvcastv1.Entry) error {
	if what := f.excludedPart(e.GetWorker(), e.GetModel()); what != "" {
		return broken(Filtered, "entry %d is of %s", e.GetSeq(), what)
	}
	for _, ev := range e.GetEvents() {
		if t := ev.GetTier(); t != kvcastv1.Tier_TIER_UNSPECIFIED && !f.hasTier(t) {
			return broken(Filtered, "event %d of entry %d is of tier %v", ev.GetEventId(), e.GetSeq(), t)
		}
	}
	return nil
}

// excludedPart returns the part of a worker that is outside the filter; empty if the filter includes the worker.
func (f filter) excludedPart(worker, model string) string {
	switch {
	case len(f.workers) > 0 && !slices.Contains(f.workers, worker):
		return fmt.Sprintf("worker %q", worker)
	case len(f.models) > 0 && !slices.Contains(f.models, model):
		return fmt.Sprintf("model %q", model)
	}
	return ""
}

func (f filter) hasTier(t kvcastv1.Tier) bool {
	return len(f.tiers) == 0 || slices.Contains(f.tiers, t)
}
