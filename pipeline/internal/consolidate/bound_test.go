package consolidate

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

func TestTrackerIsBounded(t *testing.T) {
	tests := map[string]struct {
		steps  []trackerStep
		want   []string
		counts Counts
		names  int
	}{
		"a block beyond the limit is refused, and its child has an unknown parent": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3, 4), 1, 2, 3, 4)), removes(engine, 1), stores(engine, continuing(4, storeOf(contents(5), 5))),
			},
			want:   []string{"store 0-3 ", "remove [1] ", "store 0-1 after 4 "},
			counts: Counts{Refused: [NumRefusals]uint64{1}}, names: 3,
		},
		"a present block needs no room": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3), 1, 2, 3)), stores(offload, storeOf(contents(1, 2, 3, 4), 11, 12, 13, 14)),
			},
			want:   []string{"store 0-3 ", ""},
			counts: Counts{Refused: [NumRefusals]uint64{1}}, names: 6,
		},
		"a name beyond the limit is refused": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1), 1)), stores(engine, storeOf(contents(1), 2)), stores(engine, storeOf(contents(1), 3)),
				stores(engine, storeOf(contents(1), 4)), stores(engine, storeOf(contents(1), 5)), stores(engine, storeOf(contents(1), 6)),
				stores(engine, storeOf(contents(1), 7)), stores(engine, storeOf(contents(1), 6)), removes(engine, 6), stores(engine, storeOf(contents(1), 7)),
				removes(engine, 6), stores(engine, storeOf(contents(1), 7)),
			},
			want:   []string{"store 0-1 ", "", "", "", "", "", "", "", "", "", "", ""},
			counts: Counts{Refused: [NumRefusals]uint64{2}, Suppressed: 2}, names: 7,
		},
		"an idle name that becomes live needs room": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1), 1)), removes(engine, 1), stores(offload, storeOf(contents(1), 11)), stores(engine, storeOf(contents(1), 1)),
				removes(engine, 1), stores(offload, storeOf(contents(1), 12)), stores(offload, storeOf(contents(1), 13)), stores(offload, storeOf(contents(1), 14)),
				stores(offload, storeOf(contents(1), 15)), stores(offload, storeOf(contents(1), 16)), stores(engine, storeOf(contents(1), 1)),
				removes(offload, 16), stores(engine, storeOf(contents(1), 1)),
			},
			want:   []string{"store 0-1 ", "remove [1] ", "store 0-1 ", "", "", "", "", "", "", "", "", "", ""},
			counts: Counts{Refused: [NumRefusals]uint64{1}, Suppressed: 2}, names: 7,
		},
		"the oldest stale block is removed to make room": {
			steps: []trackerStep{
				stores(offload, storeOf(contents(1), 11)), stores(engine, storeOf(contents(2, 3), 2, 3)), losesBatches(engine),
				stores(offload, storeOf(contents(4), 14)), stores(engine, storeOf(contents(5), 5)), stores(engine, storeOf(contents(6), 6)),
			},
			want:   []string{"store 0-1 ", "store 0-2 ", "", "remove [2] store 0-1 ", "remove [3] store 0-1 ", ""},
			counts: Counts{StaleRemoved: 2, Refused: [NumRefusals]uint64{1}}, names: 3,
		},
		"the next stale block is removed if the oldest is gone": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1), 1)), stores(engine, storeOf(contents(2), 2)), stores(engine, storeOf(contents(3), 3)),
				losesBatches(engine), removes(engine, 1), stores(engine, storeOf(contents(4), 4)), stores(engine, storeOf(contents(5), 5)),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", "store 0-1 ", "", "remove [1] ", "store 0-1 ", "remove [2] store 0-1 "},
			counts: Counts{StaleRemoved: 1}, names: 3,
		},
		"a block is not stale that was stored since the gap or that another source has": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1), 1)), stores(engine, storeOf(contents(2), 2)), stores(engine, storeOf(contents(3), 3)),
				losesBatches(engine), stores(engine, storeOf(contents(1), 1)), stores(offload, storeOf(contents(2), 12)),
				stores(engine, storeOf(contents(4), 4)), stores(engine, storeOf(contents(5), 5)),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", "store 0-1 ", "", "", "", "remove [3] store 0-1 ", ""},
			counts: Counts{StaleRemoved: 1, Refused: [NumRefusals]uint64{1}}, names: 4,
		},
		"after another gap the oldest block is stale again": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3), 1, 2, 3)), losesBatches(engine), stores(engine, storeOf(contents(1), 1)),
				stores(engine, storeOf(contents(4), 4)), losesBatches(engine), stores(engine, storeOf(contents(5), 5)),
			},
			want:   []string{"store 0-3 ", "", "", "remove [2] store 0-1 ", "", "remove [1] store 0-1 "},
			counts: Counts{StaleRemoved: 2}, names: 3,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for name, play := range waysToPlay {
				var counts Counts
				tr := New(2, 3, nil, nil, &counts)
				if diff := cmp.Diff(test.want, play(tr, test.steps...)); diff != "" {
					t.Errorf("%s: changes (-want +got):\n%s", name, diff)
				}
				if counts != test.counts || tr.names.len() != test.names {
					t.Errorf("%s: got %+v and %d names, want %+v and %d", name, counts, tr.names.len(), test.counts, test.names)
				}
				checkTracker(t, tr)
			}
		})
	}
}

