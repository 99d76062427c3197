package vllm_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
)

// follower is a subscriber: what it has of each stream by topic.
type follower struct {
	consumer *vllm.Consumer
	topics   map[string]bool
	last     map[*vllm.Stream]uint64 // the last seq
	ended    map[*vllm.Stream]bool
	missed   int
	behind   map[*vllm.Stream]bool // it missed batches, and has got no state since
	waits    bool                  // it has been told to wait for a slot
}

func (f *follower) wants(topic string) bool {
	for prefix := range f.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}

// TestSubscribersGetEveryBatchOnceInOrder publishes batches of several streams, which begin and end, to subscribers that read at
// random times, and change their subscriptions. After its state, a stream continues without a hole, unless the log has
// evicted batches: then another state follows, or the last batch if the stream has ended. Without states, a hole is seen, and
// nothing goes backwards.
func TestSubscribersGetEveryBatchOnceInOrder(t *testing.T) {
	t.Parallel()
	topics := []string{"kv@a", "kv@b", "other"}
	prefixes := []string{"", "kv@", "kv@a", "kv@aa", "kv@b", "x"}
	rapid.Check(t, func(t *rapid.T) {
		history := vllm.NewHistory(rapid.IntRange(1, 20).Draw(t, "batches"), rapid.IntRange(1, 3000).Draw(t, "bytes"))
		states := rapid.Bool().Draw(t, "states")
		var streams []vllm.Published
		name := make(map[*vllm.Stream]string)
		// The positions in the log at which streams began, and ended.
		begun, endedAt, ended := make(map[*vllm.Stream]uint64), make(map[*vllm.Stream]uint64), make(map[*vllm.Stream]bool)
		version := uint64(0)
		followers := make([]*follower, 2)
		publish := func(s *vllm.Stream, last bool) {
			payload, seq := s.Batch(1)
			history.Append(vllm.Batch{Stream: s, Seq: seq, Payload: payload, Last: last})
			for _, f := range followers {
				f.consumer.Skip(history, s, version)
			}
		}
		for i := range followers {
			followers[i] = &follower{consumer: vllm.NewConsumer(), topics: make(map[string]bool), last: make(map[*vllm.Stream]uint64), ended: make(map[*vllm.Stream]bool)}
		}
		read := func(f *follower) {
			a := f.consumer.Next(history, streams, version, states, false)
			if a.Missed {
				f.missed++
				f.behind = make(map[*vllm.Stream]bool)
				for s := range f.last {
					f.behind[s] = true
				}
			}
			if a.State != nil {
				if f.waits = !f.waits && rapid.Bool().Draw(t, "waits"); f.waits { // for a slot, while other things happen
					return
				}
				of := a.State
				if a = f.consumer.Next(history, streams, version, states, true); a.State != of || a.Missed {
					t.Fatalf("with a slot: got %+v, want the state of %s", a, name[of])
				}
				if !states || !f.wants(name[a.State]) {
					t.Fatalf("got the state of %s", name[a.State])
				}
				for s := range f.last { // streams of one topic do not overlap, except those that began before this one ended
					if s != a.State && name[s] == name[a.State] && ended[s] && begun[a.State] > endedAt[s] && !f.ended[s] && f.missed == 0 {
						t.Fatalf("got the state of %s before the end of the stream before it", name[s])
					}
				}
				f.last[a.State] = a.State.Next() - 1
				delete(f.behind, a.State)
			}
			for _, b := range a.Batches {
				last, ok := f.last[b.Stream]
				switch {
				case !f.wants(name[b.Stream]):
					t.Fatalf("got a batch of %s", name[b.Stream])
				case states && !ok:
					t.Fatalf("got batch %d of %s before its state", b.Seq, name[b.Stream])
				case ok && (b.Seq <= last || b.Seq > last+1 && (states && (!b.Last || !f.behind[b.Stream]) || f.missed == 0)):
					t.Fatalf("got batch %d of %s after %d", b.Seq, name[b.Stream], last)
				}
				f.last[b.Stream] = b.Seq
				if b.Last {
					f.ended[b.Stream] = true
				}
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				topic := rapid.SampledFrom(topics).Draw(t, "topic")
				s := vllm.NewStream("w", 0, topic, 0, 0)
				_, end := history.Positions()
				begun[s] = end
				streams, name[s] = append(streams, vllm.Published{Stream: s, At: end}), topic
				version++
				publish(s, false)
			case 1:
				if len(streams) > 0 {
					_, endedAt[streams[0].Stream] = history.Positions()
					ended[streams[0].Stream] = true
					publish(streams[0].Stream, true)
					streams = streams[1:]
					version++
				}
			case 2:
				f := rapid.SampledFrom(followers).Draw(t, "follower")
				prefix := rapid.SampledFrom(prefixes).Draw(t, "prefix")
				if f.topics[prefix] {
					f.consumer.Cancel(prefix)
					delete(f.topics, prefix)
					for s := range f.last { // it follows anew when it subscribes again
						if !f.wants(name[s]) {
							delete(f.last, s)
						}
					}
					read(f)
				} else if f.consumer.Subscribe(prefix) {
					f.topics[prefix] = true
				}
			case 3, 4, 5:
				read(rapid.SampledFrom(followers).Draw(t, "reader"))
			default:
				if len(streams) > 0 {
					publish(streams[rapid.IntRange(0, len(streams)-1).Draw(t, "stream")].Stream, false)
				}
			}
		}
		for i, f := range followers {
			for reads := 0; !f.consumer.HasAll(history, version); reads++ {
				if reads > 1000 {
					t.Fatalf("subscriber %d is never complete", i)
				}
				read(f)
			}
			for s := range f.last {
				if ended[s] && !f.ended[s] {
					t.Fatalf("subscriber %d never gets the end of a stream of %s", i, name[s])
				}
			}
			for _, s := range streams {
				if last, ok := f.last[s.Stream]; states && f.wants(name[s.Stream]) && (!ok || last != s.Next()-1) {
					t.Fatalf("subscriber %d has %s up to %d (%t), want %d", i, name[s.Stream], last, ok, s.Next()-1)
				}
			}
		}
	})
}

