package server

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// allTiers is the set of all tiers and of bit 0, which is the bit of events without a tier.
const allTiers kvblock.Tiers = 0xff

// maxFilterNames bounds the workers and models in a filter.
const maxFilterNames = 10_000

// maxKnownSources bounds the sources in a filter's cache. A lookup in the sets of names takes some 100 ns, so a
// larger cache is not worth its memory per stream.
const maxKnownSources = 256

// filter is the parsed Filter of one call. The call releases the filter when it ends.
type filter struct {
	workers map[string]struct{} // nil: all
	models  map[string]struct{} // nil: all
	tiers   kvblock.Tiers       // includes bit 0, since events without a tier are always selected
	// known caches whether a source is selected; nil: all sources are.
	known map[*journal.Source]bool

	// release returns the filter's memory to the limits. The filter must not be used afterwards.
	release func()
}

// parseFilter validates a request's filter and reserves its memory within the limits of all filters.
func parseFilter(ctx context.Context, f *kvcastv1.Filter, b journal.Bounds, limits *admission.Bytes) (*filter, error) {
	names := len(f.GetWorkers()) + len(f.GetModels())
	if names+len(f.GetTiers()) == 0 {
		return &filter{tiers: allTiers, release: func() {}}, nil
	}
	if names > maxFilterNames {
		return nil, callerror.InvalidField(b, "filter", "%d names are too many: at most %d are allowed", names, maxFilterNames)
	}
	tiers, err := tierSet(f.GetTiers(), b)
	if err != nil {
		return nil, err
	}
	bytes := filterBytes(f)
	release, exceeded := limits.Reserve(ctx, bytes)
	if exceeded > 0 {
		return nil, callerror.New(callerror.FiltersTooLarge, b,
			"the filter needs %d bytes, and with the filters of the calls in progress more than %d, which is the limit; name fewer workers and models, try again later, or raise the limit (--subscribers-filter-bytes)",
			bytes, exceeded)
	}
	out := &filter{tiers: tiers, release: release}
	out.workers, out.models = nameSet(f.GetWorkers()), nameSet(f.GetModels())
	if names > 0 {
		out.known = make(map[*journal.Source]bool)
	}
	return out, nil
}

// filterBytes estimates the memory of a filter: its sets of names and its full cache. Duplicate names count twice.
func filterBytes(f *kvcastv1.Filter) int64 {
	const (
		fixed  = 128
		known  = maxKnownSources * 2 * 17 // a map slot has a pointer, a bool and a control byte; half of the slots are empty
		byName = 40                       // a map slot has a string and a control byte, and some slots are empty
	)
	bytes := fixed
	for _, names := range [][]string{f.GetWorkers(), f.GetModels()} {
		for _, name := range names {
			bytes += byName + len(name)
		}
	}
	if bytes > fixed {
		bytes += known
	}
	return int64(bytes)
}

// tierSet returns the tiers of a Filter and bit 0.
func tierSet(tiers []kvcastv1.Tier, b journal.Bounds) (kvblock.Tiers, error) {
	if len(tiers) == 0 {
		return allTiers, nil
	}
	set := kvblock.TierBit(0)
	for i, t := range tiers {
		if _, ok := kvcastv1.Tier_name[int32(t)]; !ok || t == kvcastv1.Tier_TIER_UNSPECIFIED {
			return 0, callerror.InvalidField(b, fmt.Sprintf("filter.tiers[%d]", i),
				"%v is not allowed: want TIER_DEVICE, TIER_HOST_PINNED, TIER_DISK or TIER_EXTERNAL", t)
		}
		set |= kvblock.TierBit(uint8(t))
	}
	return set, nil
}

func nameSet(names []string) map[string]struct{} {
	if len(names) == 0 {
		return nil
	}
	s := make(map[string]struct{}, len(names))
	for _, n := range names {
		s[n] = struct{}{}
	}
	return s
}

func (f *filter) worker(name, model string) bool {
	return contains(f.workers, name) && contains(f.models, model)
}

func contains(s map[string]struct{}, name string) bool {
	_, ok := s[name]
	return ok || s == nil
}

// match implements journal.Filter.
func (f *filter) match(_ uint64, s *journal.Source, tiers kvblock.Tiers) journal.Match {
	switch {
	case !f.selects(s) || tiers&f.tiers == 0:
		return journal.MatchNone
	case tiers&^f.tiers != 0:
		return journal.MatchSome
	}
	return journal.MatchAll
}

// selects reports whether the filter selects a source's worker.
func (f *filter) selects(s *journal.Source) bool {
	if f.known == nil {
		return true
	}
	selected, ok := f.known[s]
	if !ok {
		selected = f.worker(s.Worker, s.Model)
		if len(f.known) >= maxKnownSources {
			clear(f.known) // sources may have been removed
		}
		f.known[s] = selected
	}
	return selected
}

// journal returns the filter for a journal.Query. A nil filter makes reads faster.
func (f *filter) journal() journal.Filter {
	if f.known == nil && f.tiers == allTiers {
		return nil
	}
	return f.match
}

// trimEntries returns a copy of encoded entries without the events of other tiers, and without entries that have
// no event left. It ends at the first malformed entry.
func trimEntries(slices [][]byte, tiers kvblock.Tiers) []byte {
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

// trimEntry appends an entry without the events of other tiers, and reports whether it has an event left.
func trimEntry(dst, entry []byte, tiers kvblock.Tiers) (_ []byte, events bool) {
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

// message returns the contents of an encoded field whose type is a message.
func message(field []byte) []byte {
	_, _, n := protowire.ConsumeTag(field)
	contents, _ := protowire.ConsumeBytes(field[n:])
	return contents
}

// tierOf returns the bit of an encoded event's tier.
func tierOf(event []byte) kvblock.Tiers {
	for len(event) > 0 {
		number, _, n := protowire.ConsumeField(event)
		if n < 0 {
			break
		}
		if number == kvcastv1.RouterEventTierField {
			tier, _ := protowire.ConsumeVarint(event[protowire.SizeTag(number):])
			return kvblock.TierBit(uint8(tier))
		}
		event = event[n:]
	}
	return kvblock.TierBit(0)
}
