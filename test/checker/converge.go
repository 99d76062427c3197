package checker

import (
	"fmt"
	"slices"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxPrintedHashes is the maximum number of hashes that Difference prints per side.
const maxPrintedHashes = 4

// Difference is the difference between the view and an engine.
type Difference struct {
	// Missing are the engine's blocks that the view lacks, ascending.
	Missing []uint64
	// Extra are the view's blocks that the engine lacks, ascending.
	Extra []uint64
}

// Empty reports whether there is no difference.
func (d Difference) Empty() bool { return len(d.Missing) == 0 && len(d.Extra) == 0 }

// String returns the counts of both sides and a few hashes of each.
func (d Difference) String() string {
	return fmt.Sprintf("%s missing, %s too many", listed(d.Missing), listed(d.Extra))
}

func listed(hashes []uint64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d", len(hashes))
	for i, h := range hashes {
		if i == maxPrintedHashes {
			b.WriteString(" ...")
			break
		}
		fmt.Fprintf(&b, " %016x", h)
	}
	return b.String()
}

// Difference compares the view with the blocks of an engine.
func (c *Checker) Difference(worker string, dpRank uint32, tier kvcastv1.Tier, want map[uint64]struct{}) Difference {
	got := c.view.set(worker, dpRank, tier)
	var d Difference
	for h := range want {
		if _, ok := got[h]; !ok {
			d.Missing = append(d.Missing, h)
		}
	}
	for h := range got {
		if _, ok := want[h]; !ok {
			d.Extra = append(d.Extra, h)
		}
	}
	slices.Sort(d.Missing)
	slices.Sort(d.Extra)
	return d
}

// Converged compares the view with the blocks of an engine once both are quiet. A difference is a
// Convergent violation unless the rank is reported incomplete. If the stream began after the
// worker, the view may lack blocks, but must have none in excess. Difference includes the tolerated
// differences.
func (c *Checker) Converged(worker string, dpRank uint32, tier kvcastv1.Tier, want map[uint64]struct{}) error {
	d := c.Difference(worker, dpRank, tier, want)
	if d.Empty() || c.view.Incomplete(worker, dpRank) {
		return nil
	}
	w := c.workers[worker]
	unseen := !c.allWorkersSeen && (w == nil || !c.complete(w, dpRank))
	if unseen && len(d.Extra) == 0 {
		return nil
	}
	return broken(Convergent, "worker %q, rank %d, %v: %v", worker, dpRank, tier, d)
}

// Reported finds an unreported loss. A test calls it for a rank that has lost batches. It returns a violation if no Gap,
// no Cleared for a restart or a gap, and no snapshot has reported a loss.
func (c *Checker) Reported(worker string, dpRank uint32) error {
	if c.reported[rankKey{worker, dpRank}] > 0 {
		return nil
	}
	return broken(Reported, "worker %q, rank %d lost something that the stream does not report", worker, dpRank)
}

// rankKey identifies a dp rank of a worker.
type rankKey struct {
	worker string
	rank   uint32
}

// recordLosses records the losses that an entry reports.
func (c *Checker) recordLosses(e *kvcastv1.Entry) {
	for _, ev := range e.GetEvents() {
		switch ev.GetCleared().GetReason() {
		case kvcastv1.Cleared_REASON_ENGINE_RESTARTED, kvcastv1.Cleared_REASON_UNREPAIRED_GAP:
			c.reported[rankKey{e.GetWorker(), ev.GetDpRank()}]++
		default:
		}
		// A replay socket that may be another engine's is no loss.
		if g := ev.GetGap(); g != nil && g.GetReason() != kvcastv1.Gap_REASON_REPLAY_UNPROVED {
			c.reported[rankKey{e.GetWorker(), ev.GetDpRank()}]++
		}
	}
}
