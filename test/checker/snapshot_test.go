package checker_test

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// snapshotStreams returns the streams of a subscriber that starts with a snapshot, receives
// another one in mid-stream, which restarts, and a third one instead of resuming. During the first
// snapshot, worker "c" is removed and added again.
//
//	stream 0: 0 accepted, 1 begin, 2 worker a, 3 4 blocks, 5 worker b, 6 blocks,
//	          7 8 entries, 9 end 12, 10 entries 13 14, 11 progress 14,
//	          12 begin, 13 worker a, 14 begin, 15 worker a, 16 blocks, 17 worker c,
//	          18 entries, 19 end 20, 20 entry 21
//	stream 1: 0 accepted, 1 begin, 2 end 40, 3 entry 41
//	stream 2: 0 accepted after 41, 1 entry 42
func snapshotStreams() []stream {
	return []stream{
		{fromSnapshot(), []*kvcastv1.SubscribeResponse{
			announced(3, 6),
			snapshotBegin(),
			snapshotWorker("a", 4, 1),
			snapshotBlocks("a", store(0, 0, 1, 2, 3), child(0, 0, 3, 4, 5), child(0, 0, 99, 6), child(0, 1, 2, 1)),
			snapshotBlocks("a", onDisk(store(0, 0, 1))),
			snapshotWorker("b", 2),
			snapshotBlocks("b", store(0, 0, 1, 2)),
			snapshotEntries(entry(7, "c", store(5, 0, 5)), removed(8, "c", 6),
				entry(10, "a", store(5, 0, 7), remove(6, 0, 6))),
			snapshotEntries(added(11, "c", 7), entry(12, "c", store(8, 0, 8))),
			snapshotEnd(12),
			message(12, entry(13, "b", remove(3, 0, 2)), entry(14, "c", store(9, 0, 9))),
			progress(14, 14),
			snapshotBegin(),
			snapshotWorker("a", 8),
			snapshotBegin(),
			snapshotWorker("a", 8),
			snapshotBlocks("a", store(0, 0, 1)),
			snapshotWorker("c", 10, 0),
			snapshotEntries(entry(14, "c", store(11, 0, 9)), entry(20, "a", store(9, 0, 2))),
			snapshotEnd(20),
			message(20, entry(21, "a", store(10, 0, 3))),
		}},
		{fromAfter(21), []*kvcastv1.SubscribeResponse{
			announced(30, 40), snapshotBegin(), snapshotEnd(40), message(40, added(41, "d", 3)),
		}},
		{fromAfter(41), []*kvcastv1.SubscribeResponse{
			accepted(kvcastv1.Accepted_MODE_RESUME, 41, 41), message(41, entry(42, "d", store(4, 0, 1))),
		}},
	}
}

func TestCorrectSnapshotsPass(t *testing.T) {
	s := snapshotStreams()
	s[0].msgs = s[0].msgs[:12]
	c, err := play(t, s[:1])
	wantProperty(t, err, "")
	if got := c.Position(); !proto.Equal(got, at(14)) {
		t.Errorf("Position() = %v, want 14", got)
	}
	wantProperty(t, c.Converged("a", 0, device, set(1, 2, 3, 4, 5, 7)), "")
	wantProperty(t, c.Converged("a", 0, disk, set(1)), "")
	wantProperty(t, c.Converged("b", 0, device, set(1)), "")
	wantProperty(t, c.Converged("c", 0, device, set(8, 9)), "")
	wantProperty(t, c.Converged("c", 0, device, set(5, 8, 9)), checker.Convergent)
	wantProperty(t, c.Converged("z", 0, device, set(1)), checker.Convergent)
	wantProperty(t, c.Converged("a", 1, device, set(7)), "") // incomplete
	wantProperty(t, c.Reported("a", 1), "")
	wantProperty(t, c.Reported("a", 0), checker.Reported)

	c, err = play(t, snapshotStreams())
	wantProperty(t, err, "")
	wantProperty(t, c.Converged("a", 0, device, nil), "")
	wantProperty(t, c.Converged("d", 0, device, set(1)), "")
	wantProperty(t, c.Reported("c", 0), "")
}

