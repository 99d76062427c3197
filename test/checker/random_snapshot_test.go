package checker_test

import (
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// stateAt returns the view after a journal's first seq entries.
func stateAt(entries []*kvcastv1.Entry, seq uint64) *checker.View {
	v := checker.NewView()
	for _, e := range entries[:seq] {
		v.Apply(e)
	}
	return v
}

// recordAt returns the snapshot's record of a worker as of seq.
func recordAt(entries []*kvcastv1.Entry, seq uint64, name string) *kvcastv1.SubscribeResponse {
	m := snapshotWorker(name, 0)
	for _, e := range entries[:seq] {
		if e.Worker == name {
			m.SnapshotWorker.LastEventId = e.Events[len(e.Events)-1].EventId
		}
	}
	v := stateAt(entries, seq)
	for _, rank := range v.Ranks(name) {
		if v.Incomplete(name, rank) {
			m.SnapshotWorker.IncompleteRanks = append(m.SnapshotWorker.IncompleteRanks, rank)
		}
		if v.GroupsOmitted(name, rank) {
			m.SnapshotWorker.Ranks = append(m.SnapshotWorker.Ranks, &kvcastv1.SnapshotRank{DpRank: rank, GroupsOmitted: true})
		}
	}
	return m
}

// drawBlocks sends the blocks of one rank and tier, each after its parent, in events of random
// length. From each block it climbs to the first ancestor that was sent or is absent; it does not
// follow a cycle.
func drawBlocks(t *rapid.T, rank uint32, tier kvcastv1.Tier, set map[uint64]checker.Block) []*kvcastv1.RouterEvent {
	var events []*kvcastv1.RouterEvent
	told := make(map[uint64]bool)
	for _, h := range slices.Sorted(maps.Keys(set)) {
		var way []uint64
		for there := true; there && !told[h]; _, there = set[h] {
			told[h] = true
			way = append(way, h)
			if !set[h].HasParent {
				break
			}
			h = set[h].Parent
		}
		slices.Reverse(way)
		for i, h := range way {
			b := set[h]
			if i > 0 && b.Hashed == set[way[i-1]].Hashed && rapid.Bool().Draw(t, "join") {
				s := events[len(events)-1].GetStored()
				s.BlockHashes = append(s.BlockHashes, h)
				if b.Hashed {
					s.TokensHashes = append(s.TokensHashes, b.TokensHash)
				}
				continue
			}
			ev := store(0, rank, h)
			ev.Tier, ev.GetStored().BlockSize, ev.GetStored().TokensHashes = tier, b.BlockSize, nil
			if b.Hashed {
				ev.GetStored().TokensHashes = []uint64{b.TokensHash}
			}
			if b.HasParent {
				ev.GetStored().ParentHash = proto.Uint64(b.Parent)
			}
			events = append(events, ev)
		}
	}
	return events
}

// feed is a server that delivers a journal to one subscriber.
type feed struct {
	t       *rapid.T
	filter  *kvcastv1.Filter
	entries []*kvcastv1.Entry
	streams []stream
	head    uint64
}

func (f *feed) newest() uint64 { return uint64(len(f.entries)) }

func (f *feed) begin(req *kvcastv1.SubscribeRequest, first *kvcastv1.SubscribeResponse) {
	req.Filter = f.filter
	f.streams = append(f.streams, stream{req, []*kvcastv1.SubscribeResponse{first}})
}

func (f *feed) send(m *kvcastv1.SubscribeResponse) {
	s := &f.streams[len(f.streams)-1]
	s.msgs = append(s.msgs, proto.CloneOf(m))
}

// passed returns the part of an entry that passes the filter.
func (f *feed) passed(entries []*kvcastv1.Entry) []*kvcastv1.Entry {
	var left []*kvcastv1.Entry
	for _, e := range entries {
		if e = passed(f.filter, e); e != nil {
			left = append(left, e)
		}
	}
	return left
}

// snapshot sends a snapshot, sometimes after an aborted one.
//
// It lists the workers at one seq, and reads each worker at a different seq: its record at exactly
// this seq, and the blocks of each rank and tier at this seq or later. The entries after this seq, up
// to the end, make the snapshot exact.
func (f *feed) snapshot() {
	t := f.t
	f.send(snapshotBegin())
	listed := rapid.Uint64Range(f.head, f.newest()).Draw(t, "listed")
	cuts, end := make(map[string]uint64), listed
	for _, name := range stateAt(f.entries, listed).Workers() {
		cut := rapid.Uint64Range(listed, f.newest()).Draw(t, "cut")
		end = max(end, cut)
		if !slices.Contains(stateAt(f.entries, cut).Workers(), name) {
			continue // removed in the meantime
		}
		if f.filter != nil && passed(&kvcastv1.Filter{Workers: f.filter.Workers, Models: f.filter.Models},
			added(1, name, 1)) == nil {
			continue
		}
		cuts[name] = cut
		f.send(recordAt(f.entries, cut, name))
		for rank := range uint32(2) {
			for _, tier := range []kvcastv1.Tier{device, disk} {
				if f.filter != nil && len(f.filter.Tiers) > 0 && !slices.Contains(f.filter.Tiers, tier) {
					continue
				}
				at := rapid.Uint64Range(cut, f.newest()).Draw(t, "read")
				end = max(end, at)
				events := drawBlocks(t, rank, tier, stateAt(f.entries, at).Contents(name, rank, tier))
				for part := range slices.Chunk(events, rapid.IntRange(1, 6).Draw(t, "events")) {
					f.send(snapshotBlocks(name, part...))
				}
			}
		}
		if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
			f.snapshot()
			return
		}
	}
	end = rapid.Uint64Range(end, f.newest()).Draw(t, "end")
	var since []*kvcastv1.Entry
	for _, e := range f.entries[listed:end] {
		if e.Seq > cuts[e.Worker] {
			since = append(since, e)
		}
	}
	for part := range slices.Chunk(f.passed(since), rapid.IntRange(1, 4).Draw(t, "chunk")) {
		f.send(snapshotEntries(part...))
	}
	f.send(snapshotEnd(end))
	f.head = end
}

