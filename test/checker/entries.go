package checker

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// entries checks a message with entries, and applies it.
//
// Duplicates and reordering are checked in the whole message before holes: swapped entries also
// cause a hole, and are to be reported as swapped.
func (c *Checker) entries(msg *kvcastv1.SubscribeResponse) error {
	if err := c.checkOrder(msg.GetEntries()); err != nil {
		return err
	}
	if err := c.checkLink(msg); err != nil {
		return err
	}
	if err := c.checkHoles(msg); err != nil {
		return err
	}
	if err := c.checkBound(msg); err != nil {
		return err
	}
	if err := c.apply(msg.GetEntries()); err != nil {
		return err
	}
	c.head = msg.GetPosition().GetSeq()
	return nil
}

// apply checks entries one by one, and applies them to the view.
func (c *Checker) apply(entries []*kvcastv1.Entry) error {
	for _, e := range entries {
		if err := c.checkEntry(e); err != nil {
			return err
		}
		c.seen[e.GetSeq()] = struct{}{}
		c.lastSeq = e.GetSeq()
		c.recordLosses(e)
		c.view.Apply(e)
	}
	return nil
}

func (c *Checker) checkOrder(entries []*kvcastv1.Entry) error {
	last := c.lastSeq
	within := make(map[uint64]struct{}, len(entries))
	for _, e := range entries {
		seq := e.GetSeq()
		_, before := c.seen[seq]
		_, now := within[seq]
		switch {
		case seq == 0:
			return broken(Protocol, "an entry without a seq")
		case before || now:
			return broken(Unique, "entry %d is a duplicate", seq)
		case seq <= c.snapshotSeq:
			return broken(Unique, "entry %d after a snapshot at %d, which holds it", seq, c.snapshotSeq)
		case seq <= last:
			return broken(Ordered, "entry %d after entry %d", seq, last)
		case seq <= c.head && c.head == c.streamStartSeq:
			return broken(GapFree, "entry %d in a stream that begins after %d", seq, c.streamStartSeq)
		case seq <= c.head:
			return broken(Progress, "entry %d after position %d was announced", seq, c.head)
		}
		within[seq] = struct{}{}
		last = seq
	}
	return nil
}

// checkHoles checks entries that are in order and after the head.
func (c *Checker) checkHoles(msg *kvcastv1.SubscribeResponse) error {
	entries, pos := msg.GetEntries(), msg.GetPosition().GetSeq()
	last := entries[len(entries)-1].GetSeq()
	if pos < last {
		return broken(Progress, "position %d is behind entry %d of the same message", pos, last)
	}
	if !c.filter.all() {
		return nil
	}
	want := c.head
	for _, e := range entries {
		want++
		if e.GetSeq() != want {
			return broken(GapFree, "entry %d, want %d", e.GetSeq(), want)
		}
	}
	if pos != last {
		return broken(GapFree, "position %d, but the last entry is %d", pos, last)
	}
	return nil
}

// checkEntry checks one entry: its form, the filter, and how it follows from the previous entries
// of its worker.
func (c *Checker) checkEntry(e *kvcastv1.Entry) error {
	if c.opts.Shared && len(e.GetEvents()) == 0 {
		return c.filter.check(e)
	}
	if err := checkEntryForm(e); err != nil {
		return err
	}
	if err := c.filter.check(e); err != nil {
		return err
	}
	w := c.worker(e.GetWorker())
	for _, ev := range e.GetEvents() {
		if err := c.follow(w, e, ev); err != nil {
			return err
		}
	}
	return c.checkWhole(w, e)
}

// progress checks a Progress message.
func (c *Checker) progress(msg *kvcastv1.SubscribeResponse) error {
	if err := c.checkLink(msg); err != nil {
		return err
	}
	if err := c.checkBound(msg); err != nil {
		return err
	}
	at := msg.GetPosition().GetSeq()
	switch {
	case at < c.head:
		return broken(Progress, "progress at %d, but %d has been announced", at, c.head)
	case at > c.head && c.filter.all():
		return broken(Progress, "progress at %d, but only %d has been delivered", at, c.head)
	}
	digests := msg.GetProgress().GetWorkers()
	if len(digests) > 0 && !c.req.GetProgressDigests() {
		return broken(Filtered, "progress with digests that were not requested")
	}
	c.head = at
	return c.checkDigests(digests, at)
}

// checkAlive checks a Progress that only reports that a snapshot is pending.
func checkAlive(msg *kvcastv1.SubscribeResponse) error {
	if len(msg.GetProgress().GetWorkers()) > 0 {
		return broken(Protocol, "digests while the state is partial")
	}
	return nil
}
