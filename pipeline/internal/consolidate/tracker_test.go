package consolidate

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// trackerStep is one call of a tracker by a source.
type trackerStep func(*Tracker)

// engine and offload are the sources of these tests.
const (
	engine = iota
	offload
)

// storeOf returns a store of blocks with these contents and hashes.
func storeOf(contents []uint64, hashes ...uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 1, BlockHashes: hashes, TokensHashes: contents}
}

func contents(all ...uint64) []uint64 { return all }

func continuing(parent uint64, e wire.Event) wire.Event {
	e.HasParent, e.Parent = true, parent
	return e
}

func ofLoRA(name string, e wire.Event) wire.Event {
	e.LoRAName = name
	return e
}

func ofSalt(salt string, e wire.Event) wire.Event {
	e.CacheSalt = salt
	return e
}

func stores(source int, e wire.Event) trackerStep {
	return func(t *Tracker) { t.Store(source, &e, copies.Add) }
}

func removes(source int, hashes ...uint64) trackerStep {
	return func(t *Tracker) {
		for _, hash := range hashes {
			t.Remove(source, hash, copies.Remove)
		}
	}
}

func clears(source int) trackerStep { return func(t *Tracker) { t.ClearSource(source) } }

func losesBatches(source int) trackerStep { return func(t *Tracker) { t.Gap(source) } }

func resetAll(t *Tracker) { t.Reset() }

// play makes calls, and returns the changes that each queues as text.
func (t *Tracker) play(steps ...trackerStep) (changes []string) {
	for _, step := range steps {
		step(t)
		queued, removed := t.Drain()
		text := ""
		for _, o := range queued {
			switch {
			case o.Removed:
				text += fmt.Sprintf("remove %v ", removed[o.I:o.J])
			case o.Rooted:
				text += fmt.Sprintf("store %d-%d ", o.I, o.J)
			default:
				text += fmt.Sprintf("store %d-%d after %d ", o.I, o.J, o.Parent)
			}
		}
		changes = append(changes, text)
	}
	return changes
}

// waysToPlay are ways to make calls that give the same changes.
var waysToPlay = map[string]func(*Tracker, ...trackerStep) []string{
	"plain": (*Tracker).play,
	"restored before each call": func(t *Tracker, steps ...trackerStep) (changes []string) {
		for _, step := range steps {
			restored, err := Restore(t.AppendState(nil), t.sources, t.maxBlocks, t.budget, nil, t.counts)
			if err != nil {
				return append(changes, err.Error())
			}
			t.Reset()
			*t = *restored
			changes = append(changes, t.play(step)...)
		}
		return changes
	},
}

