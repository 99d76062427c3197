package checker_test

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// play passes all streams to a Checker, and returns it with the first violation.
func play(t rapid.TB, streams []stream) (*checker.Checker, error) {
	t.Helper()
	c := checker.New(checker.Options{})
	return c, playOn(t, c, streams)
}

func playOn(t rapid.TB, c *checker.Checker, streams []stream) error {
	t.Helper()
	for _, s := range streams {
		if err := c.Begin(s.req); err != nil {
			t.Fatalf("Begin(%v): %v", s.req, err)
		}
		for _, msg := range s.msgs {
			if err := c.Receive(msg); err != nil {
				return err
			}
		}
	}
	return nil
}

// wantProperty fails unless err violates the property; an empty property means no error.
func wantProperty(t rapid.TB, err error, want checker.Property) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Fatalf("a good stream: %v", err)
		}
		return
	}
	var v *checker.Violation
	if !errors.As(err, &v) || v.Property != want {
		t.Fatalf("got %v, want a violation of %s", err, want)
	}
}

// goodStreams returns the streams of one subscriber without a filter: two workers, one of them
// removed and added again, a restart, a gap, an idle period, and two resumes.
//
//	stream 0: accepted | 1 2 3 | 4 | progress 4
//	stream 1: accepted | 5 6 7 | 8 9
//	stream 2: accepted | progress 9 | 10 11 12
func goodStreams() []stream {
	e := []*kvcastv1.Entry{
		1:  added(1, "a", 1),
		2:  entry(2, "a", store(2, 0, 1, 2, 3), remove(3, 0, 1)),
		3:  added(3, "b", 1),
		4:  entry(4, "b", store(2, 0, 1, 2)),
		5:  entry(5, "a", store(4, 0, 4), store(5, 0, 5), remove(6, 0, 2)),
		6:  removed(6, "b", 3),
		7:  added(7, "b", 4),
		8:  entry(8, "b", clearAll(5, 0, kvcastv1.Cleared_REASON_ENGINE_RESTARTED)),
		9:  entry(9, "b", store(6, 1, 7)),
		10: entry(10, "a", gap(7, 0)),
		11: entry(11, "a", store(8, 0, 6), store(9, 0, 8)),
		12: entry(12, "b", remove(7, 1, 7)),
	}
	e[8].EngineTimeUnixNano, e[10].EngineTimeUnixNano = 0, 0
	return []stream{
		{fromEarliest(), []*kvcastv1.SubscribeResponse{
			accepted(kvcastv1.Accepted_MODE_EARLIEST, 0, 3),
			message(0, e[1], e[2], e[3]), message(3, e[4]), progress(4, 4),
		}},
		{fromAfter(4), []*kvcastv1.SubscribeResponse{
			accepted(kvcastv1.Accepted_MODE_RESUME, 4, 7),
			message(4, e[5], e[6], e[7]), message(7, e[8], e[9]),
		}},
		{fromAfter(9), []*kvcastv1.SubscribeResponse{
			accepted(kvcastv1.Accepted_MODE_RESUME, 9, 9),
			progress(9, 9), message(9, e[10], e[11], e[12]),
		}},
	}
}

func TestCorrectStreamPasses(t *testing.T) {
	c, err := play(t, goodStreams())
	wantProperty(t, err, "")
	if got := c.Position(); !proto.Equal(got, at(12)) {
		t.Errorf("Position() = %v, want 12", got)
	}
	if err := c.Converged("a", 0, kvcastv1.Tier_TIER_DEVICE, set(3, 4, 5, 6, 8)); err != nil {
		t.Error(err)
	}
	if err := c.Converged("b", 1, kvcastv1.Tier_TIER_DEVICE, nil); err != nil {
		t.Error(err)
	}
}

