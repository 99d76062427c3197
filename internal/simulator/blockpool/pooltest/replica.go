// Package pooltest checks the events of a block pool in tests.
package pooltest

import (
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// Replica is the state that a subscriber derives from a pool's events: the copies of each hash.
type Replica struct {
	counts map[uint64]int           // of the main group
	parent map[uint64]uint64        // of each hash ever stored; no key for a first block
	groups map[int64]map[uint64]int // counts of each group, of the main one too
}

// NewReplica returns the Replica of an empty pool.
func NewReplica() *Replica {
	counts := make(map[uint64]int)
	return &Replica{counts: counts, parent: make(map[uint64]uint64), groups: map[int64]map[uint64]int{0: counts}}
}

// Apply applies the events of a step, and fails the test if they violate the pool's order.
func (r *Replica) Apply(t rapid.TB, events []wire.Event) {
	t.Helper()
	for _, ev := range events {
		switch ev.Kind {
		case wire.KindCleared:
			for _, counts := range r.groups {
				clear(counts)
			}
		case wire.KindRemoved:
			if len(ev.BlockHashes) != 1 {
				t.Fatalf("a remove of %d hashes, want 1", len(ev.BlockHashes))
			}
			h := ev.BlockHashes[0]
			if ev.GroupIdx > 0 {
				if r.groups[ev.GroupIdx][h]--; r.groups[ev.GroupIdx][h] < 0 {
					t.Fatalf("remove of %x, which group %d does not have", h, ev.GroupIdx)
				}
				continue
			}
			if r.counts[h] == 0 {
				t.Fatalf("remove of %x, which is not in the pool", h)
			}
			if r.counts[h]--; r.counts[h] == 0 {
				delete(r.counts, h)
			}
			for child := range r.counts {
				if r.counts[h] == 0 && r.parent[child] == h {
					t.Fatalf("%x leaves before its child %x", h, child)
				}
			}
		case wire.KindStored:
			r.store(t, ev)
		}
	}
}

func (r *Replica) store(t rapid.TB, ev wire.Event) {
	t.Helper()
	if ev.GroupIdx > 0 {
		if r.groups[ev.GroupIdx] == nil {
			r.groups[ev.GroupIdx] = make(map[uint64]int)
		}
		for _, h := range ev.BlockHashes {
			r.groups[ev.GroupIdx][h]++
		}
		return
	}
	if len(ev.Tokens) != len(ev.BlockHashes)*int(ev.BlockSize) {
		t.Fatalf("%d tokens in %d blocks of %d", len(ev.Tokens), len(ev.BlockHashes), ev.BlockSize)
	}
	if ev.HasParent && r.counts[ev.Parent] == 0 {
		t.Fatalf("store after parent %x, which is not in the pool", ev.Parent)
	}
	parent := ev.Parent
	for _, h := range ev.BlockHashes {
		r.counts[h]++
		if parent != 0 {
			r.parent[h] = parent
		}
		parent = h
	}
}

// Check fails the test unless the replica equals the pool.
func (r *Replica) Check(t rapid.TB, p *blockpool.Pool) {
	t.Helper()
	set, copies := make(map[uint64]struct{}), 0
	for h, n := range r.counts {
		set[h] = struct{}{}
		copies += n
	}
	if diff := cmp.Diff(p.Blocks(), set); diff != "" {
		t.Fatalf("the events do not give what the pool holds (-pool +events):\n%s", diff)
	}
	if p.Copies() != copies || p.Len() != len(set) {
		t.Fatalf("the pool counts %d blocks and %d hashes, the events %d and %d", p.Copies(), p.Len(), copies, len(set))
	}
	var digest uint64
	for h := range set {
		digest ^= kvblock.Digest(h)
	}
	if got := p.Digest(); got != digest {
		t.Fatalf("Digest() = %x, want %x", got, digest)
	}
}

// Copies returns the number of copies of a hash in a group, 0 for the main one.
func (r *Replica) Copies(group int, hash uint64) int { return r.groups[int64(group)][hash] }
