package pipeline_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestDigests(t *testing.T) {
	j := journal.NewMemory(journal.Config{})
	p, err := pipeline.New(pipeline.Config{}, j)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePipeline(t, p) })
	a, b := p.AddWorker(feed.Worker{Name: "a", Model: "m"}), p.AddWorker(feed.Worker{Name: "b", Model: "n"})
	step := func(l feed.Lane, rank uint32, events ...wire.Event) {
		l.Batch(&feed.Batch{Rank: rank, Events: events})
	}
	in := func(tier wire.Tier, e wire.Event) wire.Event {
		e.Tier = tier
		return e
	}
	digests := func(tiers journal.Tiers, workers ...string) []*kvcastv1.WorkerDigest {
		match := func(worker, _ string) bool { return len(workers) == 0 || worker == workers[0] }
		all, err := p.Digests(t.Context(), match, tiers)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	is := func(when string, got []*kvcastv1.WorkerDigest, want ...*kvcastv1.WorkerDigest) {
		t.Helper()
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	digest := func(worker string, rank uint32, tier kvcastv1.Tier, seq, blocks, digest uint64) *kvcastv1.WorkerDigest {
		return &kvcastv1.WorkerDigest{Worker: worker, DpRank: rank, Tier: tier, Seq: seq, Blocks: blocks, Digest: digest}
	}
	const (
		all            = journal.Tiers(0xff)
		device, disk   = kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_DISK
		ofZero, ofMany = 0xe220a8397b1dcdaf, 6457827717110365317 // splitmix64 of 0 and of 1234567, from its author's code
	)
	is("workers without blocks", digests(all), digest("a", 0, device, 1, 0, 0), digest("b", 0, device, 2, 0, 0))

	step(a, 0, in(wire.TierDevice, store(1234567)), in(wire.TierDisk, store(1234567)), in(wire.TierDevice, store(0)), in(wire.TierDevice, store(0)))
	step(a, 3, in(wire.TierDevice, store(0)))
	is("a block counts once, in each place", digests(all, "a"),
		digest("a", 0, device, 4, 2, ofZero^ofMany), digest("a", 0, disk, 4, 1, ofMany), digest("a", 3, device, 4, 1, ofZero))
	is("of some tiers", digests(journal.TierBit(uint8(wire.TierDisk)), "a"),
		digest("a", 0, disk, 4, 1, ofMany), digest("a", 3, disk, 4, 0, 0))

	step(a, 0, in(wire.TierDisk, remove(1234567)), in(wire.TierDevice, remove(0)))
	is("an emptied tier has a digest, and a block with a copy left counts", digests(all, "a"),
		digest("a", 0, device, 5, 2, ofZero^ofMany), digest("a", 0, disk, 5, 0, 0), digest("a", 3, device, 5, 1, ofZero))

	step(b, 0, in(wire.TierDevice, store(0)))
	step(a, 0, wire.Event{Kind: wire.KindCleared})
	is("after a clear", digests(all),
		digest("a", 0, device, 7, 0, 0), digest("a", 0, disk, 7, 0, 0), digest("a", 3, device, 7, 1, ofZero), digest("b", 0, device, 6, 1, ofZero))

	p.RemoveWorker("a", feed.RemovedDiscovery)
	is("a worker that is gone is not", digests(all), digest("b", 0, device, 6, 1, ofZero))
}
