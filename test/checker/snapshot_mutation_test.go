package checker_test

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type response = kvcastv1.SubscribeResponse

// spot is a message within a snapshot, or the end of one.
type spot struct {
	stream, msg int
	m           *response
}

// drawSpot returns a random message of snapshots that matches, or false if none does.
func drawSpot(t *rapid.T, streams []stream, fits func(m *response) bool) (spot, bool) {
	return drawSpotWhere(t, streams, func(p spot) bool { return fits(p.m) })
}

func drawSpotWhere(t *rapid.T, streams []stream, fits func(p spot) bool) (spot, bool) {
	var spots []spot
	for i, s := range streams {
		within := false
		for j, m := range s.msgs {
			within = within || m.SnapshotBegin != nil
			if p := (spot{i, j, m}); within && fits(p) {
				spots = append(spots, p)
			}
			within = within && m.SnapshotEnd == nil
		}
	}
	if len(spots) == 0 {
		return spot{}, false
	}
	return rapid.SampledFrom(spots).Draw(t, "spot"), true
}

func hasBegin(m *response) bool   { return m.SnapshotBegin != nil }
func hasWorker(m *response) bool  { return m.SnapshotWorker != nil }
func hasBlocks(m *response) bool  { return m.SnapshotBlocks != nil }
func hasEntries(m *response) bool { return m.Entries != nil }
func hasEnd(m *response) bool     { return m.SnapshotEnd != nil }
func hasNoEnd(m *response) bool   { return m.SnapshotEnd == nil }

// onSpot returns a mutation that changes a matching message.
func onSpot(fits func(m *response) bool, change func(t *rapid.T, m *response)) func(*rapid.T, []stream) bool {
	return func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, fits)
		if ok {
			change(t, p.m)
		}
		return ok
	}
}

// onBlocks returns a mutation that changes an event of a snapshot's blocks.
func onBlocks(change func(t *rapid.T, ev *kvcastv1.RouterEvent)) func(*rapid.T, []stream) bool {
	return onSpot(hasBlocks, func(t *rapid.T, m *response) {
		events := m.SnapshotBlocks[0].Events
		change(t, events[drawIndex(t, len(events))])
	})
}

// next returns the message after a spot, or an empty one at the end of a stream.
func next(streams []stream, p spot) *response {
	if msgs := streams[p.stream].msgs; p.msg+1 < len(msgs) {
		return msgs[p.msg+1]
	}
	return &response{}
}

// announcedBefore reports whether a worker appears in the snapshot before a spot.
func announcedBefore(streams []stream, p spot, name string) bool {
	told := false
	for _, m := range streams[p.stream].msgs[:p.msg] {
		told = (told || m.SnapshotWorker.GetWorker() == name) && m.SnapshotBegin == nil
	}
	return told
}

// hasLaterEntry reports whether a worker has an entry after a spot that is not discarded.
func hasLaterEntry(streams []stream, p spot, name string) bool {
	for i := p.stream; i < len(streams); i++ {
		msgs := streams[i].msgs
		if i == p.stream {
			msgs = msgs[p.msg+1:]
		}
		for _, m := range msgs {
			if m.SnapshotBegin != nil {
				return false
			}
			for _, e := range m.Entries {
				if e.Worker == name {
					return true
				}
			}
		}
	}
	return false
}

// withChild returns the index of an event whose blocks the next event continues, or -1. The event
// has no parent, so it is in no cycle.
func withChild(m *response) int {
	events := m.SnapshotBlocks[0].Events
	for i := range len(events) - 1 {
		a, b := events[i].GetStored(), events[i+1].GetStored()
		if a.ParentHash == nil && b.ParentHash != nil && slices.Contains(a.BlockHashes, *b.ParentHash) {
			return i
		}
	}
	return -1
}

func insertAt(streams []stream, p spot, m *response) {
	s := &streams[p.stream]
	s.msgs = slices.Insert(s.msgs, p.msg, proto.CloneOf(m))
}

func drop(streams []stream, p spot) {
	s := &streams[p.stream]
	s.msgs = slices.Delete(s.msgs, p.msg, p.msg+1)
}

// swap swaps a message with the next one.
func swap(streams []stream, p spot) {
	msgs := streams[p.stream].msgs
	msgs[p.msg], msgs[p.msg+1] = msgs[p.msg+1], msgs[p.msg]
}

