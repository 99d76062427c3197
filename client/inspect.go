package client

import (
	"maps"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Worker is what a View knows of a worker.
type Worker struct {
	Name  string
	Model string
	// BlockSize is in tokens; 0 where nothing has told it yet.
	BlockSize uint32
	// Added is what was said when it was added: its endpoint, labels and more. It is
	// nil where the subscription began later than that, and to be read only.
	Added *kvcastv1.WorkerAdded
	// Ranks are its dp ranks of which something was told, ascending.
	Ranks []Rank
}

// Rank is what a View knows of a dp rank.
type Rank struct {
	Rank uint32
	// Blocks are the different blocks that it holds, by kvcastv1.Tier.
	Blocks [numTiers + 1]BlocksDigest
	// Incomplete tells that the blocks may be others than that: events were lost, or
	// the engine was first heard of when it was already running.
	Incomplete bool
	// Gaps is how many were told of since the worker was added, or since the last
	// snapshot; LastGap is the last of them, nil for none, and to be read only.
	Gaps    uint64
	LastGap *kvcastv1.Gap
}

// Workers returns what is known of each worker, by name.
func (v *View) Workers() []Worker {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := make([]Worker, 0, len(v.now.workers))
	for _, name := range slices.Sorted(maps.Keys(v.now.workers)) {
		out = append(out, v.now.workers[name].inspect())
	}
	return out
}

// Worker returns what is known of a worker; false where there is none of that name.
func (v *View) Worker(name string) (Worker, bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	w := v.now.workers[name]
	if w == nil {
		return Worker{}, false
	}
	return w.inspect(), true
}

func (w *worker) inspect() Worker {
	out := Worker{Name: w.name, Model: w.model, BlockSize: w.blockSize, Added: w.added}
	for _, n := range slices.Sorted(maps.Keys(w.ranks)) {
		r := w.ranks[n]
		rank := Rank{Rank: n, Incomplete: r.incomplete, Gaps: r.gaps, LastGap: r.gap}
		for tier := range numTiers {
			rank.Blocks[tier+1] = BlocksDigest{r.blocks[tier], r.digests[tier]}
		}
		out.Ranks = append(out.Ranks, rank)
	}
	return out
}

// Holds tells in which tiers a dp rank of a worker has a block, by the engine's own
// name of it; nothing where it has not.
func (v *View) Holds(worker string, rank uint32, blockHash uint64) []kvcastv1.Tier {
	v.mu.RLock()
	defer v.mu.RUnlock()
	w := v.now.workers[worker]
	if w == nil || w.ranks[rank] == nil {
		return nil
	}
	_, tag, _ := w.ranks[rank].table.tag(blockHash)
	var out []kvcastv1.Tier
	for tier := range numTiers {
		if tag&(1<<tier) != 0 {
			out = append(out, kvcastv1.Tier(tier+1))
		}
	}
	return out
}