func TestEachViolationNamesItsProperty(t *testing.T) {
	type msgs = []*kvcastv1.SubscribeResponse
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(s []stream)
	}{
		{"two entries swapped", checker.Ordered, func(s []stream) {
			e := s[0].msgs[1].Entries
			e[0], e[1] = e[1], e[0]
		}},
		{"an older entry after a newer", checker.Ordered, func(s []stream) {
			s[1].msgs[1].Entries[2].Seq = 5
			s[1].msgs[1].Entries[0].Seq = 6
			s[1].msgs[1].Entries[1].Seq = 7
		}},

		{"an entry twice in a message", checker.Unique, func(s []stream) {
			m := s[0].msgs[1]
			m.Entries = append(m.Entries, m.Entries[2])
		}},
		{"an entry twice over messages", checker.Unique, func(s []stream) {
			m := s[0].msgs[2]
			m.Entries = append([]*kvcastv1.Entry{s[0].msgs[1].Entries[2]}, m.Entries...)
		}},
		{"a message twice", checker.Unique, func(s []stream) {
			s[0].msgs = append(s[0].msgs, s[0].msgs[2])
		}},
		{"duplicate entry after a resume", checker.Unique, func(s []stream) {
			m := s[1].msgs[1]
			m.Entries = append([]*kvcastv1.Entry{s[0].msgs[2].Entries[0]}, m.Entries...)
		}},

		{"an entry missing", checker.GapFree, func(s []stream) {
			m := s[0].msgs[1]
			m.Entries = append(m.Entries[:1:1], m.Entries[2])
		}},
		{"the first entry missing", checker.GapFree, func(s []stream) {
			s[0].msgs[1].Entries = s[0].msgs[1].Entries[1:]
		}},
		{"the last entry missing", checker.GapFree, func(s []stream) {
			s[0].msgs[1].Entries = s[0].msgs[1].Entries[:2]
		}},
		{"a message missing", checker.GapFree, func(s []stream) {
			s[0].msgs = append(s[0].msgs[:1:1], s[0].msgs[2:]...)
		}},
		{"prev_seq wrong", checker.GapFree, func(s []stream) { s[0].msgs[2].PrevSeq = 2 }},
		{"prev_seq of progress wrong", checker.GapFree, func(s []stream) { s[0].msgs[3].PrevSeq = 3 }},
		{"prev_seq ignores the progress before", checker.GapFree, func(s []stream) { s[2].msgs[2].PrevSeq = 8 }},
		{"position beyond the last entry", checker.GapFree, func(s []stream) { s[0].msgs[1].Position.Seq = 4 }},
		{"event_id skips one", checker.GapFree, func(s []stream) { s[0].msgs[1].Entries[1].Events[1].EventId = 4 }},
		{"duplicate event_id", checker.GapFree, func(s []stream) { s[0].msgs[1].Entries[1].Events[1].EventId = 2 }},
		{"event_id skips one over a resume", checker.GapFree, func(s []stream) {
			for i, ev := range s[1].msgs[1].Entries[0].Events {
				ev.EventId = uint64(5 + i)
			}
		}},
		{"event_id restarts when a worker is added again", checker.GapFree, func(s []stream) {
			s[1].msgs[1].Entries[2].Events[0].EventId = 1
		}},
		{"event_id starts at two", checker.GapFree, func(s []stream) { s[0].msgs[1].Entries[0].Events[0].EventId = 2 }},
		{"resumed later than requested", checker.GapFree, func(s []stream) { s[1].msgs[0].Position.Seq = 5 }},
		{"resumed earlier than requested", checker.GapFree, func(s []stream) { s[1].msgs[0].Position.Seq = 3 }},
		{"earliest is not the oldest", checker.GapFree, func(s []stream) { s[0].msgs[0].Position.Seq = 1 }},

		{"an entry without events", checker.Atomic, func(s []stream) { s[0].msgs[1].Entries[1].Events = nil }},
		{"a batch cut in two", checker.Atomic, func(s []stream) {
			cutLast(s[2].msgs[2])
		}},
		{"an event about the worker with others", checker.Atomic, func(s []stream) {
			e := s[0].msgs[1].Entries
			e[0].Events = append(e[0].Events, store(2, 0, 1))
		}},
		{"an entry beyond 3 MiB not cut", checker.Atomic, func(s []stream) {
			ev := s[1].msgs[1].Entries[0].Events[0]
			ev.GetStored().BlockHashes = make([]uint64, 3<<17)
			ev.GetStored().TokensHashes = nil
			s[1].msgs = append(s[1].msgs[:1:1], message(4, s[1].msgs[1].Entries[0]))
		}},

		{"progress ahead", checker.Progress, func(s []stream) { s[0].msgs[3].Position.Seq = 5 }},
		{"progress behind", checker.Progress, func(s []stream) { s[0].msgs[3].Position.Seq = 3 }},
		{"position behind its entries", checker.Progress, func(s []stream) { s[0].msgs[1].Position.Seq = 2 }},

		{"digests not requested", checker.Filtered, func(s []stream) {
			s[0].msgs[3].Progress.Workers = []*kvcastv1.WorkerDigest{{Worker: "a"}}
		}},

		{"no Accepted", checker.Protocol, func(s []stream) { s[0].msgs = s[0].msgs[1:] }},
		{"no Accepted on resume", checker.Protocol, func(s []stream) { s[1].msgs = s[1].msgs[1:] }},
		{"Accepted twice", checker.Protocol, func(s []stream) {
			s[0].msgs = append(msgs{s[0].msgs[0]}, s[0].msgs...)
		}},
		{"Accepted without an epoch", checker.Protocol, func(s []stream) { s[0].msgs[0].Accepted.Epoch = "" }},
		{"Accepted in another mode", checker.Protocol, func(s []stream) {
			s[0].msgs[0].Accepted.Mode = kvcastv1.Accepted_MODE_LATEST
		}},
		{"Accepted with impossible bounds", checker.Protocol, func(s []stream) { s[1].msgs[0].Accepted.OldestSeq = 9 }},
		{"Accepted outside of its bounds", checker.Protocol, func(s []stream) { s[1].msgs[0].Accepted.NewestSeq = 3 }},
		{"resumed in another epoch", checker.Protocol, func(s []stream) {
			s[1].msgs[0].Accepted.Epoch = "e2"
			s[1].msgs[0].Position.Epoch = "e2"
		}},
		{"position of another epoch", checker.Protocol, func(s []stream) { s[0].msgs[2].Position.Epoch = "e2" }},
		{"entries without a position", checker.Protocol, func(s []stream) { s[0].msgs[2].Position = nil }},
		{"progress without a position", checker.Protocol, func(s []stream) { s[0].msgs[3].Position = nil }},
		{"an empty message", checker.Protocol, func(s []stream) { s[0].msgs[3].Progress = nil }},
		{"progress beside entries", checker.Protocol, func(s []stream) { s[0].msgs[2].Progress = &kvcastv1.Progress{} }},
		{"a snapshot where it should fail", checker.Protocol, func(s []stream) {
			s[0].req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_FAIL
			s[0].msgs[3] = &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: epoch}}
		}},
		{"a nil message", checker.Protocol, func(s []stream) { s[0].msgs[3] = nil }},
		{"several entries beyond 1 MiB", checker.Protocol, func(s []stream) {
			s[1].msgs[1].Entries[0].Events[0].GetStored().TokenIds = make([]uint32, 2<<20)
		}},
		{"seq 0", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[0].Seq = 0 }},
		{"no worker", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Worker = "" }},
		{"a worker never added", checker.Protocol, func(s []stream) {
			e := s[0].msgs[2].Entries[0]
			e.Worker, e.Model, e.Events[0].EventId = "c", "m-c", 1
		}},
		{"a worker added twice", checker.Protocol, func(s []stream) {
			s[0].msgs[2].Entries[0] = added(4, "b", 2)
		}},
		{"a worker removed and not added", checker.Protocol, func(s []stream) {
			s[1].msgs[1].Entries[2] = entry(7, "b", store(4, 0, 9))
		}},
		{"another model than the worker's", checker.Protocol, func(s []stream) { s[0].msgs[2].Entries[0].Model = "m" }},
		{"added with another model", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[0].Events[0].GetWorkerAdded().Model = "m"
		}},
		{"a time on a worker added", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[0].IngestTimeUnixNano = 1
		}},
		{"no event_id", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Events[0].EventId = 0 }},
		{"no kind", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Events[0].Event = nil }},
		{"no dp_rank", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Events[0].DpRank = nil }},
		{"a dp_rank on a worker added", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[0].Events[0].DpRank = proto.Uint32(0)
		}},
		{"no tier", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Events[0].Tier = 0 }},
		{"an unknown tier", checker.Protocol, func(s []stream) { s[0].msgs[1].Entries[1].Events[0].Tier = 9 }},
		{"a tier on a gap", checker.Protocol, func(s []stream) {
			s[2].msgs[2].Entries[0].Events[0].Tier = kvcastv1.Tier_TIER_DEVICE
		}},
		{"an empty store", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[0].GetStored().BlockHashes = nil
		}},
		{"too few tokens_hashes", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[0].GetStored().TokensHashes = []uint64{1}
		}},
		{"tokens_hashes of blocks without size", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[0].GetStored().BlockSize = 0
		}},
		{"token_ids short", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[0].GetStored().TokenIds = make([]uint32, 16)
		}},
		{"an empty lora_name", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[0].GetStored().LoraName = proto.String("")
		}},
		{"an empty remove", checker.Protocol, func(s []stream) {
			s[0].msgs[1].Entries[1].Events[1].GetRemoved().BlockHashes = nil
		}},
		{"cleared without a reason", checker.Protocol, func(s []stream) {
			s[1].msgs[2].Entries[0].Events[0].GetCleared().Reason = 0
		}},
		{"cleared of no tier", checker.Protocol, func(s []stream) {
			s[1].msgs[2].Entries[0].Events[0].GetCleared().Tiers = []kvcastv1.Tier{0}
		}},
		{"a gap without a reason", checker.Protocol, func(s []stream) {
			s[2].msgs[2].Entries[0].Events[0].GetGap().Reason = 0
		}},
		{"a gap that ends before its start", checker.Protocol, func(s []stream) {
			s[2].msgs[2].Entries[0].Events[0].GetGap().LastSeq = 6
		}},
		{"too many blocks, with seqs", checker.Protocol, func(s []stream) {
			s[2].msgs[2].Entries[0].Events[0].GetGap().Reason = kvcastv1.Gap_REASON_TOO_MANY_BLOCKS
		}},
		{"too many blocks, with batches", checker.Protocol, func(s []stream) {
			s[2].msgs[2].Entries[0].Events[0].Event = overfull(0, 0).Event
			s[2].msgs[2].Entries[0].Events[0].GetGap().MissedBatches = 1
		}},
		{"removed without a reason", checker.Protocol, func(s []stream) {
			s[1].msgs[1].Entries[1].Events[0].GetWorkerRemoved().Reason = 0
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			streams := goodStreams()
			tt.spoil(streams)
			c, err := play(t, streams)
			wantProperty(t, err, tt.want)
			if !errors.Is(c.Err(), err) {
				t.Errorf("Err() = %v, want the error of Receive", c.Err())
			}
			if again := c.Receive(progress(0, 0)); !errors.Is(again, err) {
				t.Errorf("a message after the violation: got %v, want %v again", again, err)
			}
		})
	}
}

