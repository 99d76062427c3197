package checker

import (
	"maps"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// tierKey identifies a tier of a dp rank.
type tierKey struct {
	rank uint32
	tier kvcastv1.Tier
}

// checkDigests compares the server's digests with the view at the same position. The digests of a
// worker are complete: ranks and tiers without one are empty.
func (c *Checker) checkDigests(digests []*kvcastv1.WorkerDigest, at uint64) error {
	named := make(map[string]map[tierKey]struct{})
	for _, d := range digests {
		if err := c.checkDigest(d, at); err != nil {
			return err
		}
		key := tierKey{d.GetDpRank(), d.GetTier()}
		if named[d.GetWorker()] == nil {
			named[d.GetWorker()] = make(map[tierKey]struct{})
		}
		if _, twice := named[d.GetWorker()][key]; twice {
			return broken(Protocol, "two digests of worker %q, rank %d, %v", d.GetWorker(), key.rank, key.tier)
		}
		named[d.GetWorker()][key] = struct{}{}
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if err := c.checkUnnamed(name, named[name]); err != nil {
			return err
		}
	}
	return nil
}

// checkDigest checks one digest.
func (c *Checker) checkDigest(d *kvcastv1.WorkerDigest, at uint64) error {
	name, n, tier, seq := d.GetWorker(), d.GetDpRank(), d.GetTier(), d.GetSeq()
	switch {
	case seq > at:
		return broken(Progress, "digest of worker %q at %d, beyond position %d", name, seq, at)
	case !realTier(tier):
		return broken(Protocol, "digest of worker %q without a tier", name)
	case !c.filter.hasTier(tier):
		return broken(Filtered, "digest of worker %q in tier %v", name, tier)
	}
	w := c.workers[name]
	switch {
	case w == nil && c.allWorkersSeen:
		return broken(Convergent, "digest of worker %q, which was never announced", name)
	case w == nil:
		return nil
	case w.presence == presenceRemoved:
		return broken(Convergent, "digest of worker %q, which was removed", name)
	case seq < w.lastSeq:
		return broken(Progress, "digest of worker %q at %d, behind its entry %d", name, seq, w.lastSeq)
	case seq > max(w.lastSeq, c.streamStartSeq) && len(c.filter.tiers) == 0:
		return broken(GapFree, "digest of worker %q at %d, but the last entry received was %d", name, seq, w.lastSeq)
	}
	if what := c.filter.excludedPart(name, w.model); what != "" {
		return broken(Filtered, "digest of %s", what)
	}
	if !c.complete(w, n) {
		return nil
	}
	blocks, digest := c.view.Count(name, n, tier), c.view.Digest(name, n, tier)
	if d.GetBlocks() != uint64(blocks) || d.GetDigest() != digest {
		return broken(Convergent, "server counts %d blocks (%016x) of worker %q, rank %d, %v; the view has %d (%016x)",
			d.GetBlocks(), d.GetDigest(), name, n, tier, blocks, digest)
	}
	if groups, xor := c.view.groupDigest(name, n, tier); d.GroupBlocks != nil && (d.GetGroupBlocks() != groups || d.GetGroupDigest() != xor) {
		return broken(Convergent, "server counts %d blocks of attention groups (%016x) of worker %q, rank %d, %v; the view has %d (%016x)",
			d.GetGroupBlocks(), d.GetGroupDigest(), name, n, tier, groups, xor)
	}
	c.compared++
	return nil
}

// checkUnnamed finds blocks of a worker at ranks and tiers without a digest.
func (c *Checker) checkUnnamed(name string, named map[tierKey]struct{}) error {
	for _, n := range c.view.Ranks(name) {
		for tier := range kvcastv1.Tier_name {
			_, ok := named[tierKey{n, kvcastv1.Tier(tier)}]
			if blocks := c.view.Count(name, n, kvcastv1.Tier(tier)); !ok && blocks > 0 && c.complete(c.worker(name), n) {
				return broken(Convergent, "server has nothing of worker %q, rank %d, %v; the view has %d blocks",
					name, n, kvcastv1.Tier(tier), blocks)
			}
		}
	}
	return nil
}

// Compared returns the number of digests that were compared and matched, so that a test can verify
// that there were any.
func (c *Checker) Compared() int { return c.compared }

// complete reports whether all blocks of a rank have been seen.
func (c *Checker) complete(w *worker, n uint32) bool {
	return w.whole || w.rank(n).cleared
}