// TestSubscriptionsAreLimited subscribes to more topics than allowed.
func TestSubscriptionsAreLimited(t *testing.T) {
	t.Parallel()
	c := vllm.NewConsumer()
	for i := range 64 {
		if !c.Subscribe(fmt.Sprint(i)) {
			t.Fatalf("subscription %d is refused", i)
		}
	}
	if c.Subscribe("more") {
		t.Error("a subscription beyond the limit is accepted")
	}
	if vllm.NewConsumer().Subscribe(strings.Repeat("x", 64<<10+1)) {
		t.Error("a topic beyond the limit is accepted")
	}
}

// TestLogFindsBatchesBySeq evicts batches, and finds the others by their seqs.
func TestLogFindsBatchesBySeq(t *testing.T) {
	t.Parallel()
	history := vllm.NewHistory(5, 1<<20)
	s := vllm.NewStream("w", 0, "t", 0, 10)
	if _, ok := history.Find(s, 10); ok {
		t.Error("an empty log has a batch")
	}
	for n := range 8 {
		payload, seq := s.Batch(1)
		history.Append(vllm.Batch{Stream: s, Seq: seq, Payload: payload})
		if n == 2 {
			for _, seq := range []uint64{0, 10} { // an older seq: all batches of the stream are there
				if at, ok := history.Find(s, seq); !ok || at != 0 {
					t.Errorf("seq %d: got position %d, %t", seq, at, ok)
				}
			}
		}
	}
	first, end := history.Positions()
	if first != 3 || end != 8 {
		t.Fatalf("the log has the positions %d to %d", first, end)
	}
	for seq, want := range map[uint64]uint64{13: 3, 17: 7, 18: 8} {
		if at, ok := history.Find(s, seq); !ok || at != want {
			t.Errorf("seq %d: got position %d, %t", seq, at, ok)
		}
	}
	if _, ok := history.Find(s, 12); ok {
		t.Error("an evicted batch is found")
	}
	if _, ok := history.Find(vllm.NewStream("w", 0, "t", 0, 10), 15); ok {
		t.Error("a batch of another stream is found")
	}
}

// TestSubscriberOfOtherTopicsIsNotWoken publishes more batches than the log keeps, of a stream that the subscriber does not want.
func TestSubscriberOfOtherTopicsIsNotWoken(t *testing.T) {
	t.Parallel()
	wanted := vllm.Published{Stream: vllm.NewStream("w", 0, "wanted", 0, 1)}
	l := newStreamLog(2, 1)
	all := append(slices.Clone(l.streams), wanted)
	c := vllm.NewConsumer()
	c.Subscribe("wanted")
	for !c.HasAll(l.History, 1) {
		c.Next(l.History, all, 1, true, true)
	}
	for n := range 10 {
		l.publish(t, 1)
		if !c.Skip(l.History, l.streams[0].Stream, 1) {
			t.Fatalf("batch %d must be read", n)
		}
	}
	payload, seq := wanted.Batch(1)
	l.Append(vllm.Batch{Stream: wanted.Stream, Seq: seq, Payload: payload})
	if c.Skip(l.History, wanted.Stream, 1) {
		t.Fatal("a batch that is wanted is skipped")
	}
	if a := c.Next(l.History, all, 1, true, true); a.Missed || a.State != nil || len(a.Batches) != 1 {
		t.Errorf("missed %t, state %t, %d batches; want one batch", a.Missed, a.State != nil, len(a.Batches))
	}
	c.Subscribe("wanted") // has no effect
	if !c.HasAll(l.History, 1) {
		t.Error("the same subscription again makes the subscriber read")
	}
}

