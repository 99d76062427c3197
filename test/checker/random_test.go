package checker_test

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// drawEntries returns a journal from seq 1 in which workers are added and removed, each with
// its own event_ids.
func drawEntries(t *rapid.T) []*kvcastv1.Entry {
	lastID := make(map[string]uint64)
	there := make(map[string]bool)
	type rankOf struct {
		worker string
		rank   uint32
	}
	groupsOmitted := make(map[rankOf]bool)
	n := rapid.IntRange(1, 30).Draw(t, "entries")
	entries := make([]*kvcastv1.Entry, 0, n)
	for seq := uint64(1); seq <= uint64(n); seq++ {
		w := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "worker")
		id := func() uint64 { lastID[w]++; return lastID[w] }
		switch {
		case !there[w]:
			entries = append(entries, added(seq, w, id()))
			there[w] = true
			continue
		case rapid.IntRange(0, 9).Draw(t, "removed") == 0:
			entries = append(entries, removed(seq, w, id()))
			there[w] = false
			delete(groupsOmitted, rankOf{w, 0})
			delete(groupsOmitted, rankOf{w, 1})
			continue
		}
		e := entry(seq, w)
		rank := rapid.Uint32Range(0, 1).Draw(t, "rank")
		if at := (rankOf{w, rank}); !groupsOmitted[at] && rapid.IntRange(0, 5).Draw(t, "groups omitted") == 0 {
			groupsOmitted[at] = true
			e.Events = append(e.Events, omitGroups(id(), rank))
		}
		for range rapid.IntRange(1, 3).Draw(t, "events") {
			e.Events = append(e.Events, drawEvent(t, id(), rank))
		}
		entries = append(entries, e)
	}
	return entries
}

func drawEvent(t *rapid.T, id uint64, rank uint32) *kvcastv1.RouterEvent {
	hashes := rapid.SliceOfN(rapid.Uint64Range(1, 20), 1, 4).Draw(t, "hashes")
	switch rapid.IntRange(0, 9).Draw(t, "kind") {
	case 0:
		return clearAll(id, rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED)
	case 1:
		return gap(id, rank)
	case 2, 3, 4:
		return remove(id, rank, hashes...)
	case 5, 6:
		return child(id, rank, rapid.Uint64Range(1, 20).Draw(t, "parent"), hashes...)
	case 7:
		ev := store(id, rank, hashes...) // event of hashes only
		ev.GetStored().TokensHashes, ev.GetStored().BlockSize = nil, 0
		return ev
	default:
		return store(id, rank, hashes...)
	}
}

// drawStreams delivers entries to a subscriber that sometimes resumes: in messages of any length,
// with progress between them and at the end.
func drawStreams(t *rapid.T, entries []*kvcastv1.Entry) []stream {
	var streams []stream
	newest, head := uint64(len(entries)), uint64(0)
	begin := func() {
		s := stream{fromAfter(head), nil}
		mode := kvcastv1.Accepted_MODE_RESUME
		if len(streams) == 0 {
			s.req, mode = fromEarliest(), kvcastv1.Accepted_MODE_EARLIEST
		}
		s.msgs = []*kvcastv1.SubscribeResponse{accepted(mode, head, newest)}
		streams = append(streams, s)
	}
	send := func(m *kvcastv1.SubscribeResponse) {
		s := &streams[len(streams)-1]
		s.msgs = append(s.msgs, m)
	}
	begin()
	for head < newest {
		switch rapid.IntRange(0, 5).Draw(t, "next") {
		case 0:
			begin()
		case 1:
			send(progress(head, head))
		default:
			n := rapid.Uint64Range(1, min(6, newest-head)).Draw(t, "chunk")
			m := message(head, entries[head:head+n]...)
			send(proto.CloneOf(m))
			head += n
		}
	}
	send(progress(head, head))
	return streams
}

// place is a message with entries.
type place struct {
	stream, msg int
	m           *kvcastv1.SubscribeResponse
}