// cutLast splits a message's last entry of worker "a" in two, between its events.
func cutLast(m *kvcastv1.SubscribeResponse) {
	first, last := m.Entries[1], m.Entries[2]
	second := proto.CloneOf(first)
	first.Events, second.Events = first.Events[:1], second.Events[1:]
	second.Seq++
	last.Seq++
	m.Entries = []*kvcastv1.Entry{m.Entries[0], first, second, last}
	m.Position = at(last.Seq)
}

func TestLargeBatchMayBeSplit(t *testing.T) {
	streams := goodStreams()
	m := streams[2].msgs[2]
	cutLast(m)
	big := m.Entries[1].Events[0].GetStored()
	big.TokensHashes, big.BlockHashes = nil, make([]uint64, 3<<17-16)
	// One entry per message: together they exceed 1 MiB.
	streams[2].msgs = append(streams[2].msgs[:2:2],
		message(9, m.Entries[0]), message(10, m.Entries[1]), message(11, m.Entries[2], m.Entries[3]))
	_, err := play(t, streams)
	wantProperty(t, err, "")
}

func TestTwoPublishersMayDeliverABatchTwice(t *testing.T) {
	streams := goodStreams()
	m := streams[2].msgs[2]
	m.Entries[0].Events[0].Event = &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER}}
	cutLast(m)
	_, err := play(t, streams)
	wantProperty(t, err, "")
}

