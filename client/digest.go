package client

import (
	"fmt"
	"slices"

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

// compare proves the state by the server's digests, and has it replaced where they
// differ. A digest is of an entry: one that is not of what has been applied, neither
// more nor less, says nothing.
func (v *View) compare(u Update) {
	var wrong *DigestError
	compared, differed := uint64(0), uint64(0)
	for _, d := range u.Message.GetProgress().GetWorkers() {
		w := v.now.workers[d.GetWorker()]
		tier, ok := tierIndex(d.GetTier())
		if !ok || !u.subscription.takes(d, w) || d.GetSeq() > u.Position.Seq || w != nil && w.lastSeq > d.GetSeq() {
			continue
		}
		compared++
		want := BlocksDigest{d.GetBlocks(), d.GetDigest()}
		if got := v.now.digest(w, d.GetDpRank(), tier); got != want {
			differed++
			wrong = &DigestError{d.GetWorker(), d.GetDpRank(), d.GetTier(), d.GetSeq(), got, want}
		}
	}
	if compared == 0 {
		return
	}
	v.edit(func() {
		v.about.Compared += compared
		v.about.Differed += differed
	})
	if wrong != nil {
		u.Resnapshot(wrong)
	}
}

// takes tells whether a subscription's filter takes what a digest is of. A worker that
// is not known, w being nil, may be of another model.
func (s *subscription) takes(d *kvcastv1.WorkerDigest, w *worker) bool {
	if s == nil {
		return true
	}
	f := s.cfg.Filter
	return (len(f.GetTiers()) == 0 || slices.Contains(f.GetTiers(), d.GetTier())) &&
		(len(f.GetWorkers()) == 0 || slices.Contains(f.GetWorkers(), d.GetWorker())) &&
		(len(f.GetModels()) == 0 || w != nil)
}

// digest returns the fingerprint of a set of blocks; w may be nil.
func (st *state) digest(w *worker, rank uint32, tier int) BlocksDigest {
	if w == nil || w.ranks[rank] == nil {
		return BlocksDigest{}
	}
	r := w.ranks[rank]
	return BlocksDigest{r.blocks[tier], r.digests[tier]}
}

// splitmix64 is the first output of Vigna's generator of that name, seeded with x:
// https://prng.di.unimi.it/splitmix64.c.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