func TestPartialSnapshotHasNoPosition(t *testing.T) {
	s := snapshotStreams()[0]
	s.msgs = s.msgs[:16]
	c, err := play(t, []stream{s})
	wantProperty(t, err, "")
	if got := c.Position(); got != nil {
		t.Errorf("Position() within a snapshot = %v, want none", got)
	}
	for _, req := range []*kvcastv1.SubscribeRequest{fromAfter(14), fromAfter(0), fromEarliest(), fromLatest()} {
		if err := c.Begin(req); err == nil {
			t.Errorf("Begin(%v) after a part of a snapshot: want an error", req)
		}
	}
	wantProperty(t, playOn(t, c, snapshotStreams()), "")
}

func TestViewIsKeptUntilSnapshotBegin(t *testing.T) {
	c, err := play(t, goodStreams()[:1])
	wantProperty(t, err, "")
	if err := c.Begin(fromSnapshot()); err != nil {
		t.Fatal(err)
	}
	wantProperty(t, c.Receive(announced(1, 9)), "")
	if got := c.Position(); !proto.Equal(got, at(4)) {
		t.Errorf("Position() = %v, want 4 still", got)
	}
	wantProperty(t, playOn(t, c, goodStreams()[1:]), "")
}

func TestEachSnapshotViolationNamesItsProperty(t *testing.T) {
	fail := kvcastv1.GapPolicy_GAP_POLICY_FAIL
	drop := func(s *stream, i int) { s.msgs = slices.Delete(s.msgs, i, i+1) }
	insert := func(s *stream, i int, m ...*kvcastv1.SubscribeResponse) { s.msgs = slices.Insert(s.msgs, i, m...) }
	swap := func(s *stream, i int) { s.msgs[i], s.msgs[i+1] = s.msgs[i+1], s.msgs[i] }
	blocks := func(s []stream, i int) *[]*kvcastv1.RouterEvent { return &s[0].msgs[i].SnapshotBlocks[0].Events }
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(s []stream)
	}{
		{"Accepted with a position", checker.Protocol, func(s []stream) { s[0].msgs[0].Position = at(6) }},
		{"Accepted with a prev_seq", checker.Protocol, func(s []stream) { s[0].msgs[0].PrevSeq = 6 }},
		{"Accepted in another mode", checker.Protocol, func(s []stream) {
			s[0].msgs[0] = accepted(kvcastv1.Accepted_MODE_LATEST, 6, 6)
		}},
		{"a snapshot instead of the latest", checker.Protocol, func(s []stream) { s[0].req = fromLatest() }},
		{"a snapshot instead of the earliest", checker.Protocol, func(s []stream) { s[0].req = fromEarliest() }},
		{"a snapshot instead of a retained entry", checker.Protocol, func(s []stream) {
			s[1].msgs[0].Accepted.OldestSeq = 22
		}},
		{"a snapshot instead of failing to resume", checker.Protocol, func(s []stream) { s[1].req.GapPolicy = fail }},
		{"a snapshot in mid-stream instead of failing", checker.Protocol, func(s []stream) { s[0].req.GapPolicy = fail }},
		{"no SnapshotBegin", checker.Protocol, func(s []stream) { drop(&s[0], 1) }},
		{"entries before SnapshotBegin", checker.Protocol, func(s []stream) { swap(&s[1], 1); s[1].msgs[1] = s[1].msgs[3] }},
		{"no SnapshotBegin in mid-stream", checker.Protocol, func(s []stream) { drop(&s[0], 12); drop(&s[0], 13) }},
		{"SnapshotBegin without an epoch", checker.Protocol, func(s []stream) { s[0].msgs[1].SnapshotBegin.Epoch = "" }},
		{"SnapshotBegin of another epoch", checker.Protocol, func(s []stream) { s[0].msgs[1].SnapshotBegin.Epoch = "e2" }},
		{"SnapshotBegin with a position", checker.Protocol, func(s []stream) { s[0].msgs[12].Position = at(14) }},
		{"a worker with a position", checker.Protocol, func(s []stream) { s[0].msgs[2].Position = at(6) }},
		{"blocks with a prev_seq", checker.Protocol, func(s []stream) { s[0].msgs[3].PrevSeq = 6 }},
		{"entries with a position", checker.Protocol, func(s []stream) { s[0].msgs[7].Position = at(10) }},
		{"progress within", checker.Protocol, func(s []stream) { insert(&s[0], 6, progress(6, 6)) }},
		{"digests within", checker.Protocol, func(s []stream) {
			insert(&s[0], 6, &kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: []*kvcastv1.WorkerDigest{{Worker: "w"}}}})
		}},
		{"Accepted within", checker.Protocol, func(s []stream) { insert(&s[0], 6, announced(1, 6)) }},
		{"a worker with its blocks", checker.Protocol, func(s []stream) {
			s[0].msgs[2].SnapshotBlocks = s[0].msgs[3].SnapshotBlocks
		}},
		{"blocks beyond 1 MiB", checker.Protocol, func(s []stream) {
			(*blocks(s, 3))[0].GetStored().BlockHashes = make([]uint64, 1<<17)
		}},
		{"a worker after the end", checker.Protocol, func(s []stream) { insert(&s[0], 10, snapshotWorker("z", 1)) }},
		{"the end twice", checker.Protocol, func(s []stream) { insert(&s[0], 10, snapshotEnd(12)) }},
		{"no end", checker.Protocol, func(s []stream) { drop(&s[0], 9) }},
		{"the end without a position", checker.Protocol, func(s []stream) { s[0].msgs[9].Position = nil }},
		{"the end without its position", checker.Protocol, func(s []stream) { s[0].msgs[9].SnapshotEnd.Position = nil }},
		{"the end with two positions", checker.Protocol, func(s []stream) { s[0].msgs[9].SnapshotEnd.Position.Seq = 13 }},
		{"the end in another epoch", checker.Protocol, func(s []stream) {
			s[0].msgs[9].SnapshotEnd.Position.Epoch, s[0].msgs[9].Position.Epoch = "e2", "e2"
		}},
		{"prev_seq of the end", checker.GapFree, func(s []stream) { s[0].msgs[19].PrevSeq = 14 }},
		{"prev_seq after the end", checker.GapFree, func(s []stream) { s[0].msgs[10].PrevSeq = 6 }},

		{"a worker without a name", checker.Protocol, func(s []stream) { s[0].msgs[2].SnapshotWorker.Worker = "" }},
		{"a worker without its record", checker.Protocol, func(s []stream) { s[0].msgs[2].SnapshotWorker.Added = nil }},
		{"a worker without an event_id", checker.Protocol, func(s []stream) { s[0].msgs[2].SnapshotWorker.LastEventId = 0 }},
		{"a worker twice", checker.Snapshot, func(s []stream) { s[0].msgs[5] = snapshotWorker("a", 4) }},
		{"an unannounced worker, with an entry", checker.Snapshot, func(s []stream) {
			s[0].msgs = slices.Delete(s[0].msgs, 2, 5)
		}},
		{"an unannounced worker, with an entry later", checker.Snapshot, func(s []stream) {
			s[0].msgs = slices.Delete(s[0].msgs, 5, 7)
		}},
		{"a worker unannounced at the end, and not removed", checker.Snapshot, func(s []stream) {
			s[0].msgs[7].Entries = slices.Delete(s[0].msgs[7].Entries, 1, 3)
			drop(&s[0], 8)
		}},
		{"an unannounced worker, added again", checker.Protocol, func(s []stream) {
			s[0].msgs[7].Entries = slices.Delete(s[0].msgs[7].Entries, 1, 2)
			s[0].msgs[8].Entries[0].Events[0].EventId = 6
		}},
		{"an announced worker, added", checker.Protocol, func(s []stream) { s[0].msgs[8].Entries[0] = added(11, "b", 3) }},
		{"another model than announced", checker.Protocol, func(s []stream) { s[0].msgs[10].Entries[0].Model = "m" }},

		{"blocks before any worker", checker.Snapshot, func(s []stream) { swap(&s[0], 2) }},
		{"blocks of another worker", checker.Snapshot, func(s []stream) { swap(&s[0], 4) }},
		{"blocks of an earlier worker", checker.Snapshot, func(s []stream) {
			insert(&s[0], 7, snapshotBlocks("a", store(0, 0, 40)))
		}},
		{"blocks after entries", checker.Snapshot, func(s []stream) { swap(&s[0], 6) }},
		{"a worker after entries", checker.Snapshot, func(s []stream) { insert(&s[0], 8, snapshotWorker("z", 1)) }},
		{"blocks of no worker", checker.Protocol, func(s []stream) { s[0].msgs[3].SnapshotBlocks[0].Worker = "" }},
		{"blocks without events", checker.Protocol, func(s []stream) { *blocks(s, 3) = nil }},
		{"blocks removed", checker.Protocol, func(s []stream) { (*blocks(s, 3))[0] = remove(0, 0, 1) }},
		{"blocks with an event_id", checker.Protocol, func(s []stream) { (*blocks(s, 3))[0].EventId = 4 }},
		{"blocks without a dp_rank", checker.Protocol, func(s []stream) { (*blocks(s, 3))[0].DpRank = nil }},
		{"blocks without a tier", checker.Protocol, func(s []stream) { (*blocks(s, 3))[0].Tier = 0 }},
		{"blocks with token_ids", checker.Protocol, func(s []stream) {
			(*blocks(s, 3))[0].GetStored().TokenIds = make([]uint32, 48)
		}},
		{"too few tokens_hashes", checker.Protocol, func(s []stream) {
			(*blocks(s, 3))[0].GetStored().TokensHashes = []uint64{1}
		}},
		{"a block twice in an event", checker.Snapshot, func(s []stream) {
			(*blocks(s, 3))[0].GetStored().BlockHashes[1] = 1
		}},
		{"a block twice", checker.Snapshot, func(s []stream) { s[0].msgs[4] = snapshotBlocks("a", store(0, 1, 1)) }},
		{"a parent after its child", checker.Snapshot, func(s []stream) {
			b := *blocks(s, 3)
			b[0], b[1] = b[1], b[0]
		}},
		{"a parent after its child, in another message", checker.Snapshot, func(s []stream) {
			insert(&s[0], 5, snapshotBlocks("a", store(0, 0, 98, 99)))
		}},

		{"an entry twice within", checker.Unique, func(s []stream) {
			s[0].msgs[8].Entries = append(s[0].msgs[7].Entries[2:], s[0].msgs[8].Entries...)
		}},
		{"an entry of the snapshot after it", checker.Unique, func(s []stream) {
			m := s[0].msgs[10]
			m.Entries = append(s[0].msgs[8].Entries[1:], m.Entries...)
		}},
		{"an entry from before the snapshot after it", checker.Unique, func(s []stream) {
			m := s[0].msgs[10]
			m.Entries = append([]*kvcastv1.Entry{entry(9, "b", store(3, 0, 3))}, m.Entries...)
		}},
		{"an entry from before a snapshot after a resume", checker.Unique, func(s []stream) {
			m := s[2].msgs[1]
			m.Entries = append([]*kvcastv1.Entry{entry(39, "d", store(3, 0, 3))}, m.Entries...)
		}},
		{"entries swapped within", checker.Ordered, func(s []stream) {
			e := s[0].msgs[8].Entries
			e[0], e[1] = e[1], e[0]
		}},
		{"an older entry within", checker.Ordered, func(s []stream) { s[0].msgs[8].Entries[0].Seq = 9 }},
		{"an entry missing after it", checker.GapFree, func(s []stream) {
			s[0].msgs[10].Entries = s[0].msgs[10].Entries[1:]
		}},
		{"an entry that the blocks hold", checker.GapFree, func(s []stream) {
			s[0].msgs[7].Entries = append([]*kvcastv1.Entry{entry(6, "a", store(4, 0, 5))}, s[0].msgs[7].Entries...)
		}},
		{"an event_id missing within", checker.GapFree, func(s []stream) { s[0].msgs[2].SnapshotWorker.LastEventId = 3 }},
		{"an event_id missing after it", checker.GapFree, func(s []stream) { s[0].msgs[5].SnapshotWorker.LastEventId = 1 }},
		{"duplicate event_id after it", checker.GapFree, func(s []stream) { s[0].msgs[10].Entries[1].Events[0].EventId = 8 }},
		{"event_ids of a removed worker", checker.GapFree, func(s []stream) { s[0].msgs[7].Entries[1].Events[0].EventId = 7 }},
		{"an entry without events within", checker.Atomic, func(s []stream) { s[0].msgs[7].Entries[2].Events = nil }},
		{"the end behind an entry", checker.Snapshot, func(s []stream) { s[0].msgs[9] = snapshotEnd(11) }},
		{"the end behind the stream", checker.Snapshot, func(s []stream) {
			drop(&s[0], 18)
			s[0].msgs[18] = snapshotEnd(13)
		}},
		{"the end behind the resume", checker.Snapshot, func(s []stream) { s[1].msgs[2] = snapshotEnd(20) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			streams := snapshotStreams()
			tt.spoil(streams)
			_, err := play(t, streams)
			wantProperty(t, err, tt.want)
		})
	}
}

