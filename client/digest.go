package client

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// DigestError is a View that does not hold what the server says a worker holds.
type DigestError struct {
	Worker string
	Rank   uint32
	Tier   kvcastv1.Tier
	// Seq is the entry after which they were compared.
	Seq uint64
	// The blocks that the View has, and those that it should have.
	Got, Want BlocksDigest
}

// BlocksDigest is a fingerprint of a set of block hashes.
type BlocksDigest struct {
	// Blocks is how many there are.
	Blocks uint64
	// XOR is that of splitmix64 of each.
	XOR uint64
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("the view of worker %q, rank %d, %v has %d blocks with digest %016x after entry %d, the server %d with %016x",
		e.Worker, e.Rank, e.Tier, e.Got.Blocks, e.Got.XOR, e.Seq, e.Want.Blocks, e.Want.XOR)
}

// rankTier is a set of blocks of a worker.
type rankTier struct {
	rank uint32
	tier int
}

// compare proves the state by the server's digests, which are of the update's position,
// and has it replaced where they differ. Of a worker that is named what is not is empty.
func (v *View) compare(u Update) {
	told := make(map[string]map[rankTier]BlocksDigest)
	for _, d := range u.Message.GetProgress().GetWorkers() {
		tier, ok := tierIndex(d.GetTier())
		if !ok {
			continue
		}
		if told[d.GetWorker()] == nil {
			told[d.GetWorker()] = make(map[rankTier]BlocksDigest)
		}
		told[d.GetWorker()][rankTier{d.GetDpRank(), tier}] = BlocksDigest{d.GetBlocks(), d.GetDigest()}
	}
	if len(told) == 0 {
		return
	}
	var compared, differed uint64
	var wrong *DigestError
	for name, sets := range told {
		w := v.now.workers[name]
		if w != nil {
			for number := range w.ranks {
				for tier := range numTiers {
					if at := (rankTier{number, tier}); sets[at] == (BlocksDigest{}) {
						sets[at] = BlocksDigest{} // it is not told, so it has no blocks
					}
				}
			}
		}
		for at, want := range sets {
			compared++
			if got := v.now.digest(w, at.rank, at.tier); got != want {
				differed++
				wrong = &DigestError{name, at.rank, kvcastv1.Tier(at.tier + 1), u.Position.Seq, got, want}
			}
		}
	}
	v.edit(func() {
		v.about.Compared += compared
		v.about.Differed += differed
	})
	if wrong != nil {
		u.Resnapshot(wrong)
	}
}

// digest returns the fingerprint of a set of blocks; w may be nil.
func (st *state) digest(w *worker, rank uint32, tier int) BlocksDigest {
	if w == nil || w.ranks[rank] == nil {
		return BlocksDigest{}
	}
	r := w.ranks[rank]
	return BlocksDigest{r.blocks[tier], r.digests[tier]}
}
