package vllm

import (
	"maps"
	"slices"
	"strings"
)

// Consumer is what one subscriber of an endpoint has been sent. It is a state machine without I/O and lock.
type Consumer struct {
	topics map[string]int // subscriptions by prefix
	bytes  int            // of topics
	// prefixes are the topics, sorted, without those that begin with another one.
	prefixes []string
	// followed has the streams that the subscriber follows, each from a position of the history on.
	followed map[*Stream]uint64
	// behind has the streams that the subscriber followed when it missed batches, and that it does not follow again yet.
	behind map[*Stream]uint64
	next   uint64 // position in the history
	began  bool   // Next was called
	// version is that of the endpoint's streams when followed was complete.
	version uint64
	changed bool // subscriptions have changed
	batches []Batch
}

// Limits of the subscriptions of a consumer.
const (
	maxTopics     = 64
	maxTopicBytes = 64 << 10
)

// NewConsumer returns a consumer without subscriptions.
func NewConsumer() *Consumer {
	return &Consumer{topics: make(map[string]int), followed: make(map[*Stream]uint64), behind: make(map[*Stream]uint64)}
}

// Subscribe adds a subscription, and reports whether that is within the limits.
func (c *Consumer) Subscribe(topic string) bool {
	c.topics[topic]++
	if c.topics[topic] == 1 {
		c.bytes += len(topic)
		c.topicsChanged()
	}
	return len(c.topics) <= maxTopics && c.bytes <= maxTopicBytes
}

// Cancel removes a subscription.
func (c *Consumer) Cancel(topic string) {
	switch c.topics[topic] {
	case 0:
	case 1:
		c.bytes -= len(topic)
		delete(c.topics, topic)
		c.topicsChanged()
	default:
		c.topics[topic]--
	}
}

func (c *Consumer) topicsChanged() {
	c.changed = true
	c.prefixes = c.prefixes[:0]
	for _, topic := range slices.Sorted(maps.Keys(c.topics)) {
		if n := len(c.prefixes); n == 0 || !strings.HasPrefix(topic, c.prefixes[n-1]) {
			c.prefixes = append(c.prefixes, topic)
		}
	}
}

// wants reports whether a subscription is a prefix of a stream's topic. That can only be the last one that is not after the
// topic: one between them in the order would begin with it. Subscribers can make kvcast call this for every stream.
func (c *Consumer) wants(s *Stream) bool {
	i, ok := slices.BinarySearch(c.prefixes, s.topic)
	return ok || i > 0 && strings.HasPrefix(s.topic, c.prefixes[i-1])
}

// Action is what to send to a subscriber next.
type Action struct {
	// State is a stream whose state must be sent; nil: none. Without a slot, Next must be called again with one.
	State *Stream
	// Batches are to be sent. They are valid until the next call.
	Batches []Batch
	// Missed reports whether the subscriber was too slow and has missed batches.
	Missed bool
}

// sendBatches is how many batches an action has at most.
const sendBatches = 64

// Published is a stream of an endpoint.
type Published struct {
	*Stream
	// At is the position of the stream's first batch in the endpoint's history.
	At uint64
}

// Next returns what to send next; nothing if the subscriber has everything. Version changes with the streams of the endpoint. If
// states is set, the subscriber gets the state of a stream before its batches, and again after it has missed batches;
// otherwise it must request what it has missed. If the stream has ended meanwhile, it gets the last batch, which clears all
// blocks. Between two states it gets the batches of the streams that it follows, so that it misses none while there are many. slot reports
// whether a state may be built.
func (c *Consumer) Next(h *History, streams []Published, version uint64, states, slot bool) (a Action) {
	if c.next < h.first && len(c.followed) > 0 {
		a.Missed = true
		maps.Copy(c.behind, c.followed)
		clear(c.followed)
		c.changed = true
	}
	if len(c.followed) == 0 && (states || !c.began || c.next < h.first) {
		c.next = h.End()
	}
	c.began = true
	if c.changed || c.version != version {
		unwanted := func(s *Stream, _ uint64) bool { return !c.wants(s) }
		maps.DeleteFunc(c.followed, unwanted)
		maps.DeleteFunc(c.behind, unwanted)
		if a.Batches = c.finals(); len(a.Batches) > 0 { // before the states of later streams with the same topics
			return a
		}
		later := false
		for _, s := range streams {
			if _, ok := c.followed[s.Stream]; ok || !c.wants(s.Stream) {
				continue
			}
			if !states {
				c.followed[s.Stream] = max(c.next, s.At)
				continue
			}
			if c.next < h.End() { // also, batches of another stream with the topic may come before
				later = true
				break
			}
			if a.State = s.Stream; slot {
				c.followed[s.Stream] = h.End()
				delete(c.behind, s.Stream)
			}
			return a
		}
		if c.changed, c.version = later, version; !later {
			clear(c.behind)
		}
	}
	var all []Batch
	position := c.next
	all, c.next, _ = h.Read(c.next, sendBatches, c.batches[:0])
	a.Batches = all[:0]
	for i := range all {
		if from, ok := c.followed[all[i].Stream]; ok && position >= from {
			a.Batches = append(a.Batches, all[i])
		}
		if all[i].Last {
			delete(c.followed, all[i].Stream)
		}
		position++
	}
	c.batches = all
	return a
}

// finals returns the last batches of the streams behind that have ended. No state of theirs follows, and without these batches
// the subscriber would keep their blocks.
func (c *Consumer) finals() []Batch {
	all := c.batches[:0]
	for s := range c.behind {
		if s.final.Last {
			all = append(all, s.final)
			delete(c.behind, s)
		}
	}
	c.batches = all
	return all
}

// Skip passes over the last batch of a history if the subscriber has all batches before it and does not want it, and reports whether it
// did. Otherwise, Next must be called.
func (c *Consumer) Skip(h *History, s *Stream, version uint64) bool {
	_, follows := c.followed[s]
	if follows || c.changed || c.version != version || c.next+1 != h.End() {
		return false
	}
	c.next++
	return true
}

// HasAll reports whether Next would return nothing.
func (c *Consumer) HasAll(h *History, version uint64) bool {
	return !c.changed && c.version == version && c.next == h.End()
}