func TestSnapshotMayHaveAnotherEpoch(t *testing.T) {
	s := snapshotStreams()[1]
	s.msgs[0].Accepted.OldestSeq = 1 // only the journal was lost
	s.msgs = s.msgs[:3]
	s.req = fromAfter(77)
	s.req.GetAfter().Epoch = "e0"
	_, err := play(t, []stream{s})
	wantProperty(t, err, "")

	s.req.GetAfter().Epoch = ""
	_, err = play(t, []stream{s})
	wantProperty(t, err, checker.Protocol)
}

// TestCyclicParentsHaveNoOrder covers a cycle of parents. Engines do not create cycles, but a server must not loop.
func TestCyclicParentsHaveNoOrder(t *testing.T) {
	circle := func(last ...*kvcastv1.RouterEvent) error {
		_, err := play(t, []stream{{fromSnapshot(), []*kvcastv1.SubscribeResponse{
			announced(1, 3), snapshotBegin(), snapshotWorker("a", 2),
			snapshotBlocks("a", append([]*kvcastv1.RouterEvent{child(0, 0, 3, 1, 2), child(0, 0, 9, 9)}, last...)...),
			snapshotEnd(3),
		}}})
		return err
	}
	wantProperty(t, circle(child(0, 0, 2, 3)), "")
	wantProperty(t, circle(child(0, 0, 7, 3)), checker.Snapshot)
	wantProperty(t, circle(child(0, 0, 2, 4, 3)), "")
}

