package indexers

import (
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// workload is what both tests examine.
var workload = sync.OnceValue(Generate)

// held are the blocks of each worker.
type held [Workers]map[uint64]bool

// apply applies the events of a phase. Stores must be of new blocks with held parents, removes of held blocks.
func (h *held) apply(t *testing.T, p *Phase) (stores, single, stored, removed int) {
	t.Helper()
	p.Events(func(e *Event) {
		blocks := h[e.Worker]
		if e.Stored {
			stores++
			if len(e.Blocks) == 1 {
				single++
			}
			stored += len(e.Blocks)
			if e.HasParent && !blocks[e.Parent] || len(e.Tokens) != len(e.Blocks) {
				t.Fatalf("worker %d stores %d blocks with %d tokens hashes after %x", e.Worker, len(e.Blocks), len(e.Tokens), e.Parent)
			}
		} else {
			removed += len(e.Blocks)
		}
		for _, b := range e.Blocks {
			if blocks[b] == e.Stored {
				t.Fatalf("worker %d: block %x, stored %v, and it was %v", e.Worker, b, e.Stored, blocks[b])
			}
			if blocks[b] = e.Stored; !e.Stored {
				delete(blocks, b)
			}
		}
	})
	if stored+removed != p.Blocks {
		t.Errorf("%d blocks, the phase says %d", stored+removed, p.Blocks)
	}
	return stores, single, stored, removed
}

// TestWorkloadIsThatOfEngines checks the events of Fill and Churn, their numbers, and that 95 % of the stores are of one
// block.
func TestWorkloadIsThatOfEngines(t *testing.T) {
	testclass.WithoutRace(t)
	w := workload()
	var h held
	for i := range h {
		h[i] = make(map[uint64]bool)
	}
	const million = Workers * perWorker
	stores, single, stored, removed := h.apply(t, &w.Phases[Fill])
	if stored < million || stored > million*101/100 || removed != 0 {
		t.Errorf("Fill stores %d and removes %d blocks", stored, removed)
	}
	churnStores, churnSingle, churnStored, removed := h.apply(t, &w.Phases[Churn])
	if churnStored != removed || removed < million || removed > million*101/100 {
		t.Errorf("Churn stores %d and removes %d blocks", churnStored, removed)
	}
	if part := float64(single+churnSingle) / float64(stores+churnStores); part < 0.94 || part > 0.96 {
		t.Errorf("%.3f of the stores are of one block", part)
	}
	if n := len(w.Phases[Churn].AllPrompts()); n != lookups {
		t.Errorf("%d prompts, want %d", n, lookups)
	}
}

func TestReadFileReturnsTheWorkload(t *testing.T) {
	testclass.WithoutRace(t)
	w := workload()
	name := filepath.Join(t.TempDir(), "workload")
	if err := w.WriteFile(name); err != nil {
		t.Fatal(err)
	}
	got, err := ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for i := range w.Phases {
		p, q := &w.Phases[i], &got.Phases[i]
		if !slices.Equal(p.words, q.words) || !slices.Equal(p.prompts, q.prompts) || p.Blocks != q.Blocks || p.Prompts != q.Prompts {
			t.Errorf("phase %d differs", i)
		}
	}
	if got.Checksum != w.Checksum {
		t.Errorf("checksum %x, want %x", got.Checksum, w.Checksum)
	}
}