func places(streams []stream) []place {
	var p []place
	for i, s := range streams {
		for j, m := range s.msgs {
			if len(m.GetEntries()) > 0 {
				p = append(p, place{i, j, m})
			}
		}
	}
	return p
}

// mutations each violate one rule somewhere. They return false if the streams offer no opportunity.
var mutations = map[string]func(t *rapid.T, streams []stream) bool{
	"drop an entry": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		i := drawIndex(t, len(m.Entries))
		m.Entries = append(m.Entries[:i:i], m.Entries[i+1:]...)
		return true
	},
	"drop an entry and hide the hole": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		if len(m.Entries) < 2 {
			return false
		}
		m.Entries = m.Entries[:len(m.Entries)-1]
		m.Position.Seq--
		return true
	},
	"drop a message": func(t *rapid.T, streams []stream) bool {
		p := drawPlace(t, streams)
		s := &streams[p.stream]
		if p.msg == len(s.msgs)-1 {
			return false // the subscriber would resume from before it
		}
		s.msgs = append(s.msgs[:p.msg:p.msg], s.msgs[p.msg+1:]...)
		return true
	},
	"repeat an entry": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		i := drawIndex(t, len(m.Entries))
		m.Entries = append(m.Entries[:i+1:i+1], m.Entries[i:]...)
		return true
	},
	"repeat an entry of an earlier message": func(t *rapid.T, streams []stream) bool {
		p := places(streams)
		if len(p) < 2 {
			return false
		}
		i := rapid.IntRange(1, len(p)-1).Draw(t, "place")
		from := p[rapid.IntRange(0, i-1).Draw(t, "earlier")].m
		p[i].m.Entries = append(p[i].m.Entries, from.Entries[drawIndex(t, len(from.Entries))])
		return true
	},
	"repeat a message": func(t *rapid.T, streams []stream) bool {
		p := drawPlace(t, streams)
		s := &streams[p.stream]
		s.msgs = append(s.msgs[:p.msg+1:p.msg+1], s.msgs[p.msg:]...)
		return true
	},
	"swap two entries": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		if len(m.Entries) < 2 {
			return false
		}
		i := drawIndex(t, len(m.Entries)-1)
		m.Entries[i], m.Entries[i+1] = m.Entries[i+1], m.Entries[i]
		return true
	},
	"split an entry": func(t *rapid.T, streams []stream) bool {
		p := drawPlace(t, streams)
		i := drawIndex(t, len(p.m.Entries))
		first := p.m.Entries[i]
		if len(first.Events) < 2 {
			return false
		}
		second := proto.CloneOf(first)
		first.Events, second.Events = first.Events[:1], second.Events[1:]
		p.m.Entries = append(p.m.Entries[:i+1:i+1], append([]*kvcastv1.Entry{second}, p.m.Entries[i+1:]...)...)
		// Later seqs increase by one, as if the journal had both entries.
		shift(streams, second)
		return true
	},
	"empty an entry": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		m.Entries[drawIndex(t, len(m.Entries))].Events = nil
		return true
	},
	"shift prev_seq": func(t *rapid.T, streams []stream) bool {
		drawPlace(t, streams).m.PrevSeq += drawDelta(t)
		return true
	},
	"shift a position": func(t *rapid.T, streams []stream) bool {
		drawPlace(t, streams).m.Position.Seq += drawDelta(t)
		return true
	},
	"shift a seq": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		m.Entries[drawIndex(t, len(m.Entries))].Seq += drawDelta(t)
		return true
	},
	"shift an event_id": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		e := m.Entries[drawIndex(t, len(m.Entries))]
		e.Events[drawIndex(t, len(e.Events))].EventId += drawDelta(t)
		return true
	},
	"drop an event": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		e := m.Entries[drawIndex(t, len(m.Entries))]
		if len(e.Events) < 2 {
			return false // a further mutation covers entries without events
		}
		// Losing the last event of a worker is undetectable.
		e.Events = e.Events[1:]
		return true
	},
	"move progress": func(t *rapid.T, streams []stream) bool {
		s := streams[len(streams)-1].msgs
		s[len(s)-1].Position.Seq += drawDelta(t)
		return true
	},
	"resume elsewhere": func(t *rapid.T, streams []stream) bool {
		s := streams[drawIndex(t, len(streams))]
		s.msgs[0].Position.Seq += drawDelta(t)
		return true
	},
	"change an epoch": func(t *rapid.T, streams []stream) bool {
		drawPlace(t, streams).m.Position.Epoch = "e2"
		return true
	},
	"remove a dp_rank": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		ev := m.Entries[drawIndex(t, len(m.Entries))].Events[0]
		if ev.DpRank == nil {
			return false
		}
		ev.DpRank = nil
		return true
	},
	"remove a kind": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		m.Entries[drawIndex(t, len(m.Entries))].Events[0].Event = nil
		return true
	},
	"flip a tier": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		ev := m.Entries[drawIndex(t, len(m.Entries))].Events[0]
		if ev.Tier == 0 {
			ev.Tier = device
		} else {
			ev.Tier = 0
		}
		return true
	},
	"give an entry to another worker": func(t *rapid.T, streams []stream) bool {
		m := drawPlace(t, streams).m
		e := m.Entries[drawIndex(t, len(m.Entries))]
		if e.Events[0].GetWorkerAdded() != nil {
			return false // a worker with that name may exist
		}
		e.Worker = "z"
		return true
	},
}

