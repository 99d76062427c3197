package pipeline_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// place is a rank's tier.
type place struct {
	worker string
	rank   uint32
	tier   kvcastv1.Tier
}

// blockSets has the blocks of each place; a place without blocks is absent.
type blockSets map[place]map[uint64]bool

// router applies entries as the contract says.
type router struct {
	blocks blockSets
	// incomplete are the incomplete ranks by worker.
	incomplete map[string]map[uint32]bool
	applied    map[string]int // entries, by worker
}

func newRouter() *router {
	return &router{blocks: make(blockSets), incomplete: make(map[string]map[uint32]bool), applied: make(map[string]int)}
}

// mark records whether a rank is incomplete.
func (r *router) mark(worker string, rank uint32, incomplete bool) {
	if r.incomplete[worker] == nil {
		r.incomplete[worker] = make(map[uint32]bool)
	}
	r.incomplete[worker][rank] = incomplete
}

// incompleteRanks returns a worker's incomplete ranks in order.
func (r *router) incompleteRanks(worker string) (ranks []uint32) {
	for rank, incomplete := range r.incomplete[worker] {
		if incomplete {
			ranks = append(ranks, rank)
		}
	}
	slices.Sort(ranks)
	return ranks
}

func (r *router) apply(entries map[string][]*kvcastv1.Entry) {
	for worker, all := range entries {
		for _, entry := range all[r.applied[worker]:] {
			for _, e := range entry.GetEvents() {
				r.applyEvent(worker, e)
			}
		}
		r.applied[worker] = len(all)
	}
}

func (r *router) applyEvent(worker string, e *kvcastv1.RouterEvent) {
	at := place{worker, e.GetDpRank(), e.GetTier()}
	switch v := e.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		if r.blocks[at] == nil {
			r.blocks[at] = make(map[uint64]bool)
		}
		for _, h := range v.Stored.GetBlockHashes() {
			r.blocks[at][h] = true
		}
	case *kvcastv1.RouterEvent_Removed:
		for _, h := range v.Removed.GetBlockHashes() {
			delete(r.blocks[at], h)
		}
		if len(r.blocks[at]) == 0 {
			delete(r.blocks, at)
		}
	case *kvcastv1.RouterEvent_Cleared:
		tiers := v.Cleared.GetTiers()
		for p := range r.blocks {
			if p.worker == worker && p.rank == e.GetDpRank() && (len(tiers) == 0 || slices.Contains(tiers, p.tier)) {
				delete(r.blocks, p)
			}
		}
		if len(tiers) == 0 {
			r.mark(worker, e.GetDpRank(), false)
		}
		if v.Cleared.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
			r.mark(worker, e.GetDpRank(), true)
		}
	case *kvcastv1.RouterEvent_Gap:
		r.mark(worker, e.GetDpRank(), true)
	case *kvcastv1.RouterEvent_WorkerRemoved:
		delete(r.incomplete, worker)
		for p := range r.blocks {
			if p.worker == worker {
				delete(r.blocks, p)
			}
		}
	}
}

// engines counts the engines' blocks according to the calls, as far as they are known,
// ignoring runs, flushes and limits.
type engines map[place]map[uint64]int

func (s engines) clear(worker string, rank uint32) {
	for p := range s {
		if p.worker == worker && p.rank == rank {
			delete(s, p)
		}
	}
}

func (s engines) batch(worker string, b feed.Batch) {
	for _, e := range b.Events {
		at := place{worker, b.Rank, kvcastv1.Tier(e.Tier)}
		if s[at] == nil {
			s[at] = make(map[uint64]int)
		}
		switch e.Kind {
		case wire.KindStored:
			for _, h := range e.BlockHashes {
				s[at][h]++
			}
		case wire.KindRemoved:
			for _, h := range e.BlockHashes {
				s[at][h] = max(0, s[at][h]-1)
			}
		case wire.KindCleared:
			s.clear(worker, b.Rank)
		}
	}
}

func (s engines) gap(worker string, g feed.Gap) {
	for p, counts := range s {
		for h, n := range counts {
			if p.worker == worker && p.rank == g.Rank && n > 0 {
				counts[h] = 1
			}
		}
	}
}

func (s engines) restarted(worker string, r feed.Restart) { s.clear(worker, r.Rank) }

func (s engines) remove(worker string) {
	for p := range s {
		if p.worker == worker {
			delete(s, p)
		}
	}
}