func TestFilteredSnapshots(t *testing.T) {
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(s *stream)
	}{
		{"good", "", func(*stream) {}},
		{"another worker", checker.Filtered, func(s *stream) { s.req.Filter.Workers = []string{"b"} }},
		{"another model", checker.Filtered, func(s *stream) { s.req.Filter.Models = []string{"b"} }},
		{"another tier", checker.Filtered, func(s *stream) { onDisk(s.msgs[3].SnapshotBlocks[0].Events[0]) }},
		{"another worker's entry", checker.Filtered, func(s *stream) { s.msgs[4].Entries[0].Worker = "b" }},
		{"another tier's entry", checker.Filtered, func(s *stream) { onDisk(s.msgs[4].Entries[0].Events[0]) }},
		{"another tier's entry afterwards", checker.Filtered, func(s *stream) { onDisk(s.msgs[6].Entries[0].Events[0]) }},
		{"duplicate event_id", checker.GapFree, func(s *stream) { s.msgs[4].Entries[0].Events[0].EventId = 2 }},
		{"an entry from before the end", checker.Unique, func(s *stream) { s.msgs[6].Entries[0].Seq = 9 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := fromSnapshot()
			req.Filter = &kvcastv1.Filter{Workers: []string{"a"}, Models: []string{"m-a"}, Tiers: []kvcastv1.Tier{device}}
			s := stream{req, []*kvcastv1.SubscribeResponse{
				announced(1, 3), snapshotBegin(), snapshotWorker("a", 2), snapshotBlocks("a", store(0, 0, 1)),
				snapshotEntries(entry(4, "a", store(5, 0, 2))), snapshotEnd(9), message(9, entry(12, "a", store(7, 0, 3))),
			}}
			tt.spoil(&s)
			_, err := play(t, []stream{s})
			wantProperty(t, err, tt.want)
		})
	}
}