// streamHistory is streams and a log to which batches of them are appended in turn.
type streamHistory struct {
	*vllm.History
	streams []vllm.Published
	next    int
}

func newStreamLog(batches, streams int) *streamHistory {
	l := &streamHistory{History: vllm.NewHistory(batches, 1<<30)}
	for i := range streams {
		l.streams = append(l.streams, vllm.Published{Stream: vllm.NewStream("w", uint32(i), "t", 0, 1), At: l.End()})
	}
	return l
}

func (l *streamHistory) publish(t *testing.T, batches int) {
	t.Helper()
	for range batches {
		s := l.streams[l.next%len(l.streams)].Stream
		l.next++
		payload, seq := s.Batch(1)
		l.Append(vllm.Batch{Stream: s, Seq: seq, Payload: payload})
	}
}

// TestSubscriberJoinsWhileMuchIsPublished publishes more batches than the log keeps while the states of all streams are sent.
func TestSubscriberJoinsWhileMuchIsPublished(t *testing.T) {
	t.Parallel()
	const streams, perState = 1000, 20
	l := newStreamLog(10_000, streams)
	l.publish(t, streams)
	c := vllm.NewConsumer()
	c.Subscribe("")
	last := make(map[*vllm.Stream]uint64)
	for n := 0; len(last) < streams || !c.HasAll(l.History, 1); n++ {
		a := c.Next(l.History, l.streams, 1, true, true)
		if n > streams*perState || a.Missed {
			t.Fatalf("after %d reads: missed %t, %d of %d streams", n, a.Missed, len(last), streams)
		}
		if a.State != nil {
			if _, ok := last[a.State]; ok {
				t.Fatal("a state is sent twice")
			}
			last[a.State] = a.State.Next() - 1
			l.publish(t, perState)
		}
		for _, b := range a.Batches {
			if b.Seq != last[b.Stream]+1 {
				t.Fatalf("got batch %d after %d", b.Seq, last[b.Stream])
			}
			last[b.Stream] = b.Seq
		}
	}
}

// TestStreamThatBeginsIsReadFromItsFirstBatch has a subscriber that is there before, without states.
func TestStreamThatBeginsIsReadFromItsFirstBatch(t *testing.T) {
	t.Parallel()
	l := newStreamLog(100, 0)
	c := vllm.NewConsumer()
	c.Next(l.History, nil, 0, false, true)
	c.Subscribe("t")
	l.streams = append(l.streams, vllm.Published{Stream: vllm.NewStream("w", 0, "t", 0, 1), At: l.End()})
	l.publish(t, 3)
	a := c.Next(l.History, l.streams, 1, false, true)
	if len(a.Batches) != 3 || a.Batches[0].Seq != 1 || !c.HasAll(l.History, 1) {
		t.Errorf("got %d batches, want those with the seqs 1 to 3", len(a.Batches))
	}
	late := vllm.NewConsumer()
	late.Subscribe("t")
	if a := late.Next(l.History, l.streams, 1, false, true); len(a.Batches) > 0 {
		t.Errorf("one that comes later got %d batches, want none: it requests them", len(a.Batches))
	}
}

// TestSubscriberThatMissesTheEndOfAStreamGetsIt removes a worker while a subscriber falls behind the history.
func TestSubscriberThatMissesTheEndOfAStreamGetsIt(t *testing.T) {
	t.Parallel()
	for _, states := range []bool{true, false} {
		l := newStreamLog(4, 2)
		gone := l.streams[0].Stream
		c := vllm.NewConsumer()
		c.Subscribe("")
		for !c.HasAll(l.History, 1) {
			c.Next(l.History, l.streams, 1, states, true)
		}
		gone.Clear()
		payload, seq := gone.Batch(1)
		l.Append(vllm.Batch{Stream: gone, Seq: seq, Payload: payload, Last: true})
		l.streams = l.streams[1:]
		l.publish(t, 10)
		ends := 0
		for !c.HasAll(l.History, 2) {
			for _, b := range c.Next(l.History, l.streams, 2, states, true).Batches {
				if b.Stream == gone && b.Last && b.Seq == seq {
					ends++
				}
			}
		}
		if ends != 1 {
			t.Errorf("states %t: got the end of the stream %d times, want once", states, ends)
		}
	}
}
