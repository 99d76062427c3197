package checker

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// progress judges a Progress message.
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
		return broken(Filtered, "progress with digests that were not asked for")
	}
	c.head = at
	return c.checkDigests(digests, at)
}

// checkAlive judges a Progress that tells no more than that a snapshot waits.
func checkAlive(msg *kvcastv1.SubscribeResponse) error {
	if len(msg.GetProgress().GetWorkers()) > 0 {
		return broken(Protocol, "digests where what is held is not whole")
	}
	return nil
}
