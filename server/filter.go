package server

import (
	"fmt"
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// allTiers is every tier, and bit 0 for events without one.
const allTiers journal.Tiers = 0xff

// maxFilterNames bounds the names in a filter.
const maxFilterNames = 10_000

// maxKnownSources bounds a filter's cache. A larger one would use more memory per stream
// than it saves time: a lookup without it takes some 100 ns.
const maxKnownSources = 256

// filter is a parsed Filter. The nil filter selects everything. A filter belongs to one
// call, which releases it at its end.
type filter struct {
	workers map[string]struct{} // nil: all
	models  map[string]struct{} // nil: all
	tiers   journal.Tiers       // with bit 0: events without a tier always pass
	// known caches whether a source is selected; nil: all are.
	known map[*journal.Source]bool

	budget *budget.Budget
	bytes  int64 // reserved in budget
}

// parseFilter validates a request's filter and reserves its memory in the budget of all filters.
func parseFilter(f *kvcastv1.Filter, b journal.Bounds, bytes *budget.Budget) (*filter, error) {
	if len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) == 0 {
		return nil, nil
	}
	if n := len(f.GetWorkers()) + len(f.GetModels()); n > maxFilterNames {
		return nil, invalidField(b, "filter", "%d names are too many: at most %d are allowed", n, maxFilterNames)
	}
	tiers, err := tierSet(f.GetTiers(), b)
	if err != nil {
		return nil, err
	}
	out := &filter{tiers: tiers, budget: bytes, bytes: filterBytes(f)}
	if !bytes.Take(out.bytes) {
		return nil, errorf(ReasonFiltersTooLarge, b,
			"the filter needs %d bytes, and with those of the calls in progress more than %d, which is the limit; name fewer workers and models, try again later, or raise the limit (--subscribers-filter-bytes)",
			out.bytes, bytes.Limit())
	}
	out.workers, out.models = set(f.GetWorkers()), set(f.GetModels())
	if out.workers != nil || out.models != nil {
		out.known = make(map[*journal.Source]bool)
	}
	return out, nil
}

// release returns the filter's memory to the budget. The filter must not be used afterwards.
func (f *filter) release() {
	if f != nil {
		f.budget.Release(f.bytes)
	}
}

// filterBytes estimates the memory of a filter: its names, its sets of them, and its full
// cache. Duplicate names count twice.
func filterBytes(f *kvcastv1.Filter) int64 {
	const (
		fixed      = 128
		stringSlot = 16 + 1 // a string, and the map's control byte
		sourceSlot = 16 + 1 // a pointer, a padded bool, and the map's control byte
	)
	bytes := fixed + slots(len(f.GetWorkers()))*stringSlot + slots(len(f.GetModels()))*stringSlot
	if len(f.GetWorkers())+len(f.GetModels()) > 0 {
		bytes += slots(maxKnownSources) * sourceSlot
	}
	for _, names := range [][]string{f.GetWorkers(), f.GetModels()} {
		for _, name := range names {
			bytes += (len(name) + 15) &^ 15 // the allocator's size class, or more
		}
	}
	return int64(bytes)
}

// slots returns the slots of a map of n entries: a power of two, at most 7/8 filled.
func slots(n int) int {
	if n == 0 {
		return 0
	}
	return max(8, 1<<bits.Len(uint(n*8/7)))
}

// tierSet returns the tiers that a filter selects, with bit 0.
func tierSet(tiers []kvcastv1.Tier, b journal.Bounds) (journal.Tiers, error) {
	if len(tiers) == 0 {
		return allTiers, nil
	}
	set := journal.TierBit(0)
	for i, t := range tiers {
		if _, ok := kvcastv1.Tier_name[int32(t)]; !ok || t == kvcastv1.Tier_TIER_UNSPECIFIED {
			return 0, invalidField(b, fmt.Sprintf("filter.tiers[%d]", i),
				"%v is not allowed: want TIER_DEVICE, TIER_HOST_PINNED, TIER_DISK or TIER_EXTERNAL", t)
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

// worker reports whether the filter selects a worker.
func (f *filter) worker(name, model string) bool {
	if f == nil {
		return true
	}
	return contains(f.workers, name) && contains(f.models, model)
}

func contains(s map[string]struct{}, name string) bool {
	_, ok := s[name]
	return ok || s == nil
}

// tierSet returns the tiers whose blocks are selected.
func (f *filter) tierSet() journal.Tiers {
	if f == nil {
		return allTiers
	}
	return f.tiers
}

// match implements journal.Filter.
func (f *filter) match(_ uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
	selected := f.selects(s)
	switch {
	case !selected || tiers&f.tiers == 0:
		return journal.MatchNone
	case tiers&^f.tiers != 0:
		return journal.MatchSome
	}
	return journal.MatchAll
}

// selects reports whether the filter selects a source, in some tier.
func (f *filter) selects(s *journal.Source) bool {
	if f.known == nil {
		return true
	}
	selected, ok := f.known[s]
	if !ok {
		selected = f.worker(s.Worker, s.Model)
		if len(f.known) >= maxKnownSources {
			clear(f.known) // it may be full of sources that are gone
		}
		f.known[s] = selected
	}
	return selected
}

// journal returns the filter for a journal.Query.
func (f *filter) journal() journal.Filter {
	if f == nil {
		return nil
	}
	return f.match
}

// trimEntries returns a copy of encoded entries that has only the events of some tiers. It ends at the first
// malformed entry.
func trimEntries(slices [][]byte, tiers journal.Tiers) []byte {
	var out, entry []byte
	for _, b := range slices {
		for len(b) > 0 {
			_, _, n := protowire.ConsumeField(b)
			if n < 0 {
				return out
			}
			var events bool
			entry, events = trimEntry(entry[:0], message(b[:n]), tiers)
			b = b[n:]
			if events {
				out = protowire.AppendTag(out, kvcastv1.ResponseEntriesField, protowire.BytesType)
				out = protowire.AppendBytes(out, entry)
			}
		}
	}
	return out
}

// trimEntry appends an entry with only the events of some tiers, and reports whether there are any.
func trimEntry(dst, entry []byte, tiers journal.Tiers) (_ []byte, events bool) {
	for len(entry) > 0 {
		number, _, n := protowire.ConsumeField(entry)
		if n < 0 {
			return dst, false
		}
		field := entry[:n]
		entry = entry[n:]
		if number == kvcastv1.EntryEventsField {
			if tiers&tierOf(message(field)) == 0 {
				continue
			}
			events = true
		}
		dst = append(dst, field...)
	}
	return dst, events
}

// message returns the contents of an encoded field that is a message.
func message(field []byte) []byte {
	_, _, n := protowire.ConsumeTag(field)
	contents, _ := protowire.ConsumeBytes(field[n:])
	return contents
}

// tierOf returns the set of an encoded event's tier.
func tierOf(event []byte) journal.Tiers {
	for len(event) > 0 {
		number, _, n := protowire.ConsumeField(event)
		if n < 0 {
			break
		}
		if number == kvcastv1.RouterEventTierField {
			tier, _ := protowire.ConsumeVarint(event[protowire.SizeTag(number):])
			return journal.TierBit(uint8(tier))
		}
		event = event[n:]
	}
	return journal.TierBit(0)
}
