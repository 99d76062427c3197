package pipeline_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
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
	// incomplete are the incomplete tiers by worker.
	incomplete map[string]map[modelTier]bool
	applied    map[string]int // entries, by worker
}

func newRouter() *router {
	return &router{blocks: make(blockSets), incomplete: make(map[string]map[modelTier]bool), applied: make(map[string]int)}
}

// mark records whether tiers of a rank are incomplete: all if none is named.
func (r *router) mark(worker string, rank uint32, incomplete bool, tiers []kvcastv1.Tier) {
	if r.incomplete[worker] == nil {
		r.incomplete[worker] = make(map[modelTier]bool)
	}
	for _, tier := range namedTiers(tiers) {
		r.incomplete[worker][modelTier{rank, tier}] = incomplete
	}
}

// incompleteRanks returns a worker's ranks with an incomplete tier, in order.
func (r *router) incompleteRanks(worker string) (ranks []uint32) {
	for t, incomplete := range r.incomplete[worker] {
		if incomplete && !slices.Contains(ranks, t.rank) {
			ranks = append(ranks, t.rank)
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
		r.mark(worker, e.GetDpRank(), v.Cleared.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP, tiers)
	case *kvcastv1.RouterEvent_Gap:
		r.mark(worker, e.GetDpRank(), true, v.Gap.GetTiers())
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
			if e.Tier == 0 {
				s.clear(worker, b.Rank)
			} else {
				delete(s, at)
			}
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
func (h blockSets) violation(engines blockSets, s *subject, counted harness.Metrics) string {
	for p, blocks := range h {
		for hash := range blocks {
			if !engines[p][hash] {
				return fmt.Sprintf("block %d of %+v, which the engine does not have", hash, p)
			}
		}
	}
	refused, expired := counted.By("kvcast_pipeline_blocks_refused_total", "worker"), counted.By("kvcast_pipeline_stale_blocks_removed_total", "worker")
	evicted := counted.By("kvcast_pipeline_blocks_evicted_total", "worker") // of lower tiers
	for p, blocks := range engines {
		for hash := range blocks {
			switch {
			case h[p][hash]:
			case !slices.Contains(s.incompleteRanks(p.worker), p.rank):
				return fmt.Sprintf("no block %d of %+v, whose rank is not incomplete", hash, p)
			case p.tier > kvcastv1.Tier_TIER_DEVICE && evicted[p.worker] > 0:
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

// tables returns the blocks in the pipeline's tables.
func (s *subject) tables() blockSets {
	all := make(blockSets)
	for p, blocks := range s.pipeline.Tables() {
		all[place{p.Worker, p.Rank, p.Tier}] = blocks
	}
	return all
}

// incompleteRanks returns the incomplete ranks of a worker that follow from the entries.
func (s *subject) incompleteRanks(worker string) (ranks []uint32) {
	w, _ := s.journal.index.Worker(worker)
	for i := range w.Ranks {
		if w.Ranks[i].Reasons != 0 {
			ranks = append(ranks, w.Ranks[i].Rank)
		}
	}
	return ranks
}

// blocks returns the number of blocks of a worker that follows from the entries.
func (s *subject) blocks(worker string) (n uint64) {
	w, _ := s.journal.index.Worker(worker)
	for i := range w.Ranks {
		for _, d := range w.Ranks[i].Blocks {
			n += d.Blocks
		}
	}
	return n
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
		if diff := cmp.Diff(s.tables(), r.blocks); diff != "" {
			return fmt.Sprintf("router's view after call %d (-tables +got):\n%s", i, diff)
		}
		if diff := s.compareIndex(t); diff != "" {
			return fmt.Sprintf("index after call %d: %s", i, diff)
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
		if wrong := r.blocks.without(shared).violation(want.blocks().without(shared), s, s.metrics(t)); wrong != "" {
			return fmt.Sprintf("router's view after call %d: %s", i, wrong)
		}
	}
	return ""
}

// TestIncompleteRanksEqualTheRouters compares, after each call, the incomplete ranks in the index
// with those of a router that applied all entries.
func TestIncompleteRanksEqualTheRouters(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := newSubject(drawConfig(t))
		if err != nil {
			t.Fatal(err)
		}
		r := newRouter()
		for i, c := range drawCalls(t, false, false) {
			c.on(s)
			r.apply(s.journal.all())
			for worker := range s.lanes {
				if diff := cmp.Diff(r.incompleteRanks(worker), s.incompleteRanks(worker)); diff != "" {
					t.Fatalf("incomplete ranks of %s after call %d (-router +index):\n%s", worker, i, diff)
				}
			}
		}
	})
}

func TestRouterStateEqualsTheEngines(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		if diff := checkViews(t, drawConfig(t), drawCalls(t, false, false)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestRouterStateEqualsTheEnginesWithTimeout(t *testing.T) {
	testclass.WithoutRace(t)
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