// snapshotMutations each violate one rule in a snapshot. They return false if the streams offer no
// opportunity.
var snapshotMutations = map[string]func(t *rapid.T, streams []stream) bool{
	"drop SnapshotBegin": func(t *rapid.T, streams []stream) bool {
		p, _ := drawSpot(t, streams, hasBegin)
		before := streams[p.stream].msgs[p.msg-1]
		last := p.msg == len(streams[p.stream].msgs)-1
		if last || hasBegin(next(streams, p)) || (before.Position == nil && before.Accepted == nil) {
			return false // it had no effect, or the snapshot restarted and repeats nothing
		}
		drop(streams, p)
		return true
	},
	"drop SnapshotEnd": func(t *rapid.T, streams []stream) bool {
		p, _ := drawSpot(t, streams, hasEnd)
		if p.msg == len(streams[p.stream].msgs)-1 || hasBegin(next(streams, p)) {
			return false // restarting is allowed here
		}
		drop(streams, p)
		return true
	},
	"drop a worker": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, hasWorker)
		if !ok || !hasBlocks(next(streams, p)) {
			return false // a missing worker without blocks is undetectable
		}
		drop(streams, p)
		return true
	},
	"drop an entry": func(t *rapid.T, streams []stream) bool {
		// The loss is detectable only if the event_ids of the worker before and after are known.
		missed := func(p spot) int {
			return slices.IndexFunc(p.m.Entries, func(e *kvcastv1.Entry) bool {
				return announcedBefore(streams, p, e.Worker) && hasLaterEntry(streams, p, e.Worker)
			})
		}
		p, ok := drawSpotWhere(t, streams, func(p spot) bool { return missed(p) >= 0 })
		if !ok {
			return false
		}
		i := missed(p)
		if p.m.Entries = slices.Delete(p.m.Entries, i, i+1); len(p.m.Entries) == 0 {
			drop(streams, p)
		}
		return true
	},
	"repeat a worker or blocks": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, func(m *response) bool { return hasWorker(m) || hasBlocks(m) })
		if ok {
			insertAt(streams, p, p.m)
		}
		return ok
	},
	"repeat entries": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, hasEntries)
		if ok {
			insertAt(streams, p, p.m)
		}
		return ok
	},
	"repeat SnapshotEnd": func(t *rapid.T, streams []stream) bool {
		p, _ := drawSpot(t, streams, hasEnd)
		insertAt(streams, p, p.m)
		return true
	},
	"repeat an entry after it": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, hasEntries)
		if !ok {
			return false
		}
		e, i := p.m.Entries[0], p.msg
		for ; !hasEnd(streams[p.stream].msgs[i]); i++ {
		}
		m := message(streams[p.stream].msgs[i].Position.Seq, e)
		insertAt(streams, spot{p.stream, i + 1, nil}, m)
		return true
	},
	"blocks before their worker": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, hasWorker)
		if !ok || !hasBlocks(next(streams, p)) {
			return false
		}
		swap(streams, p)
		return true
	},
	"a worker or blocks after entries": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpotWhere(t, streams, func(p spot) bool {
			return (hasWorker(p.m) || hasBlocks(p.m)) && hasEntries(next(streams, p))
		})
		if ok {
			swap(streams, p)
		}
		return ok
	},
	"progress within": func(t *rapid.T, streams []stream) bool {
		p, _ := drawSpot(t, streams, hasEnd)
		at := p.m.Position.Seq
		insertAt(streams, p, progress(at, at))
		return true
	},
	"swap entries": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, func(m *response) bool { return len(m.Entries) > 1 })
		if ok {
			p.m.Entries[0], p.m.Entries[1] = p.m.Entries[1], p.m.Entries[0]
		}
		return ok
	},
	"a child before its parent": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, func(m *response) bool { return hasBlocks(m) && withChild(m) >= 0 })
		if ok {
			events, i := p.m.SnapshotBlocks[0].Events, withChild(p.m)
			events[i], events[i+1] = events[i+1], events[i]
		}
		return ok
	},
	"shift a last_event_id": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpotWhere(t, streams, func(p spot) bool {
			return hasWorker(p.m) && hasLaterEntry(streams, p, p.m.SnapshotWorker.Worker)
		})
		if ok {
			p.m.SnapshotWorker.LastEventId += drawDelta(t)
		}
		return ok
	},
	"give a message a position": onSpot(hasNoEnd, func(_ *rapid.T, m *response) { m.Position = at(1) }),
	"give a message a prev_seq": onSpot(hasNoEnd, func(_ *rapid.T, m *response) { m.PrevSeq = 1 }),
	"change an epoch":           onSpot(hasBegin, func(_ *rapid.T, m *response) { m.SnapshotBegin.Epoch = "e2" }),
	"shift the position":        onSpot(hasEnd, func(t *rapid.T, m *response) { m.Position.Seq += drawDelta(t) }),
	"shift prev_seq":            onSpot(hasEnd, func(t *rapid.T, m *response) { m.PrevSeq += drawDelta(t) }),
	"rename a worker":           onSpot(hasBlocks, func(_ *rapid.T, m *response) { m.SnapshotBlocks[0].Worker = "z" }),
	"remove a record":           onSpot(hasWorker, func(_ *rapid.T, m *response) { m.SnapshotWorker.Added = nil }),
	"empty an entry":            onSpot(hasEntries, func(_ *rapid.T, m *response) { m.Entries[0].Events = nil }),
	"end before the entries": func(t *rapid.T, streams []stream) bool {
		p, ok := drawSpot(t, streams, hasEntries)
		if ok {
			insertAt(streams, p, snapshotEnd(p.m.Entries[len(p.m.Entries)-1].Seq))
		}
		return ok
	},
	"empty blocks":     onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) { ev.GetStored().BlockHashes = nil }),
	"an event_id":      onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) { ev.EventId = 1 }),
	"remove a dp_rank": onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) { ev.DpRank = nil }),
	"remove a tier":    onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) { ev.Tier = 0 }),
	"token_ids": onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) {
		ev.GetStored().TokenIds = make([]uint32, max(1, len(ev.GetStored().BlockHashes)*int(ev.GetStored().BlockSize)))
	}),
	"a block twice": onBlocks(func(_ *rapid.T, ev *kvcastv1.RouterEvent) {
		s := ev.GetStored()
		s.BlockHashes = append(s.BlockHashes, s.BlockHashes[0])
		if len(s.TokensHashes) > 0 {
			s.TokensHashes = append(s.TokensHashes, s.TokensHashes[0])
		}
	}),
}

func TestEverySingleSnapshotMutationIsCaught(t *testing.T) {
	testclass.WithoutRace(t)
	for name, mutate := range snapshotMutations {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				streams := drawSnapshotStreams(t, nil, drawEntries(t))
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
