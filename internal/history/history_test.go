package history_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/history"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// store applies an entry in which a worker stores a block.
func store(x *index.Index, worker string, hash uint64, tier kvcastv1.Tier) {
	rank := uint32(0)
	x.ApplyEntry(&kvcastv1.Entry{Seq: x.Seq() + 1, Worker: worker, Events: []*kvcastv1.RouterEvent{{
		DpRank: &rank, Tier: tier,
		Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash}, BlockSize: 16}},
	}}})
}

func remove(x *index.Index, worker string) {
	x.ApplyEntry(&kvcastv1.Entry{Seq: x.Seq() + 1, Worker: worker, Events: []*kvcastv1.RouterEvent{{
		Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}},
	}}})
}

// texts returns each sample as its seq, workers and blocks.
func texts(all []*kvcastv1.HistorySample) (out []string) {
	for _, s := range all {
		text := fmt.Sprintf("seq %d, %d workers:", s.GetNewestSeq(), s.GetWorkers())
		for _, b := range s.GetBlocks() {
			text += fmt.Sprintf(" %d %v", b.GetBlocks(), b.GetTier())
		}
		out = append(out, text)
	}
	return out
}

func TestSamplesOfWorkersAndOfAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := index.New()
		h := history.New(x, func() history.Stream { return history.Stream{NewestSeq: x.Seq(), Subscribers: 3, SubscriberLag: 7} })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); h.Run(ctx) }()
		defer func() { cancel(); <-done }()
		next := func() { time.Sleep(history.Interval); synctest.Wait() }

		synctest.Wait()
		store(x, "a", 1, kvcastv1.Tier_TIER_DEVICE)
		next()
		store(x, "a", 2, kvcastv1.Tier_TIER_DISK)
		store(x, "b", 2, kvcastv1.Tier_TIER_DEVICE)
		next()
		want := []string{"seq 0, 0 workers:", "seq 1, 1 workers: 1 TIER_DEVICE", "seq 3, 2 workers: 2 TIER_DEVICE 1 TIER_DISK"}
		all := h.Samples("")
		if diff := cmp.Diff(want, texts(all)); diff != "" {
			t.Errorf("of all workers (-want +got):\n%s", diff)
		}
		if d := time.Duration(all[2].GetTimeUnixNano() - all[1].GetTimeUnixNano()); d != history.Interval {
			t.Errorf("samples are %v apart, want %v", d, history.Interval)
		}
		if all[0].GetSubscribers() != 3 || all[0].GetSubscriberLag() != 7 {
			t.Errorf("got %v, want 3 subscribers with a lag of 7", all[0])
		}
		if diff := cmp.Diff([]string{"seq 3, 2 workers: 1 TIER_DEVICE"}, texts(h.Samples("b"))); diff != "" {
			t.Errorf("of b (-want +got):\n%s", diff)
		}
		wantA := []string{"seq 1, 1 workers: 1 TIER_DEVICE", "seq 3, 2 workers: 1 TIER_DEVICE 1 TIER_DISK"}
		if diff := cmp.Diff(wantA, texts(h.Samples("a"))); diff != "" {
			t.Errorf("of a (-want +got):\n%s", diff)
		}
		remove(x, "a")
		next()
		if got := h.Samples("a"); got != nil {
			t.Errorf("a removed worker has samples: %v", got)
		}
		for range 2 * history.Samples {
			next()
		}
		if got := len(h.Samples("")); got != history.Samples {
			t.Errorf("got %d samples, want %d", got, history.Samples)
		}
		if got := len(h.Samples("b")); got != history.Samples {
			t.Errorf("b has %d samples, want %d", got, history.Samples)
		}
	})
}