func TestTracker(t *testing.T) {
	one := contents(100)
	tests := map[string]struct {
		steps  []trackerStep
		want   []string // changes by step
		blocks int      // at the end
	}{
		"the first store of a block is emitted": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1))},
			want:   []string{"store 0-1 "},
			blocks: 1,
		},
		"a second store by the same source is not emitted": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a store by another source under another hash is not emitted": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a store by another source under the same hash is not emitted": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 1))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a remove by the only source is emitted": {
			steps: []trackerStep{stores(engine, storeOf(one, 1)), removes(engine, 1)},
			want:  []string{"store 0-1 ", "remove [1] "},
		},
		"of two sources, only the last remove is emitted": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(offload, 2), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"the last remove is emitted with the router hash": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(engine, 1), removes(offload, 2),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"sources that share a block hash can each remove it": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 1)), removes(engine, 1), removes(offload, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"one hash names different blocks for two sources": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(contents(200), 1)), removes(engine, 1), removes(offload, 1),
			},
			want: []string{"store 0-1 ", "store 0-1 ", "remove [1] ", "remove [1] "},
		},
		"a child with a parent is another block than one without": {
			steps:  []trackerStep{stores(engine, storeOf(contents(100, 100), 1, 2)), stores(offload, storeOf(one, 3))},
			want:   []string{"store 0-2 ", ""},
			blocks: 2,
		},
		"the same tokens at another position are another block": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(100, 200), 1, 2)), stores(offload, storeOf(contents(200, 100), 3, 4)),
			},
			want:   []string{"store 0-2 ", "store 0-2 "},
			blocks: 4,
		},
		"a second source's store names the parent by the first source's hash": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(100, 200), 1, 2)), stores(offload, continuing(1, storeOf(contents(200), 7))),
			},
			want:   []string{"store 0-2 ", ""},
			blocks: 2,
		},
		"a source's own name takes precedence over another's": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(100), 1)), stores(offload, storeOf(contents(200), 1)),
				stores(offload, continuing(1, storeOf(contents(300), 2))), stores(engine, continuing(1, storeOf(contents(300), 3))),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", "store 0-1 after 1 ", "store 0-1 after 1 "},
			blocks: 4,
		},
		"the parent is emitted with its router hash": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(contents(100, 200), 11, 12)),
			},
			want:   []string{"store 0-1 ", "store 1-2 after 1 "},
			blocks: 2,
		},
		"only the new blocks of a store are emitted, in parts": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3, 4), 1, 2, 3, 4)), removes(engine, 2, 4),
				stores(offload, storeOf(contents(1, 2, 3, 4, 5), 11, 12, 13, 14, 15)),
			},
			want:   []string{"store 0-4 ", "remove [2 4] ", "store 1-2 after 1 store 3-5 after 3 "},
			blocks: 5,
		},
		"a reset removes blocks and names": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), resetAll, removes(engine, 1),
				stores(offload, continuing(1, storeOf(contents(200), 5))), stores(offload, storeOf(one, 2)),
			},
			want:   []string{"store 0-1 ", "", "", "", "store 0-1 after 1 ", "store 0-1 "},
			blocks: 2,
		},
		"a remove of an unknown block is not emitted": {
			steps: []trackerStep{removes(engine, 1)},
			want:  []string{""},
		},
		"a remove by a source without the block is not emitted": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), removes(offload, 1)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a remove by another source's name removes the source's own block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(engine, 2), removes(offload, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"base model and LoRA are different blocks": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, ofLoRA("a", storeOf(one, 2))), stores(engine, ofLoRA("a", storeOf(one, 3))),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", ""},
			blocks: 2,
		},
		"salts are different blocks": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, ofSalt("a", storeOf(one, 2))), stores(engine, ofSalt("a", storeOf(one, 3))),
				stores(engine, ofLoRA("a", storeOf(one, 4))),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", "", "store 0-1 "},
			blocks: 3,
		},
		"a block stored twice and removed once remains": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), removes(engine, 1)},
			want:   []string{"store 0-1 ", "", ""},
			blocks: 1,
		},
		"a block with two names of one source remains until both are removed": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), removes(engine, 1), removes(engine, 2),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"a second remove by the later name does not count for the first name": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), removes(engine, 2), removes(engine, 2),
			},
			want:   []string{"store 0-1 ", "", "", ""},
			blocks: 1,
		},
		"three stores need three removes": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)),
				removes(engine, 1), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"an unknown parent is emitted as given": {
			steps:  []trackerStep{stores(engine, continuing(9, storeOf(contents(100, 200), 1, 2)))},
			want:   []string{"store 0-2 after 9 "},
			blocks: 2,
		},
		"a block after an unknown parent is known by its names": {
			steps: []trackerStep{
				stores(engine, continuing(9, storeOf(one, 1))), stores(offload, continuing(9, storeOf(one, 2))),
				stores(offload, continuing(8, storeOf(contents(300), 1))),
			},
			want:   []string{"store 0-1 after 9 ", "store 0-1 after 9 ", ""},
			blocks: 2,
		},
		"an unknown parent of 0 means no parent": {
			steps: []trackerStep{stores(engine, continuing(0, storeOf(one, 1))), stores(offload, storeOf(one, 2))},
			want:  []string{"store 0-1 ", ""}, blocks: 1,
		},
		"a parent of 0 that is a block's hash is that block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 0)), stores(engine, continuing(0, storeOf(one, 1))), stores(offload, storeOf(contents(100, 100), 5, 6)),
			},
			want: []string{"store 0-1 ", "store 0-1 after 0 ", ""}, blocks: 2,
		},
		"hash-only stores are known by their names": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1, 2)), stores(offload, storeOf(nil, 2)), removes(engine, 1, 2), removes(offload, 2),
			},
			want: []string{"store 0-2 ", "", "remove [1] ", "remove [2] "},
		},
		"a hash-only store by a known name adds a copy": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(nil, 2)),
				removes(engine, 1), removes(offload, 2), removes(engine, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"a block known by name is identified by a store with content": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "remove [1] store 0-1 ", "", "", "", "remove [1] "},
		},
		"a block known by name is merged into the block of its content": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(one, 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "store 0-1 ", "remove [1] ", "", "", "remove [2] "},
		},
		"a name stored as another block no longer names the first": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(contents(200), 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "store 0-1 ", "remove [1] ", "", "remove [1] "},
		},
		"a clear of one source keeps the other's blocks": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3), 1, 2, 3)), stores(offload, storeOf(contents(1), 11)),
				clears(engine), removes(offload, 11),
			},
			want: []string{"store 0-3 ", "", "remove [2 3] ", "remove [1] "},
		},
		"a clear of the second source keeps the first source's blocks": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1, 2, 3), 11, 12, 13)), clears(offload),
			},
			want:   []string{"store 0-2 ", "store 2-3 after 2 ", "remove [13] "},
			blocks: 2,
		},
		"a clear of a source removes every copy": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), stores(offload, storeOf(one, 3)),
				clears(engine), removes(offload, 3),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"a clear that empties the rank emits no removes": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(offload, 2), clears(engine),
			},
			want: []string{"store 0-1 ", "", "", ""},
		},
		"a clear of a source without blocks changes nothing": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), clears(offload)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a new incarnation stores the same blocks by new names": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1, 2), 11, 12)), clears(engine),
				stores(engine, storeOf(contents(1, 2), 21, 22)), removes(offload, 11, 12), removes(engine, 22, 21),
			},
			want: []string{"store 0-2 ", "", "", "", "", "remove [2 1] "},
		},
		"after a gap of one source the other's last remove is emitted": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesBatches(engine), removes(offload, 2), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] ", ""},
		},
		"after a gap of one source its own remove is not emitted": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesBatches(engine), removes(engine, 1), removes(offload, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "remove [1] "},
		},
		"after a gap a source's blocks have one copy": {
			steps: []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), losesBatches(engine), removes(engine, 1)},
			want:  []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"after a gap the blocks of its source remain": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), losesBatches(engine)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a name stored after a gap is not stale": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesBatches(engine), stores(engine, storeOf(one, 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "", "", "", "remove [1] "},
		},
		"after a gap of every source any remove is emitted": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesBatches(engine), losesBatches(offload), removes(offload, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "remove [1] "},
		},
		"a clear of one source removes blocks that are stale for the other": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1), 11)), losesBatches(engine), clears(offload),
			},
			want: []string{"store 0-2 ", "", "", "remove [1] "}, blocks: 1,
		},
		"an idle name resolves as parent as long as another source has the block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101),
				stores(offload, continuing(101, storeOf(contents(200), 102))), stores(engine, continuing(1, storeOf(contents(200), 2))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 ", ""}, blocks: 2,
		},
		"another source's idle name resolves as parent": {
			steps: []trackerStep{
				stores(offload, storeOf(one, 101)), stores(engine, storeOf(one, 1)), removes(engine, 1),
				stores(offload, continuing(1, storeOf(contents(200), 102))), stores(engine, storeOf(contents(100, 200), 1, 2)),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 101 ", ""}, blocks: 2,
		},
		"a name is removed with its block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101), removes(engine, 1),
				stores(offload, continuing(101, storeOf(contents(200), 102))), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] ", "store 0-1 after 101 ", ""}, blocks: 1,
		},
		"the names of a source that cleared its cache resolve for itself": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), clears(offload),
				stores(offload, continuing(101, storeOf(contents(200), 102))), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 ", "remove [1] "}, blocks: 1,
		},
		"the names of a source that cleared its cache resolve for others": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), clears(engine),
				stores(offload, continuing(1, storeOf(contents(200), 102))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 "}, blocks: 2,
		},
		"a name stored by a new incarnation names the new block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), clears(offload),
				stores(offload, storeOf(contents(200), 101)), stores(offload, continuing(101, storeOf(contents(300), 102))),
				removes(offload, 101), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 ", "store 0-1 after 101 ", "remove [101] ", "remove [1] "}, blocks: 1,
		},
		"an idle name that is stored again has one copy": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), stores(offload, storeOf(one, 101)),
				removes(offload, 101, 101), stores(offload, storeOf(one, 101)), removes(engine, 1), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "", "", "", "remove [1] "},
		},
		"a hash-only store by an idle name makes it live": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101),
				stores(offload, storeOf(nil, 101)), removes(engine, 1), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"the names of a merged block resolve": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(offload, storeOf(nil, 1)), removes(offload, 1),
				stores(offload, storeOf(one, 102)), stores(engine, storeOf(one, 1)), stores(engine, storeOf(contents(300), 1)),
				stores(offload, continuing(1, storeOf(contents(200), 103))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 ", "remove [1] ", "store 0-1 ", "store 0-1 after 102 "}, blocks: 3,
		},
		"a second remove by the first name does not count for the later name": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), removes(engine, 1), removes(engine, 1),
			},
			want:   []string{"store 0-1 ", "", "", ""},
			blocks: 1,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for name, play := range waysToPlay {
				tr := New(2, 100, nil, nil, &Counts{})
				if diff := cmp.Diff(test.want, play(tr, test.steps...)); diff != "" {
					t.Errorf("%s: changes (-want +got):\n%s", name, diff)
				}
				if got := tr.Len(); got != test.blocks {
					t.Errorf("%s: blocks: got %d, want %d", name, got, test.blocks)
				}
				checkTracker(t, tr)
			}
		})
	}
}