// TestIdleNamesAreBounded renames a block of one source repeatedly. Another source has the block;
// the block's router hash is the first source's oldest idle name.
func TestIdleNamesAreBounded(t *testing.T) {
	const renames = 3 * maxIdleNames
	tr := New(2, 100, nil, nil, &Counts{})
	tr.play(stores(engine, storeOf(contents(7), 1)), stores(offload, storeOf(contents(7), 11)), stores(offload, storeOf(contents(7), 12)))
	tr.play(stores(offload, storeOf(contents(7), 1)), removes(offload, 1), removes(engine, 1), removes(offload, 12))
	for h := range uint64(renames) {
		tr.play(stores(engine, storeOf(contents(7), 100+h)), removes(engine, 100+h))
	}
	checkTracker(t, tr)
	resolved := make(map[uint64]bool)
	for hash := range uint64(100 + renames) {
		if tr.resolve(engine, hash) != 0 {
			resolved[hash] = true
		}
	}
	want := map[uint64]bool{1: true, 11: true, 12: true}
	for h := range uint64(maxIdleNames) {
		want[100+renames-1-h] = true
	}
	if diff := cmp.Diff(want, resolved); diff != "" {
		t.Errorf("names that resolve (-want +got):\n%s", diff)
	}
	if tr.name(engine, 1) == 0 || tr.name(offload, 1) == 0 {
		t.Error("a source's name with the router hash was dropped")
	}
	if _, gone := tr.play(removes(offload, 11)), tr.names.len(); gone != 0 {
		t.Errorf("names after the last remove: got %d, want 0", gone)
	}
}

// TestIdleNamesWithChildrenAreKept renames a block of one source repeatedly, which has stored a child of its first name, or of all names.
func TestIdleNamesWithChildrenAreKept(t *testing.T) {
	for name, c := range map[string]struct {
		parents, kept []uint64
	}{
		"none": {nil, []uint64{102, 103, 104, 105}},
		"one":  {[]uint64{100}, []uint64{100, 103, 104, 105}},
		"two":  {[]uint64{101, 103}, []uint64{101, 103, 104, 105}},
		"all":  {[]uint64{100, 101, 102, 103, 104, 105}, []uint64{102, 103, 104, 105}},
	} {
		tr := New(2, 100, nil, nil, &Counts{})
		tr.play(stores(offload, storeOf(contents(7), 11)))
		for h := uint64(100); h < 106; h++ {
			tr.play(stores(engine, storeOf(contents(7), h)))
			if slices.Contains(c.parents, h) {
				tr.play(stores(engine, continuing(h, storeOf(contents(h), 1000+h))))
			}
			tr.play(removes(engine, h))
		}
		var kept []uint64
		for h := uint64(100); h < 106; h++ {
			if tr.Resolves(engine, h) {
				kept = append(kept, h)
			}
		}
		if diff := cmp.Diff(c.kept, kept); diff != "" {
			t.Errorf("%s: names that resolve (-want +got):\n%s", name, diff)
		}
		checkTracker(t, tr)
	}
}