func (s engines) apply(c call, onGap pipeline.OnGap) {
	switch {
	case c.Gap != nil && onGap == pipeline.OnGapClear && c.Gap.Reason != feed.GapJoinedLate:
		s.clear(c.Worker, c.Gap.Rank)
	case c.Batch != nil:
		s.batch(c.Worker, *c.Batch)
	case c.Gap != nil:
		s.gap(c.Worker, *c.Gap)
	case c.Restarted != nil:
		s.restarted(c.Worker, *c.Restarted)
	case c.Remove != 0:
		s.remove(c.Worker)
	}
}

// blocks returns the blocks with at least one copy.
func (s engines) blocks() blockSets {
	all := make(blockSets)
	for p, counts := range s {
		for h, n := range counts {
			if n > 0 {
				if all[p] == nil {
					all[p] = make(map[uint64]bool)
				}
				all[p][h] = true
			}
		}
	}
	return all
}

// rankBlocks returns the number of blocks of a rank.
func (h blockSets) rankBlocks(worker string, rank uint32) (n int) {
	for p, blocks := range h {
		if p.worker == worker && p.rank == rank {
			n += len(blocks)
		}
	}
	return n
}

// violation describes how a router's blocks violate the contract: the router has no block that
// the engines lack, and lacks a block only where its rank is incomplete and the pipeline
// counted the reason.
func (h blockSets) violation(engines blockSets, counted harness.Metrics) string {
	for p, blocks := range h {
		for hash := range blocks {
			if !engines[p][hash] {
				return fmt.Sprintf("block %d of %+v, which the engine does not have", hash, p)
			}
		}
	}
	incomplete := metricByRank(counted, "kvcast_pipeline_incomplete")
	refused, expired := counted.By("kvcast_pipeline_blocks_refused_total", "worker"), counted.By("kvcast_pipeline_stale_blocks_removed_total", "worker")
	for p, blocks := range engines {
		for hash := range blocks {
			switch {
			case h[p][hash]:
			case !incomplete[p.worker][p.rank]:
				return fmt.Sprintf("no block %d of %+v, whose rank is not incomplete", hash, p)
			case refused[p.worker]+expired[p.worker] == 0:
				return fmt.Sprintf("no block %d of %+v, none of which was left out", hash, p)
			}
		}
	}
	return ""
}

// without returns the blocks of all but some workers.
func (h blockSets) without(workers map[string]bool) blockSets {
	rest := maps.Clone(h)
	maps.DeleteFunc(rest, func(p place, _ map[uint64]bool) bool { return workers[p.worker] })
	return rest
}

// metricByRank returns the nonzero values of a metric by worker and rank.
func metricByRank(m harness.Metrics, name string) map[string]map[uint32]bool {
	all := make(map[string]map[uint32]bool)
	for _, sample := range m.Select(name) {
		if sample.Value != 0 {
			rank, _ := strconv.ParseUint(sample.Labels["dp_rank"], 10, 32)
			if all[sample.Labels["worker"]] == nil {
				all[sample.Labels["worker"]] = make(map[uint32]bool)
			}
			all[sample.Labels["worker"]][uint32(rank)] = true
		}
	}
	return all
}

// tables returns the generator's blocks that the pipeline's tables contain.
func (s *subject) tables(t harness.Fataler) blockSets {
	q := pipeline.Query{
		Match: func(string, string) bool { return true },
		Tiers: ^journal.Tiers(0), Limit: 1 << 20,
		BlockHashes: []uint64{1<<64 - 1},
	}
	for h := range uint64(16) {
		q.BlockHashes = append(q.BlockHashes, h)
	}
	found, err := s.pipeline.Lookup(context.Background(), q)
	if err != nil {
		t.Fatal(err)
	}
	all := make(blockSets)
	for _, b := range found {
		p := place{b.GetWorker(), b.GetDpRank(), b.GetTier()}
		if all[p] == nil {
			all[p] = make(map[uint64]bool)
		}
		all[p][b.GetBlockHash()] = true
	}
	return all
}

// sizes returns the number of blocks in each place.
func (h blockSets) sizes() map[string]float64 {
	all := make(map[string]float64)
	for p, blocks := range h {
		all[fmt.Sprint(p.worker, " ", p.rank, " ", int32(p.tier))] = float64(len(blocks))
	}
	return all
}

// tableSizes returns the number of blocks in each place according to the gauge.
func (s *subject) tableSizes(t harness.Fataler) map[string]float64 {
	tiers := map[string]kvcastv1.Tier{
		"device":      kvcastv1.Tier_TIER_DEVICE,
		"host_pinned": kvcastv1.Tier_TIER_HOST_PINNED,
		"disk":        kvcastv1.Tier_TIER_DISK,
		"external":    kvcastv1.Tier_TIER_EXTERNAL,
	}
	all := make(map[string]float64)
	for _, sample := range s.metrics(t) {
		if sample.Name == "kvcast_pipeline_blocks" && sample.Value > 0 {
			l := sample.Labels
			all[l["worker"]+" "+l["dp_rank"]+" "+strconv.Itoa(int(tiers[l["tier"]]))] = sample.Value
		}
	}
	return all
}

