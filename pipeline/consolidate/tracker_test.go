package consolidate

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/pipeline/copies"
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
	return wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 1, BlockHashes: hashes, TokensHashes: contents}
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

func letsGo(source int) trackerStep { return func(t *Tracker) { t.ClearSource(source) } }

func losesSome(source int) trackerStep { return func(t *Tracker) { t.Gap(source) } }

func clearAll(t *Tracker) { t.Reset() }

// play makes calls, and describes the events that each one emits.
func (t *Tracker) play(steps ...trackerStep) (heard []string) {
	for _, step := range steps {
		step(t)
		out, gone := t.Drain()
		text := ""
		for _, o := range out {
			switch {
			case o.Removed:
				text += fmt.Sprintf("remove %v ", gone[o.I:o.J])
			case o.Rooted:
				text += fmt.Sprintf("store %d-%d ", o.I, o.J)
			default:
				text += fmt.Sprintf("store %d-%d after %d ", o.I, o.J, o.Parent)
			}
		}
		heard = append(heard, text)
	}
	return heard
}

func TestTracker(t *testing.T) {
	one := contents(100)
	tests := map[string]struct {
		steps  []trackerStep
		want   []string // emitted events by step
		blocks int      // tracked at the end
	}{
		"the first store publishes": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1))},
			want:   []string{"store 0-1 "},
			blocks: 1,
		},
		"a second store by the same source does not": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a store by another source under another hash does not": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a store by another source under the same hash does not": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 1))},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a remove by the only source publishes": {
			steps: []trackerStep{stores(engine, storeOf(one, 1)), removes(engine, 1)},
			want:  []string{"store 0-1 ", "remove [1] "},
		},
		"a remove by one of two sources does not, by the last it does": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(offload, 2), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"the last source removes by its own name, routers by the first": {
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
		"sources may call different blocks by one hash": {
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
		"a child by a second source whose parent the first named is the same block": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(100, 200), 1, 2)), stores(offload, continuing(1, storeOf(contents(200), 7))),
			},
			want:   []string{"store 0-2 ", ""},
			blocks: 2,
		},
		"a source's own name goes before another's": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(100), 1)), stores(offload, storeOf(contents(200), 1)),
				stores(offload, continuing(1, storeOf(contents(300), 2))), stores(engine, continuing(1, storeOf(contents(300), 3))),
			},
			want:   []string{"store 0-1 ", "store 0-1 ", "store 0-1 after 1 ", "store 0-1 after 1 "},
			blocks: 4,
		},
		"the parent goes by its first name": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(contents(100, 200), 11, 12)),
			},
			want:   []string{"store 0-1 ", "store 1-2 after 1 "},
			blocks: 2,
		},
		"only what is new of a store goes out, in pieces": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3, 4), 1, 2, 3, 4)), removes(engine, 2, 4),
				stores(offload, storeOf(contents(1, 2, 3, 4, 5), 11, 12, 13, 14, 15)),
			},
			want:   []string{"store 0-4 ", "remove [2 4] ", "store 1-2 after 1 store 3-5 after 3 "},
			blocks: 5,
		},
		"a clear of all empties blocks and names": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), clearAll, removes(engine, 1),
				stores(offload, continuing(1, storeOf(contents(200), 5))), stores(offload, storeOf(one, 2)),
			},
			want:   []string{"store 0-1 ", "", "", "", "store 0-1 after 1 ", "store 0-1 "},
			blocks: 2,
		},
		"a remove of an unknown block publishes nothing": {
			steps: []trackerStep{removes(engine, 1)},
			want:  []string{""},
		},
		"a remove by a source that does not hold the block publishes nothing": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), removes(offload, 1)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a remove by another source's name releases the block that the source itself holds": {
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
		"two stores and one remove by a source keep the block": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), removes(engine, 1)},
			want:   []string{"store 0-1 ", "", ""},
			blocks: 1,
		},
		"a block of two names by one source is kept until both are removed": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), removes(engine, 1), removes(engine, 2),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"a name that is removed twice does not take another's count": {
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
		"a block after an unknown parent goes by name": {
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
		"a parent of 0 that somebody knows is one": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 0)), stores(engine, continuing(0, storeOf(one, 1))), stores(offload, storeOf(contents(100, 100), 5, 6)),
			},
			want: []string{"store 0-1 ", "store 0-1 after 0 ", ""}, blocks: 2,
		},
		"hash-only stores go by name": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1, 2)), stores(offload, storeOf(nil, 2)), removes(engine, 1, 2), removes(offload, 2),
			},
			want: []string{"store 0-2 ", "", "remove [1] ", "remove [2] "},
		},
		"a hash-only store adds to what the name means": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(nil, 2)),
				removes(engine, 1), removes(offload, 2), removes(engine, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"a block known by name is known by content once it is stored so": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "remove [1] store 0-1 ", "", "", "", "remove [1] "},
		},
		"a block known by name becomes one with what it turns out to be": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(one, 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "store 0-1 ", "remove [1] ", "", "", "remove [2] "},
		},
		"a name stored as another block leaves the first": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), stores(engine, storeOf(contents(200), 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "store 0-1 ", "remove [1] ", "", "remove [1] "},
		},
		"a clear of one source keeps what the other holds": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2, 3), 1, 2, 3)), stores(offload, storeOf(contents(1), 11)),
				letsGo(engine), removes(offload, 11),
			},
			want: []string{"store 0-3 ", "", "remove [2 3] ", "remove [1] "},
		},
		"a clear of the source that came second keeps what the first holds": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1, 2, 3), 11, 12, 13)), letsGo(offload),
			},
			want:   []string{"store 0-2 ", "store 2-3 after 2 ", "remove [13] "},
			blocks: 2,
		},
		"a clear of a source releases every copy": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), stores(offload, storeOf(one, 3)),
				letsGo(engine), removes(offload, 3),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"a clear that empties the rank removes no blocks singly": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), removes(offload, 2), letsGo(engine),
			},
			want: []string{"store 0-1 ", "", "", ""},
		},
		"a clear of a source without anything changes nothing": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), letsGo(offload)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"a new life's names are its own": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1, 2), 11, 12)), letsGo(engine),
				stores(engine, storeOf(contents(1, 2), 21, 22)), removes(offload, 11, 12), removes(engine, 22, 21),
			},
			want: []string{"store 0-2 ", "", "", "", "", "remove [2 1] "},
		},
		"after a gap of one source the other's last remove publishes": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesSome(engine), removes(offload, 2), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] ", ""},
		},
		"after a gap of one source its own remove does not": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesSome(engine), removes(engine, 1), removes(offload, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "remove [1] "},
		},
		"after a gap a source's blocks count once": {
			steps: []trackerStep{stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 1)), losesSome(engine), removes(engine, 1)},
			want:  []string{"store 0-1 ", "", "", "remove [1] "},
		},
		"a gap lets a block stay that only its source holds": {
			steps:  []trackerStep{stores(engine, storeOf(one, 1)), losesSome(engine)},
			want:   []string{"store 0-1 ", ""},
			blocks: 1,
		},
		"what is stored after a gap holds a block again": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesSome(engine), stores(engine, storeOf(one, 1)),
				removes(offload, 2), removes(engine, 1), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "", "", "", "remove [1] "},
		},
		"a gap of every source leaves nothing that holds a block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 2)), losesSome(engine), losesSome(offload), removes(offload, 2),
			},
			want: []string{"store 0-1 ", "", "", "", "remove [1] "},
		},
		"a clear after another's gap takes what is in doubt along": {
			steps: []trackerStep{
				stores(engine, storeOf(contents(1, 2), 1, 2)), stores(offload, storeOf(contents(1), 11)), losesSome(engine), letsGo(offload),
			},
			want: []string{"store 0-2 ", "", "", "remove [1] "}, blocks: 1,
		},
		"a parent that its source has removed resolves as long as another holds it": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101),
				stores(offload, continuing(101, storeOf(contents(200), 102))), stores(engine, continuing(1, storeOf(contents(200), 2))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 ", ""}, blocks: 2,
		},
		"so does a parent by a name that another source gave and released": {
			steps: []trackerStep{
				stores(offload, storeOf(one, 101)), stores(engine, storeOf(one, 1)), removes(engine, 1),
				stores(offload, continuing(1, storeOf(contents(200), 102))), stores(engine, storeOf(contents(100, 200), 1, 2)),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 101 ", ""}, blocks: 2,
		},
		"a name is gone with its block": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101), removes(engine, 1),
				stores(offload, continuing(101, storeOf(contents(200), 102))), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "remove [1] ", "store 0-1 after 101 ", ""}, blocks: 1,
		},
		"a source that cleared its cache or restarted may use its names": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), letsGo(offload),
				stores(offload, continuing(101, storeOf(contents(200), 102))), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 ", "remove [1] "}, blocks: 1,
		},
		"so may another source": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), letsGo(engine),
				stores(offload, continuing(1, storeOf(contents(200), 102))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 after 1 "}, blocks: 2,
		},
		"a name of a new incarnation means what that stores by it": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), letsGo(offload),
				stores(offload, storeOf(contents(200), 101)), stores(offload, continuing(101, storeOf(contents(300), 102))),
				removes(offload, 101), removes(engine, 1),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 ", "store 0-1 after 101 ", "remove [101] ", "remove [1] "}, blocks: 1,
		},
		"a released name that is stored again counts once": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), stores(offload, storeOf(one, 101)),
				removes(offload, 101, 101), stores(offload, storeOf(one, 101)), removes(engine, 1), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "", "", "", "remove [1] "},
		},
		"a hash-only store by a released name holds its block again": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(offload, storeOf(one, 101)), removes(offload, 101),
				stores(offload, storeOf(nil, 101)), removes(engine, 1), removes(offload, 101),
			},
			want: []string{"store 0-1 ", "", "", "", "", "remove [1] "},
		},
		"the names of a block that becomes one with another resolve": {
			steps: []trackerStep{
				stores(engine, storeOf(nil, 1)), stores(offload, storeOf(nil, 1)), removes(offload, 1),
				stores(offload, storeOf(one, 102)), stores(engine, storeOf(one, 1)), stores(engine, storeOf(contents(300), 1)),
				stores(offload, continuing(1, storeOf(contents(200), 103))),
			},
			want: []string{"store 0-1 ", "", "", "store 0-1 ", "remove [1] ", "store 0-1 ", "store 0-1 after 102 "}, blocks: 3,
		},
		"the first name that is removed twice does not take another's count": {
			steps: []trackerStep{
				stores(engine, storeOf(one, 1)), stores(engine, storeOf(one, 2)), removes(engine, 1), removes(engine, 1),
			},
			want:   []string{"store 0-1 ", "", "", ""},
			blocks: 1,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			tr := New(2, 100, nil, nil, &Counts{})
			if diff := cmp.Diff(test.want, tr.play(test.steps...)); diff != "" {
				t.Errorf("heard (-want +got):\n%s", diff)
			}
			if got := tr.Len(); got != test.blocks {
				t.Errorf("blocks: got %d, want %d", got, test.blocks)
			}
			checkTracker(t, tr)
		})
	}
}
