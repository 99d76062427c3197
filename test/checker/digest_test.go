package checker_test

import (
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

func TestDigestsOfProgress(t *testing.T) {
	// The blocks of worker "a" after entry 2, and digests that differ from them.
	good := func() []*kvcastv1.WorkerDigest {
		return []*kvcastv1.WorkerDigest{
			{Worker: "a", Tier: device, Blocks: 3, Digest: checker.Digest(set(1, 2, 3)), Seq: 2},
			{Worker: "a", Tier: kvcastv1.Tier_TIER_DISK, Seq: 2},
			{Worker: "a", DpRank: 1, Tier: device, Seq: 2},
		}
	}
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest
	}{
		{"good", "", func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { return d }},
		{"none", "", func([]*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { return nil }},
		{"of an earlier entry", checker.Progress, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Seq = 1; return d }},
		{"of an entry that was not received", checker.GapFree, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Seq = 3; return d }},
		{"count wrong", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Blocks = 2; return d }},
		{"digest wrong", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Digest++; return d }},
		{"blocks where the view has none", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[1].Blocks = 1; return d }},
		{"empty where the view has blocks", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest {
			d[0].Blocks, d[0].Digest = 0, 0
			return d
		}},
		{"not named where the view has blocks", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { return d[1:] }},
		{"beyond the position", checker.Progress, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Seq = 5; return d }},
		{"no tier", checker.Protocol, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { d[0].Tier = 0; return d }},
		{"twice", checker.Protocol, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest { return append(d, d[2]) }},
		{"of a worker that was removed", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest {
			d[0].Worker, d[0].Seq = "b", 3
			return d
		}},
		{"of an unknown worker", checker.Convergent, func(d []*kvcastv1.WorkerDigest) []*kvcastv1.WorkerDigest {
			d[0].Worker = "c"
			return d
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := fromEarliest()
			req.ProgressDigests = true
			c, err := play(t, []stream{{req, []*kvcastv1.SubscribeResponse{
				accepted(kvcastv1.Accepted_MODE_EARLIEST, 0, 0),
				message(0, added(1, "a", 1), entry(2, "a", store(2, 0, 1, 2, 3)), added(3, "b", 1)),
				message(3, removed(4, "b", 2)),
				progress(4, 4, tt.spoil(good())...),
			}}})
			wantProperty(t, err, tt.want)
			if got := c.Compared(); tt.name == "good" && got != 3 {
				t.Errorf("compared %d digests, want 3", got)
			}
		})
	}
}
