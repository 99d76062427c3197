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
	for _, d := range digests {
		if err := c.checkDigest(d, at); err != nil {
			return err
		}
	}
	c.head = at
	return nil
}

// checkDigest compares what the server says a worker holds with the view, where
// the two speak of the same moment.
func (c *Checker) checkDigest(d *kvcastv1.WorkerDigest, at uint64) error {
	name, n, tier := d.GetWorker(), d.GetDpRank(), d.GetTier()
	if d.GetSeq() > at {
		return broken(Progress, "digest of worker %q at %d, beyond position %d", name, d.GetSeq(), at)
	}
	if !realTier(tier) {
		return broken(Protocol, "digest of worker %q without a tier", name)
	}
	w := c.workers[name]
	if w == nil || w.lastSeq > d.GetSeq() || !c.complete(w, n) || !c.filter.hasTier(tier) {
		return nil
	}
	blocks, digest := c.view.Count(name, n, tier), c.view.Digest(name, n, tier)
	if d.GetBlocks() != uint64(blocks) || d.GetDigest() != digest {
		return broken(Convergent, "server counts %d blocks (%016x) of worker %q, rank %d, %v; the view has %d (%016x)",
			d.GetBlocks(), d.GetDigest(), name, n, tier, blocks, digest)
	}
	return nil
}

// complete tells that everything that a rank holds has been seen.
func (c *Checker) complete(w *worker, n uint32) bool {
	return w.whole || w.rank(n).cleared
}
