package pipeline

import (
	"context"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Digests tells what workers that a filter takes hold in the tiers given, those of
// a worker one after another, as kvcast.v1.Progress has them: each is of the
// worker's last entry, and as it was then. Each lane is held up for itself, for as
// long as it takes to look at its ranks, so that those of two workers are of
// different moments.
func (p *Pipeline) Digests(ctx context.Context, match func(worker, model string) bool, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, error) {
	var all []*kvcastv1.WorkerDigest
	for _, l := range p.matching(match) {
		first := len(all)
		var appended journal.Pending
		var err error
		all, appended, err = l.digests(all, tiers)
		if err != nil {
			return nil, err
		}
		seq, err := l.wait(ctx, appended)
		if err != nil {
			return nil, err
		}
		for _, d := range all[first:] {
			d.Seq = seq
		}
	}
	return all, nil
}

// digests appends those of the lane, unless the worker is gone, with the
// append of the entry that they are of: whatever has changed a table since is in no entry
// yet only while the lane is locked.
func (l *Lane) digests(to []*kvcastv1.WorkerDigest, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, journal.Pending, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return to, journal.Pending{}, nil
	}
	names := l.rankNames()
	if len(names) == 0 {
		names = []uint32{0}
	}
	for _, name := range names {
		to = l.rankDigests(to, name, tiers)
	}
	return to, l.entry.appended, l.failed
}

// rankDigests appends one for each tier that has held blocks, or the first tier
// that is wanted.
func (l *Lane) rankDigests(to []*kvcastv1.WorkerDigest, name uint32, tiers journal.Tiers) []*kvcastv1.WorkerDigest {
	r := l.ranks[name]
	if r == nil {
		r = &rankState{}
	}
	told := tiers & r.held // held has no bit 0
	for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
		bit := journal.TierBit(uint8(tier))
		if tiers&bit == 0 || told != 0 && told&bit == 0 {
			continue
		}
		d := &kvcastv1.WorkerDigest{Worker: l.worker, DpRank: name, Tier: kvcastv1.Tier(tier)}
		if t := r.tables[tier]; t != nil {
			d.Blocks, d.Digest = uint64(t.blocks.len()), t.blocks.digest
		}
		to = append(to, d)
		if told == 0 {
			break
		}
	}
	return to
}
