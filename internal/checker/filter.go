package checker

import (
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// filter is the Filter asked for, with what follows from it.
type filter struct {
	workers, models []string
	tiers           []kvcastv1.Tier
}

func newFilter(f *kvcastv1.Filter) filter {
	return filter{workers: f.GetWorkers(), models: f.GetModels(), tiers: f.GetTiers()}
}

// normal returns a filter that asks for everything where none is given, so that
// the two compare equal.
func normal(f *kvcastv1.Filter) *kvcastv1.Filter {
	if f == nil {
		return &kvcastv1.Filter{}
	}
	return f
}

// all tells that every entry is asked for.
func (f filter) all() bool {
	return len(f.workers) == 0 && len(f.models) == 0 && len(f.tiers) == 0
}

// check finds what was not asked for.
func (f filter) check(e *kvcastv1.Entry) error {
	if len(f.workers) > 0 && !slices.Contains(f.workers, e.GetWorker()) {
		return broken(Filtered, "entry %d is of worker %q", e.GetSeq(), e.GetWorker())
	}
	if len(f.models) > 0 && !slices.Contains(f.models, e.GetModel()) {
		return broken(Filtered, "entry %d is of model %q", e.GetSeq(), e.GetModel())
	}
	if len(f.tiers) == 0 {
		return nil
	}
	for _, ev := range e.GetEvents() {
		if t := ev.GetTier(); t != kvcastv1.Tier_TIER_UNSPECIFIED && !slices.Contains(f.tiers, t) {
			return broken(Filtered, "event %d of entry %d is of tier %v", ev.GetEventId(), e.GetSeq(), t)
		}
	}
	return nil
}

func (f filter) hasTier(t kvcastv1.Tier) bool {
	return len(f.tiers) == 0 || slices.Contains(f.tiers, t)
}