func drawPlace(t *rapid.T, streams []stream) place {
	return rapid.SampledFrom(places(streams)).Draw(t, "place")
}

func drawIndex(t *rapid.T, n int) int { return rapid.IntRange(0, n-1).Draw(t, "index") }

// drawDelta returns 1 or -1 in two's complement.
func drawDelta(t *rapid.T) uint64 {
	if rapid.Bool().Draw(t, "down") {
		return ^uint64(0)
	}
	return 1
}

// shift adds one to every seq from the entry on, and to references to them.
func shift(streams []stream, from *kvcastv1.Entry) {
	at := from.Seq
	for _, s := range streams {
		if after := s.req.GetAfter(); after.GetSeq() >= at {
			after.Seq++
		}
		for _, m := range s.msgs {
			if m.Position.Seq >= at {
				m.Position.Seq++
			}
			if m.PrevSeq >= at {
				m.PrevSeq++
			}
			if m.Accepted != nil {
				m.Accepted.NewestSeq++
			}
			for _, e := range m.Entries {
				if e == from || e.Seq > at {
					e.Seq++
				}
			}
		}
	}
}

func TestRandomStreamsPass(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := drawEntries(t)
		c, err := play(t, drawStreams(t, entries))
		wantProperty(t, err, "")

		want := checker.NewView()
		for _, e := range entries {
			want.Apply(e)
		}
		for _, w := range []string{"a", "b", "c"} {
			for rank := range uint32(2) {
				if err := c.Converged(w, rank, device, want.Blocks(w, rank, device)); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

func TestEverySingleMutationIsCaught(t *testing.T) {
	testclass.WithoutRace(t)
	for name, mutate := range mutations {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				streams := drawStreams(t, drawEntries(t))
				if !mutate(t, streams) {
					t.Skip("nothing to break")
				}
				if err := playToEnd(streams); err == nil {
					t.Fatal("the checker did not detect the mutation")
				}
			})
		})
	}
}

// playToEnd is play for damaged streams. A stream that does not resume at the end of the previous
// stream is a violation too.
func playToEnd(streams []stream) error {
	c := checker.New(checker.Options{})
	for _, s := range streams {
		if err := c.Begin(s.req); err != nil {
			return fmt.Errorf("begin after a broken stream: %w", err)
		}
		for _, msg := range s.msgs {
			if err := c.Receive(msg); err != nil {
				return err
			}
		}
	}
	return nil
}