// incompleteBeside returns how the incomplete ranks of snapshots, ListWorkers and the
// metrics differ from those of a router that applied all entries.
func (s *subject) incompleteBeside(t harness.Fataler, r *router) string {
	metric := metricByRank(s.metrics(t), "kvcast_pipeline_incomplete")
	for worker := range s.lanes {
		want := r.incompleteRanks(worker)
		cut, ok, err := s.pipeline.Snapshot(context.Background(), worker, ^journal.Tiers(0))
		if err != nil || !ok {
			t.Fatal("no cut of a worker that is there: ", ok, err)
		}
		if diff := cmp.Diff(want, cut.Worker.GetIncompleteRanks()); diff != "" {
			return fmt.Sprintf("snapshot's ranks of %s (-stream +got):\n%s", worker, diff)
		}
		var listed []uint32
		for _, status := range s.pipeline.Status(func(name, _ string) bool { return name == worker }) {
			for _, rank := range status.GetRanks() {
				if rank.GetIncomplete() {
					listed = append(listed, rank.GetDpRank())
				}
			}
		}
		if diff := cmp.Diff(want, listed); diff != "" {
			return fmt.Sprintf("ranks of %s in ListWorkers (-stream +got):\n%s", worker, diff)
		}
		if diff := cmp.Diff(want, slices.Sorted(maps.Keys(metric[worker])), cmpopts.EquateEmpty()); diff != "" {
			return fmt.Sprintf("ranks of %s in the metric (-stream +got):\n%s", worker, diff)
		}
	}
	return ""
}

// checkViews makes calls, and returns how the blocks of a router that applied all entries
// differ: from the pipeline's tables after each call, and from the engines' blocks whenever
// no run is pending.
func checkViews(t harness.Fataler, cfg pipeline.Config, calls []call) string {
	s, err := newSubject(cfg)
	if err != nil {
		return err.Error()
	}
	r := newRouter()
	want := make(engines)
	shared := make(map[string]bool) // workers with several sources, whose blocks are consolidated
	for i, c := range calls {
		c.on(s)
		if c.Add != nil {
			shared[c.Worker] = len(c.Add.Sources) > 1
		}
		want.apply(c, cfg.OnGap)
		r.apply(s.journal.all())
		if diff := cmp.Diff(s.tableSizes(t), r.blocks.sizes()); diff != "" {
			return fmt.Sprintf("router's blocks after call %d (-tables +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(s.tables(t), r.blocks); diff != "" {
			return fmt.Sprintf("router's view after call %d (-tables +got):\n%s", i, diff)
		}
		for p := range r.blocks {
			if n := r.blocks.rankBlocks(p.worker, p.rank); cfg.MaxBlocksPerRank > 0 && n > cfg.MaxBlocksPerRank {
				return fmt.Sprintf("blocks of worker %s, rank %d, after call %d: got %d, want at most %d",
					p.worker, p.rank, i, n, cfg.MaxBlocksPerRank)
			}
		}
		if cfg.Timeout > 0 && !c.Close {
			continue
		}
		if wrong := r.blocks.without(shared).violation(want.blocks().without(shared), s.metrics(t)); wrong != "" {
			return fmt.Sprintf("router's view after call %d: %s", i, wrong)
		}
	}
	return ""
}

// TestSnapshotEqualsTheStream compares, after each call, the incomplete ranks with those of
// a router that applied all entries.
func TestSnapshotEqualsTheStream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := newSubject(drawConfig(t))
		if err != nil {
			t.Fatal(err)
		}
		r := newRouter()
		for i, c := range drawCalls(t, false, false) {
			c.on(s)
			r.apply(s.journal.all())
			if diff := s.incompleteBeside(t, r); diff != "" {
				t.Fatalf("incomplete after call %d: %s", i, diff)
			}
		}
	})
}

func TestRouterStateEqualsTheEngines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if diff := checkViews(t, drawConfig(t), drawCalls(t, false, false)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestRouterStateEqualsTheEnginesWithTimeout(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		cfg.Timeout = generatorTimeout
		calls := drawCalls(rt, true, false)
		var diff string
		synctest.Test(t, func(t *testing.T) { diff = checkViews(t, cfg, calls) })
		if diff != "" {
			rt.Fatal(diff)
		}
	})
}
