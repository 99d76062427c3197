package server

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// allTiers is every tier, and events without one.
const allTiers journal.Tiers = 0xff

// maxFilterNames is how many names a filter may list.
const maxFilterNames = 10_000

// filter is a Filter, made ready. A nil one takes everything.
type filter struct {
	workers map[string]struct{} // nil: all
	models  map[string]struct{} // nil: all
	tiers   journal.Tiers       // with bit 0: events without a tier pass
	// known remembers what was said of a source. A filter is one stream's.
	known map[*journal.Source]bool
}

// parseFilter checks a request's filter.
func parseFilter(f *kvcastv1.Filter, b journal.Bounds) (*filter, error) {
	if len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) == 0 {
		return nil, nil
	}
	if n := len(f.GetWorkers()) + len(f.GetModels()); n > maxFilterNames {
		return nil, errInvalid("filter", fmt.Sprintf("%d names are too many: at most %d are allowed", n, maxFilterNames), b)
	}
	out := &filter{
		workers: set(f.GetWorkers()),
		models:  set(f.GetModels()),
		tiers:   allTiers,
		known:   make(map[*journal.Source]bool),
	}
	if len(f.GetTiers()) > 0 {
		out.tiers = journal.TierBit(0)
	}
	for i, t := range f.GetTiers() {
		if _, ok := kvcastv1.Tier_name[int32(t)]; !ok || t == kvcastv1.Tier_TIER_UNSPECIFIED {
			return nil, errInvalid(fmt.Sprintf("filter.tiers[%d]", i), fmt.Sprintf(
				"%v is not allowed: want TIER_DEVICE, TIER_HOST_PINNED, TIER_DISK or TIER_EXTERNAL", t), b)
		}
		out.tiers |= journal.TierBit(uint8(t))
	}
	return out, nil
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
	wanted, ok := f.known[s]
	if !ok {
		wanted = f.worker(s.Worker, s.Model)
		if len(f.known) > maxFilterNames {
			clear(f.known) // sources come and go
		}
		f.known[s] = wanted
	}
	switch {
	case !wanted || tiers&f.tiers == 0:
		return journal.MatchNone
	case tiers&^f.tiers != 0:
		return journal.MatchSome
	}
	return journal.MatchAll
}

// journal returns the filter as the journal takes it.
func (f *filter) journal() journal.Filter {
	if f == nil {
		return nil
	}
	return f.match
}

// Field numbers of what cutEntries looks into.
const (
	responseEntries protowire.Number = 1
	entryEvents     protowire.Number = 6
	eventTier       protowire.Number = 3
)

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
				out = protowire.AppendTag(out, responseEntries, protowire.BytesType)
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
		if field == entryEvents {
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
		if field == eventTier {
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