func TestBatchTailMayBeItsOwnEntry(t *testing.T) {
	streams := goodStreams()
	cutLast(streams[2].msgs[2])
	wantProperty(t, playOn(t, checker.New(checker.Options{Tails: true}), streams), "")
}

func TestEntryWithoutEventsPassesIfTheJournalIsShared(t *testing.T) {
	for shared, want := range map[bool]checker.Property{true: "", false: checker.Atomic} {
		streams := goodStreams()
		last := streams[2].msgs[2]
		last.Entries, last.Position = append(last.Entries, entry(13, "a")), at(13)
		wantProperty(t, playOn(t, checker.New(checker.Options{Shared: shared}), streams), want)
	}
}

func TestBeginRejectsUnsupportedStarts(t *testing.T) {
	c := checker.New(checker.Options{})
	if err := playOn(t, c, goodStreams()[:1]); err != nil {
		t.Fatal(err)
	}
	filtered := fromAfter(4)
	filtered.Filter = &kvcastv1.Filter{Workers: []string{"a"}}
	for _, req := range []*kvcastv1.SubscribeRequest{fromEarliest(), fromLatest(), fromAfter(3), fromAfter(5), filtered} {
		if err := c.Begin(req); err == nil {
			t.Errorf("Begin(%v) after a stream up to 4: want an error", req)
		}
	}
	anyEpoch := fromAfter(4)
	anyEpoch.GetAfter().Epoch = ""
	snapshot := fromSnapshot()
	snapshot.Filter = filtered.Filter
	for _, req := range []*kvcastv1.SubscribeRequest{anyEpoch, {}, snapshot, fromAfter(4)} {
		if err := c.Begin(req); err != nil {
			t.Errorf("Begin(%v): %v", req, err)
		}
	}
}

func TestStreamMayStartInTheMiddle(t *testing.T) {
	last := goodStreams()[2]
	latest := stream{fromLatest(), append([]*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_LATEST, 9, 9)}, last.msgs[1:]...)}
	for _, s := range []stream{last, latest} {
		c, err := play(t, []stream{s})
		wantProperty(t, err, "")
		b := func(want map[uint64]struct{}) error { return c.Converged("b", 1, kvcastv1.Tier_TIER_DEVICE, want) }
		if err := b(set(40)); err != nil {
			t.Errorf("blocks stored before the stream are reported missing: %v", err)
		}
	}

	t.Run("latest is not the newest", func(t *testing.T) {
		latest.msgs[0].Accepted.NewestSeq = 10
		_, err := play(t, []stream{latest})
		wantProperty(t, err, checker.GapFree)
	})
	t.Run("an entry from before the start", func(t *testing.T) {
		s := goodStreams()[2]
		s.msgs[2].Entries[0].Seq = 9
		_, err := play(t, []stream{s})
		wantProperty(t, err, checker.GapFree)
	})
}
