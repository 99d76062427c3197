package checker_test

import (
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// filteredStream is a stream with a filter by worker "a" and the device tier. The filter causes holes in the seqs.
func filteredStream() stream {
	req := fromEarliest()
	req.Filter = &kvcastv1.Filter{
		Workers: []string{"a"}, Models: []string{"m-a"}, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE},
	}
	m := message(0, added(2, "a", 1), entry(5, "a", store(2, 0, 1), remove(5, 0, 1)))
	m.Position.Seq = 7
	return stream{req, []*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_EARLIEST, 0, 9),
		m, progress(7, 9), message(9, entry(11, "a", gap(8, 0))),
	}}
}

func TestFilteredStreams(t *testing.T) {
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(s *stream)
	}{
		{"good", "", func(*stream) {}},
		{"another worker", checker.Filtered, func(s *stream) { s.msgs[1].Entries[1].Worker = "b" }},
		{"another model", checker.Filtered, func(s *stream) { s.msgs[1].Entries[1].Model = "m" }},
		{"another tier", checker.Filtered, func(s *stream) {
			s.msgs[1].Entries[1].Events[1].Tier = kvcastv1.Tier_TIER_DISK
		}},
		{"a position that overtakes an entry", checker.Progress, func(s *stream) { s.msgs[3].Entries[0].Seq = 9 }},
		{"a position that overtakes an entry within a stream", checker.Progress, func(s *stream) {
			s.msgs[2] = message(7, entry(6, "a", store(6, 0, 3)))
		}},
		{"position behind its entries", checker.Progress, func(s *stream) { s.msgs[1].Position.Seq = 4 }},
		{"a message missing", checker.GapFree, func(s *stream) { s.msgs = append(s.msgs[:1:1], s.msgs[2:]...) }},
		{"event_ids run backwards", checker.GapFree, func(s *stream) { s.msgs[3].Entries[0].Events[0].EventId = 4 }},
		{"duplicate entry", checker.Unique, func(s *stream) { s.msgs[3].Entries[0].Seq = 5 }},
		{"an older entry", checker.Ordered, func(s *stream) { s.msgs[3].Entries[0].Seq = 4 }},
		{"event_ids have a hole, all tiers requested", checker.GapFree, func(s *stream) { s.req.Filter.Tiers = nil }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := filteredStream()
			tt.spoil(&s)
			_, err := play(t, []stream{s})
			wantProperty(t, err, tt.want)
		})
	}
}

func TestWorkerMayReturnWithTheFilteredModel(t *testing.T) {
	req := fromEarliest()
	req.Filter = &kvcastv1.Filter{Models: []string{"m-a"}}
	// Ids 1 to 6 and 9 to 11 were used under another model.
	s := stream{req, []*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_EARLIEST, 0, 9),
		message(0, added(4, "a", 7), removed(6, "a", 8), added(9, "a", 12)),
	}}
	_, err := play(t, []stream{s})
	wantProperty(t, err, "")

	s.msgs[1].Entries[1].Events[0].EventId = 9
	_, err = play(t, []stream{s})
	wantProperty(t, err, checker.GapFree)
}

func TestEmptyFilterSelectsEverything(t *testing.T) {
	streams := goodStreams()
	streams[1].req.Filter = &kvcastv1.Filter{}
	_, err := play(t, streams)
	wantProperty(t, err, "")
}
