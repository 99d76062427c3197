package pipeline

import (
	"maps"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// These tests are internal: they inspect the attributes of blocks, which snapshots contain
// and events do not.

// plainBlock contains all attributes of a block.
type plainBlock struct {
	Copies    int
	Parent    uint64
	HasParent bool
	LoRA      string
	BlockSize uint32
}

// plain returns all blocks of a table.
func plain(t *table) map[uint64]plainBlock {
	all := make(map[uint64]plainBlock)
	t.blocks.all(func(b *slot) {
		p := plainBlock{
			Copies:    1,
			Parent:    b.Value.parent,
			HasParent: b.Value.flags&flagParent != 0,
			LoRA:      t.attrs.At(b.Value.attr).LoRA,
			BlockSize: t.attrs.At(b.Value.attr).BlockSize,
		}
		if b.Value.flags&flagCopies != 0 {
			p.Copies += int(t.copies[b.Key()].Further)
		}
		all[b.Key()] = p
	})
	return all
}

// storePlain is the reference implementation of storing a run.
func storePlain(all map[uint64]plainBlock, r *run) {
	parent, hasParent := r.parent, r.hasParent
	for _, hash := range r.hashes {
		b, present := all[hash]
		if !present || r.key.hashed {
			b.Parent, b.HasParent = parent, hasParent
			b.LoRA, b.BlockSize = r.key.lora, r.key.blockSize
		}
		b.Copies++
		all[hash] = b
		parent, hasParent = hash, true
	}
}

func drawRun(t *rapid.T) *run {
	r := &run{key: runKey{
		kind:      wire.KindStored,
		lora:      rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "lora"),
		blockSize: rapid.SampledFrom([]uint32{0, 16}).Draw(t, "block size"),
		hashed:    rapid.Bool().Draw(t, "hashed"),
	}}
	if r.hasParent = rapid.Bool().Draw(t, "has parent"); r.hasParent {
		r.parent = rapid.Uint64Range(0, 3).Draw(t, "parent")
	}
	r.hashes = rapid.SliceOfN(rapid.Uint64Range(0, 5), 1, 3).Draw(t, "hashes")
	for i := range r.hashes {
		if r.key.hashed {
			r.tokensHashes = append(r.tokensHashes, uint64(100+i))
		}
	}
	return r
}

func TestNewestStoreReplacesABlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, want := newTable(nil), make(map[uint64]plainBlock)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch step := rapid.IntRange(0, 9).Draw(t, "step"); {
			case step < 5:
				r := drawRun(t)
				storeRun(table, r)
				storePlain(want, r)
			case step < 9:
				hash := rapid.Uint64Range(0, 5).Draw(t, "removed")
				gone := want[hash].Copies <= 1
				if got := table.remove(hash, copies.Remove); got != gone {
					t.Fatalf("remove %d: got gone %v, want %v", hash, got, gone)
				}
				if b := want[hash]; gone {
					delete(want, hash)
				} else {
					b.Copies--
					want[hash] = b
				}
			default:
				table.gap()
				for hash, b := range want {
					b.Copies = 1
					want[hash] = b
				}
			}
			if diff := cmp.Diff(want, plain(table)); diff != "" {
				t.Fatalf("table (-want +got):\n%s", diff)
			}
			checkAttributes(t, table)
		}
	})
}

// checkAttributes checks that the blocks' attributes are all that is interned.
func checkAttributes(t *rapid.T, table *table) {
	used := make(map[attribute.Set]bool)
	table.blocks.all(func(b *slot) { used[table.attrs.At(b.Value.attr)] = true })
	got := maps.Collect(func(yield func(attribute.Set, bool) bool) {
		for _, set := range table.attrs.All() {
			yield(set, true)
		}
	})
	if diff := cmp.Diff(used, got); diff != "" || len(used) != table.attrs.Len() {
		t.Fatalf("attributes in use: %d, (-want +got):\n%s", table.attrs.Len(), diff)
	}
}

func TestTableKeepsNoStringOfABatch(t *testing.T) {
	lora := []byte("adapter")
	table := newTable(nil)
	storeRun(table, &run{key: runKey{kind: wire.KindStored, lora: unsafe.String(&lora[0], len(lora))}, hashes: []uint64{1}})
	copy(lora, "another")
	if got, want := plain(table)[1].LoRA, "adapter"; got != want {
		t.Errorf("LoRA of the block once the batch's memory is used again: got %q, want %q", got, want)
	}
	if got := maps.Collect(table.attrs.All()); !maps.Equal(got, map[uint32]attribute.Set{0: {LoRA: "adapter"}}) {
		t.Errorf("attributes in use: got %v, want adapter", got)
	}
}

func TestStoreWithoutTokensKeepsParentAndAttributes(t *testing.T) {
	hashed := func(parent, hash uint64) *run {
		return &run{
			key:    runKey{kind: wire.KindStored, blockSize: 16, hashed: true},
			parent: parent, hasParent: true,
			hashes: []uint64{hash}, tokensHashes: []uint64{100},
		}
	}
	unhashed := &run{key: runKey{kind: wire.KindStored}, hashes: []uint64{1}}
	tests := map[string]struct {
		runs []*run
		want plainBlock
	}{
		"known before": {
			runs: []*run{hashed(7, 1), unhashed},
			want: plainBlock{Copies: 2, Parent: 7, HasParent: true, BlockSize: 16},
		},
		"known after": {
			runs: []*run{unhashed, hashed(7, 1)},
			want: plainBlock{Copies: 2, Parent: 7, HasParent: true, BlockSize: 16},
		},
		"never known": {
			runs: []*run{unhashed, unhashed},
			want: plainBlock{Copies: 2},
		},
		"newer content": {
			runs: []*run{hashed(7, 1), hashed(8, 1), unhashed},
			want: plainBlock{Copies: 3, Parent: 8, HasParent: true, BlockSize: 16},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			table := newTable(nil)
			for _, r := range test.runs {
				storeRun(table, r)
			}
			if diff := cmp.Diff(test.want, plain(table)[1]); diff != "" {
				t.Errorf("block (-want +got):\n%s", diff)
			}
		})
	}
}

// storeRun stores a run as a lane with sufficient budget does.
func storeRun(t *table, r *run) {
	slot, _ := t.acquireAttributes(r)
	t.storeRun(r, slot)
	t.attrs.Release(slot)
}
