package server

import (
	"fmt"
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// allTiers is every tier, and events without one.
const allTiers journal.Tiers = 0xff

// maxFilterNames is how many names a filter may list.
const maxFilterNames = 10_000

// maxKnownSources is how many sources a filter remembers its judgement of. A larger
// cache would cost every stream more than it saves: judging a source again takes
// some 100 ns.
const maxKnownSources = 256

// filter is a Filter, made ready. A nil one takes everything. Whoever made it calls
// release when its call ends.
type filter struct {
	workers map[string]struct{} // nil: all
	models  map[string]struct{} // nil: all
	tiers   journal.Tiers       // with bit 0: events without a tier pass
	// known caches whether a source is wanted, of maxKnownSources at most. A filter is
	// one stream's. nil where every source is.
	known map[*journal.Source]bool

	budget *budget.Budget
	bytes  int64 // taken from budget
}

// parseFilter checks a request's filter, and takes what it will occupy from the
// budget of all filters.
func parseFilter(f *kvcastv1.Filter, b journal.Bounds, bytes *budget.Budget) (*filter, error) {
	if len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) == 0 {
		return nil, nil
	}
	if n := len(f.GetWorkers()) + len(f.GetModels()); n > maxFilterNames {
		return nil, errInvalid("filter", fmt.Sprintf("%d names are too many: at most %d are allowed", n, maxFilterNames), b)
	}
	tiers, err := tierSet(f.GetTiers(), b)
	if err != nil {
		return nil, err
	}
	out := &filter{tiers: tiers, budget: bytes, bytes: filterBytes(f)}
	if !bytes.Take(out.bytes) {
		return nil, errFiltersTooLarge(out.bytes, bytes.Limit(), b)
	}
	out.workers, out.models = set(f.GetWorkers()), set(f.GetModels())
	if out.workers != nil || out.models != nil {
		out.known = make(map[*journal.Source]bool)
	}
	return out, nil
}

// release returns what the filter took from the budget. The filter is not used
// afterwards.
func (f *filter) release() {
	if f != nil {
		f.budget.Release(f.bytes)
	}
}

// filterBytes is about what a filter occupies: its names, its sets of them, and its
// cache when that is full. Names that are there twice count twice.
func filterBytes(f *kvcastv1.Filter) int64 {
	const (
		bare       = 128
		stringSlot = 16 + 1 // a string, and a byte of the map's own
		sourceSlot = 16 + 1 // a pointer, a bool with its padding, and the same
	)
	bytes := bare + slots(len(f.GetWorkers()))*stringSlot + slots(len(f.GetModels()))*stringSlot
	if len(f.GetWorkers())+len(f.GetModels()) > 0 {
		bytes += slots(maxKnownSources) * sourceSlot
	}
	for _, names := range [][]string{f.GetWorkers(), f.GetModels()} {
		for _, name := range names {
			bytes += (len(name) + 15) &^ 15 // which is what the allocator rounds to, or more
		}
	}
	return int64(bytes)
}

// slots is how many a map of n entries has: a power of two, at most 7/8 filled.
func slots(n int) int {
	if n == 0 {
		return 0
	}
	return max(8, 1<<bits.Len(uint(n*8/7)))
}

// tierSet is the tiers that a filter takes, with events that have none.
func tierSet(tiers []kvcastv1.Tier, b journal.Bounds) (journal.Tiers, error) {
	if len(tiers) == 0 {
		return allTiers, nil
	}
	set := journal.TierBit(0)
	for i, t := range tiers {
		if _, ok := kvcastv1.Tier_name[int32(t)]; !ok || t == kvcastv1.Tier_TIER_UNSPECIFIED {
			return 0, errInvalid(fmt.Sprintf("filter.tiers[%d]", i), fmt.Sprintf(
				"%v is not allowed: want TIER_DEVICE, TIER_HOST_PINNED, TIER_DISK or TIER_EXTERNAL", t), b)
		}
		set |= journal.TierBit(uint8(t))
	}
	return set, nil
}

func set(names []string) map[string]struct{} {
	if len(names) == 0 {
		return nil
	}
	s := make(map[string]struct{}, len(names))
	for _, n := range names {
		s[n] = struct{}{}
	}
	return s
}

// worker tells whether a worker's events are wanted.
func (f *filter) worker(name, model string) bool {
	if f == nil {
		return true
	}
	return listed(f.workers, name) && listed(f.models, model)
}

func listed(s map[string]struct{}, name string) bool {
	if s == nil {
		return true
	}
	_, ok := s[name]
	return ok
}

// tierSet is the tiers whose blocks are wanted.
func (f *filter) tierSet() journal.Tiers {
	if f == nil {
		return allTiers
	}
	return f.tiers
}

// match is the journal's filter.
func (f *filter) match(_ uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
	wanted := f.wants(s)
	switch {
	case !wanted || tiers&f.tiers == 0:
		return journal.MatchNone
	case tiers&^f.tiers != 0:
		return journal.MatchSome
	}
	return journal.MatchAll
}

// wants tells whether a source's events are wanted, of some tier.
func (f *filter) wants(s *journal.Source) bool {
	if f.known == nil {
		return true
	}
	wanted, ok := f.known[s]
	if !ok {
		wanted = f.worker(s.Worker, s.Model)
		if len(f.known) >= maxKnownSources {
			clear(f.known) // sources come and go
		}
		f.known[s] = wanted
	}
	return wanted
}

// journal returns the filter as the journal takes it.
func (f *filter) journal() journal.Filter {
	if f == nil {
		return nil
	}
	return f.match
}

// cutEntries returns a copy of encoded entries without the events of tiers that
// are not wanted. What is not protobuf as the journal has it ends the copy.
func cutEntries(slices [][]byte, want journal.Tiers) []byte {
	var out, entry []byte
	for _, b := range slices {
		for len(b) > 0 {
			_, _, n := protowire.ConsumeTag(b)
			body, m := protowire.ConsumeBytes(b[max(n, 0):])
			if n < 0 || m < 0 {
				return out
			}
			b = b[n+m:]
			var events bool
			if entry, events = cutEntry(entry[:0], body, want); events {
				out = protowire.AppendTag(out, kvcastv1.ResponseEntriesField, protowire.BytesType)
				out = protowire.AppendBytes(out, entry)
			}
		}
	}
	return out
}

// cutEntry appends an entry without the events that are not wanted, and tells
// whether any is left.
func cutEntry(dst, entry []byte, want journal.Tiers) (_ []byte, events bool) {
	for len(entry) > 0 {
		field, typ, n := protowire.ConsumeTag(entry)
		if n < 0 {
			return dst, false
		}
		m := protowire.ConsumeFieldValue(field, typ, entry[n:])
		if m < 0 {
			return dst, false
		}
		whole := entry[:n+m]
		entry = entry[n+m:]
		if field == kvcastv1.EntryEventsField {
			event, _ := protowire.ConsumeBytes(whole[n:])
			if want&tierOf(event) == 0 {
				continue
			}
			events = true
		}
		dst = append(dst, whole...)
	}
	return dst, events
}

// tierOf returns the tier of an encoded event, as a set.
func tierOf(event []byte) journal.Tiers {
	for len(event) > 0 {
		field, typ, n := protowire.ConsumeTag(event)
		if n < 0 {
			break
		}
		if field == kvcastv1.RouterEventTierField {
			tier, _ := protowire.ConsumeVarint(event[n:])
			return journal.TierBit(uint8(tier))
		}
		m := protowire.ConsumeFieldValue(field, typ, event[n:])
		if m < 0 {
			break
		}
		event = event[n+m:]
	}
	return journal.TierBit(0)
}