// TestClearedNamesBecomeIdleInTheOrderOfHashes clears a source with two names of a block, and then renames the block until one of them
// is dropped.
func TestClearedNamesBecomeIdleInTheOrderOfHashes(t *testing.T) {
	for _, names := range [][]uint64{{3, 5}, {5, 3}} {
		tr := New(2, 100, nil, nil, &Counts{})
		tr.play(stores(offload, storeOf(contents(7), 11)))
		for _, hash := range names {
			tr.play(stores(engine, storeOf(contents(7), hash)))
		}
		tr.play(clears(engine))
		for h := range uint64(maxIdleNames - 1) {
			tr.play(stores(engine, storeOf(contents(7), 100+h)), removes(engine, 100+h))
		}
		if tr.Resolves(engine, 3) || !tr.Resolves(engine, 5) {
			t.Errorf("stored as %v: 3 resolves: %t, 5 resolves: %t, want only 5", names, tr.Resolves(engine, 3), tr.Resolves(engine, 5))
		}
	}
}

// TestSearchForRoomIsBounded has more blocks before the first stale block than one search visits.
func TestSearchForRoomIsBounded(t *testing.T) {
	const blocks = maxStaleSteps + 2
	tr := New(2, blocks, nil, nil, &Counts{})
	for h := range uint64(blocks) {
		source := offload
		if h == blocks-1 {
			source = engine
		}
		tr.play(stores(source, storeOf(contents(h), h)))
	}
	got := tr.play(losesBatches(engine), stores(engine, storeOf(contents(1<<40), 1<<40)), stores(engine, storeOf(contents(1<<41), 1<<41)))
	if diff := cmp.Diff([]string{"", "", "remove [4097] store 0-1 "}, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestGapFailsWithoutAFurtherGeneration(t *testing.T) {
	tr := New(2, 10, nil, nil, &Counts{})
	tr.generations[engine] = maxGeneration - 1
	tr.play(stores(engine, storeOf(contents(1), 1)), stores(offload, storeOf(contents(1), 1)))
	if !tr.Gap(engine) {
		t.Error("the last gap: got false")
	}
	if got := tr.play(removes(offload, 1)); got[0] != "remove [1] " {
		t.Errorf("remove after the last gap: got %q", got[0])
	}
	if tr.Gap(engine) {
		t.Error("a gap after the last: got true")
	}
	if !tr.Gap(offload) {
		t.Error("another source's gap: got false")
	}
	tr.Reset()
	if !tr.Gap(engine) {
		t.Error("a gap after a reset: got false")
	}
}

// TestLookupReturnsTheSourcesOfBlocks covers a block whose router hash is an idle name, a block
// whose router hash also names another block, and a block with two names of one source.
func TestLookupReturnsTheSourcesOfBlocks(t *testing.T) {
	tr := New(3, 10, nil, nil, &Counts{})
	tr.play(
		stores(0, storeOf(contents(1, 2, 3), 1, 2, 3)), stores(2, storeOf(contents(1, 2), 21, 22)), stores(1, storeOf(contents(1), 11)),
		removes(0, 2), stores(1, storeOf(contents(9), 3)), stores(2, storeOf(contents(1), 31)), losesBatches(1),
	)
	for hash, want := range map[uint64]map[uint64][]int{
		1: {1: {0, 1, 2}}, 2: {2: {2}}, 3: {3: {0, 1}}, 11: {1: {0, 1, 2}}, 22: {2: {2}}, 4: {},
	} {
		if diff := cmp.Diff(want, tr.Lookup(hash)); diff != "" {
			t.Errorf("hash %d (-want +got):\n%s", hash, diff)
		}
	}
	if got := tr.Lookup(22, 3, 4); len(got) != 2 {
		t.Errorf("several hashes: got %v, want blocks 2 and 3", got)
	}
}

// TestStoreCopiesStrings overwrites the memory of an event's string after the call.
func TestStoreCopiesStrings(t *testing.T) {
	tr := New(2, 10, nil, nil, &Counts{})
	b := []byte("adapter")
	e := ofLoRA(unsafe.String(&b[0], len(b)), storeOf(contents(1), 1))
	tr.play(stores(engine, e))
	copy(b, "!!!!!!!")
	if got := tr.play(stores(offload, ofLoRA("adapter", storeOf(contents(1), 2)))); got[0] != "" {
		t.Errorf("the same block by another source: got %q, want nothing", got[0])
	}
}

// TestSequenceHashDependsOnAllTokensBefore covers the hash that identifies a block.
func TestSequenceHashDependsOnAllTokensBefore(t *testing.T) {
	hash := func(lora, salt string, tokens ...uint32) uint64 {
		return kvblock.AppendTokensHashes(nil, tokens, len(tokens), kvblock.Seed(lora, salt), false, nil)[0]
	}
	first := hash("", "", 1, 2, 3, 4)
	sequence := func(contents ...uint64) uint64 {
		tr := New(2, 10, nil, nil, &Counts{})
		tr.play(stores(engine, storeOf(contents, []uint64{1, 2, 3}[:len(contents)]...)))
		return tr.blocks.at(tr.newest).content.sequence
	}
	if got := sequence(first); got != first {
		t.Errorf("sequence hash of a first block: got %x, want its tokens hash %x", got, first)
	}
	if got := sequence(first, 7); got != kvblock.SequenceHash(first, 7) || got != sequence(first, 7) {
		t.Errorf("sequence hash of a second block: got %x, want %x", got, kvblock.SequenceHash(first, 7))
	}
	seen := map[uint64]string{first: "1 2 3 4"}
	for input, h := range map[string]uint64{
		"1 2 3 5": hash("", "", 1, 2, 3, 5), "2 1 3 4": hash("", "", 2, 1, 3, 4), "1 2 3": hash("", "", 1, 2, 3), "LoRA": hash("a", "", 1, 2, 3, 4), "salt": hash("", "a", 1, 2, 3, 4),
		"after itself": sequence(first, first), "after another": sequence(7, first), "before another": sequence(first, 7), "third": sequence(7, 7, first),
	} {
		if other, twice := seen[h]; twice {
			t.Errorf("%s and %s have the same hash", input, other)
		}
		seen[h] = input
	}
	if first != hash("", "", 1, 2, 3, 4) {
		t.Error("the same tokens have two hashes")
	}
}

// TestBlocksOfAdaptersAreDistinct makes enough small trackers that in some of them blocks with
// equal sequence hashes are neighbors in byContent.
func TestBlocksOfAdaptersAreDistinct(t *testing.T) {
	const n = 8
	for first := range uint64(2000) {
		tr := New(2, 100, nil, nil, new(Counts))
		for lora, name := range []string{"", "a", "b"} {
			var hashes, tokens []uint64
			for i := range uint64(n) {
				hashes, tokens = append(hashes, i+uint64(lora)*n+1), append(tokens, first*n+i)
			}
			tr.Store(engine, new(ofLoRA(name, storeOf(tokens, hashes...))), copies.Add)
		}
		if tr.Len() != 3*n {
			t.Fatalf("tracker %d: got %d blocks, want those of three adapters: %d", first, tr.Len(), 3*n)
		}
	}
}