// step delivers the next entries.
func (f *feed) step() {
	t, newest := f.t, f.newest()
	switch rapid.IntRange(0, 11).Draw(t, "next") {
	case 0:
		f.begin(fromAfter(f.head), accepted(kvcastv1.Accepted_MODE_RESUME, f.head, newest))
	case 1:
		f.send(progress(f.head, f.head))
	case 2:
		f.snapshot()
	case 3:
		f.begin(fromSnapshot(), announced(1, newest))
		f.snapshot()
	case 4:
		if f.head+1 == newest {
			return // it is retained
		}
		f.begin(fromAfter(f.head), announced(rapid.Uint64Range(f.head+2, newest).Draw(t, "oldest"), newest))
		f.snapshot()
	case 5:
		// The connection breaks within a snapshot.
		f.send(snapshotBegin())
		f.begin(fromSnapshot(), announced(1, newest))
		f.snapshot()
	default:
		n := rapid.Uint64Range(1, min(6, newest-f.head)).Draw(t, "chunk")
		left := f.passed(f.entries[f.head : f.head+n])
		m := progress(f.head, f.head+n)
		if len(left) > 0 {
			m = message(f.head, left...)
			m.Position = at(f.head + n)
		}
		f.send(m)
		f.head += n
	}
}

// drawSnapshotStreams delivers entries to a subscriber with random snapshots: at the start, in
// mid-stream, restarted, and instead of resuming.
func drawSnapshotStreams(t *rapid.T, filter *kvcastv1.Filter, entries []*kvcastv1.Entry) []stream {
	f := &feed{t: t, filter: filter, entries: entries}
	f.begin(fromSnapshot(), announced(1, f.newest()))
	f.snapshot()
	for f.head < f.newest() {
		f.step()
	}
	f.send(progress(f.head, f.head))
	return f.streams
}

// drawTiers moves some of the blocks to other tiers.
func drawTiers(t *rapid.T, entries []*kvcastv1.Entry) []*kvcastv1.Entry {
	for _, e := range entries {
		for _, ev := range e.Events {
			if ev.Tier != 0 && rapid.Bool().Draw(t, "disk") {
				onDisk(ev)
			}
		}
	}
	return entries
}

func TestSnapshotPlusEntriesEqualsLaterState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := drawTiers(t, drawEntries(t))
		c, err := play(t, drawSnapshotStreams(t, nil, entries))
		wantProperty(t, err, "")
		all, err := play(t, drawStreams(t, entries))
		wantProperty(t, err, "")
		if diff := all.View().Diff(c.View()); diff != "" {
			t.Fatalf("state (- of all entries, + of a snapshot and the entries after it):\n%s", diff)
		}
		for _, w := range all.View().Workers() {
			for rank := range uint32(2) {
				if got, want := c.View().Incomplete(w, rank), all.View().Incomplete(w, rank); got != want {
					t.Fatalf("Incomplete(%s, %d) = %t, want %t", w, rank, got, want)
				}
			}
		}
	})
}

func TestRandomFilteredSnapshotsPass(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries, filter := drawTiers(t, drawEntries(t)), drawFilter(t)
		c, err := play(t, drawSnapshotStreams(t, filter, entries))
		wantProperty(t, err, "")
		want := checker.NewView()
		for _, e := range entries {
			want.Apply(passed(filter, e))
		}
		if diff := want.Diff(c.View()); diff != "" {
			t.Fatalf("state (- of all entries, + of a snapshot and the entries after it):\n%s", diff)
		}
	})
}
