package pipeline

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// encodedBlock is a block as stored and as encoded.
type encodedBlock struct {
	parent     uint64
	hasParent  bool
	tokensHash uint64
	hashed     bool
	lora       string
	blockSize  uint32
}

// encodeAll stores blocks in the given order, and returns the encoded blocks in order and
// the number of events.
func encodeAll(t interface{ Fatalf(string, ...any) }, blocks map[uint64]encodedBlock, order []uint64, first uint32) (encoded []uint64, as map[uint64]encodedBlock, events int) {
	l := &Lane{ranks: map[uint32]*rankState{0: {}}}
	table := l.newTable(l.ranks[0], wire.TierDevice)
	for _, hash := range order {
		b := blocks[hash]
		r := &run{
			key:    runKey{kind: wire.KindStored, lora: b.lora, blockSize: b.blockSize, hashed: b.hashed},
			parent: b.parent, hasParent: b.hasParent, hashes: []uint64{hash},
		}
		if b.hashed {
			r.tokensHashes = []uint64{b.tokensHash}
		}
		storeRun(table, r)
	}
	at := place{0, wire.TierDevice}
	slots, attrs := l.tableSize(at)
	c := l.copyTable(context.Background(), at, slots, attrs)
	defer c.free()
	as = make(map[uint64]encodedBlock)
	ended := c.encodeFrom(first, "w", eventHead{tier: wire.TierDevice}, func(piece []byte) bool {
		var m kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &m); err != nil {
			t.Fatalf("decode: %v", err)
		}
		for _, e := range m.GetEvents() {
			events++
			s := e.GetStored()
			b := encodedBlock{parent: s.GetParentHash(), hasParent: s.ParentHash != nil, lora: s.GetLoraName(), blockSize: s.GetBlockSize()}
			for i, hash := range s.GetBlockHashes() {
				if b.hashed = len(s.GetTokensHashes()) > 0; b.hashed {
					b.tokensHash = s.GetTokensHashes()[i]
				}
				if _, twice := as[hash]; twice {
					t.Fatalf("block %d is encoded twice", hash)
				}
				encoded, as[hash] = append(encoded, hash), b
				b.parent, b.hasParent = hash, true
			}
		}
		reusePiece(piece)
		return true
	})
	if !ended {
		t.Fatalf("it ended early")
	}
	return encoded, as, events
}

// TestSnapshotHasParentsBeforeChildren draws forests and cycles. Each block is encoded once,
// as it was stored, and after its parent unless it is in a cycle. Some exceed the limit of
// climbs.
func TestSnapshotHasParentsBeforeChildren(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.SampledFrom([]int{1, 5, 40, 400}).Draw(rt, "blocks")
		circles := rapid.IntRange(0, 3).Draw(rt, "circles") == 0
		near := rapid.IntRange(1, n+1).Draw(rt, "near")
		blocks, order := make(map[uint64]encodedBlock), make([]uint64, 0, n)
		for i := range n {
			b := encodedBlock{blockSize: 16, hashed: rapid.IntRange(0, 9).Draw(rt, "hashed") > 0}
			if b.hashed {
				b.tokensHash = uint64(1000 + i)
			}
			if rapid.IntRange(0, 9).Draw(rt, "adapter") == 0 {
				b.lora = rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "lora")
			}
			if b.hasParent = rapid.IntRange(0, 9).Draw(rt, "has parent") > 0; b.hasParent {
				b.parent = uint64(i - rapid.IntRange(-5, near).Draw(rt, "parent")) // negative: no such block
				if !circles && b.parent >= uint64(i) {
					b.parent = uint64(i - 1)
				}
			}
			order, blocks[uint64(i)] = append(order, uint64(i)), b
		}
		first := rapid.SampledFrom([]uint32{0, ancestryMask &^ (inStep - 1), ancestryMask - 5*inStep + 1}).Draw(rt, "first climb")
		encoded, as, _ := encodeAll(rt, blocks, rapid.Permutation(order).Draw(rt, "order"), first)
		if len(encoded) != n {
			rt.Fatalf("%d blocks are encoded, want %d", len(encoded), n)
		}
		before := make(map[uint64]bool)
		for _, hash := range encoded {
			b := blocks[hash]
			if as[hash] != b {
				rt.Fatalf("block %d is encoded as %+v, want %+v", hash, as[hash], b)
			}
			if _, there := blocks[b.parent]; there && b.hasParent && !before[b.parent] && !circles {
				rt.Fatalf("block %d is encoded before its parent %d", hash, b.parent)
			}
			before[hash] = true
		}
	})
}

// TestSnapshotEncodesAChainInFewEvents covers prompts of 64 blocks, and one long one.
func TestSnapshotEncodesAChainInFewEvents(t *testing.T) {
	for _, tt := range []struct{ prompts, blocks, most int }{
		{1, 64, 1}, {1, 1024, 1}, {1, 1025, 2}, {1, 10_000, 10}, {1000, 64, 7000},
	} {
		t.Run(fmt.Sprint(tt.prompts, " of ", tt.blocks), func(t *testing.T) {
			blocks, order := make(map[uint64]encodedBlock), []uint64(nil)
			for p := range uint64(tt.prompts) {
				for i := range uint64(tt.blocks) {
					hash := p<<32 | i
					blocks[hash], order = encodedBlock{blockSize: 16, hashed: true, parent: hash - 1, hasParent: i > 0}, append(order, hash)
				}
			}
			if encoded, _, events := encodeAll(t, blocks, order, 0); len(encoded) != len(order) || events > tt.most {
				t.Errorf("%d blocks in %d events, want %d in %d at most", len(encoded), events, len(order), tt.most)
			}
		})
	}
}

// TestMemoryOfACopyOfManyAdapters gives each block another adapter name.
func TestMemoryOfACopyOfManyAdapters(t *testing.T) {
	const blocks = 100_000
	l := &Lane{ranks: map[uint32]*rankState{0: {}}}
	table := l.newTable(l.ranks[0], wire.TierDevice)
	for i := range uint64(blocks) {
		storeRun(table, &run{key: runKey{kind: wire.KindStored, lora: fmt.Sprint(i), blockSize: 16}, hashes: []uint64{i}})
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	at := place{0, wire.TierDevice}
	slots, attrs := l.tableSize(at)
	c := l.copyTable(context.Background(), at, slots, attrs)
	runtime.ReadMemStats(&after)
	took, counted := int(after.TotalAlloc-before.TotalAlloc), copyBytes(slots, attrs)
	if attrs < blocks || took > counted*5/4 {
		t.Errorf("a copy of %d names took %d bytes, of which %d are counted", attrs, took, counted)
	}
	runtime.KeepAlive(c)
}
