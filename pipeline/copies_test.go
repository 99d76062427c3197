package pipeline_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

// detected returns the batch, made by a source with CopyRuleDetect.
func detected(c call) call { return byRule(feed.CopyRuleDetected, c) }

func byRule(rule feed.CopyRule, c call) call {
	if c.Batch != nil {
		c.Batch.CopyRule = rule
	}
	return c
}

func ofGroup(idx int64, e wire.Event) wire.Event {
	e.HasGroupIdx, e.GroupIdx = true, idx
	return e
}

func ofOrigin(o wire.Origin, e wire.Event) wire.Event {
	e.Origin = o
	return e
}

// leaving is a remove with a count of remaining copies.
func leaving(copies uint32, hash uint64) wire.Event {
	e := remove(hash)
	e.Rare = &wire.Rare{RemainingCopies: []uint32{copies}}
	return e
}

// TestCopies stores and removes blocks, by a worker's only source or by one of two, and
// checks which blocks remain.
func TestCopies(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	prompt := batch(store(1, 2), after(2, store(3)))
	announces := detected(batch(store(1, 2), after(2, store(4)), remove(4)))
	// opened opens the gate of an engine, and stores 1, 2 and 3.
	opened := []call{detected(prompt), announces, announces, announces}
	// loads stores 1 and 2 again, which host memory has, and another child of 2.
	loads := detected(batch(store(1, 2), after(2, store(4)), remove(4)))
	offloads := detected(batch(store(1, 2), host(store(1, 2)), after(2, store(3))))
	// branches stores another child of 2 without an announcement.
	branches := detected(batch(after(2, store(5)), remove(5)))
	last := func(e ...wire.Event) call { return byRule(feed.CopyRuleAnnouncedLast, batch(e...)) }
	tests := map[string]struct {
		before []call
		calls  []call
		want   []uint64
	}{
		"counted: a store from the root is a copy": {
			calls: []call{batch(store(1)), batch(store(1)), batch(remove(1))}, want: []uint64{1},
		},
		"counted: announcements open nothing": {
			calls: []call{prompt, prompt, prompt, prompt, prompt, batch(remove(3, 2, 1)), batch(remove(3, 2, 1))}, want: []uint64{1, 2, 3},
		},
		"closed: a store from the root may be a copy": {
			calls: []call{detected(batch(store(1))), detected(batch(store(1))), detected(batch(remove(1)))}, want: []uint64{1},
		},
		"closed: as many removes as stores take a block away": {
			calls: []call{detected(batch(store(1))), detected(batch(store(1))), detected(batch(remove(1))), detected(batch(remove(1)))},
		},
		"open: an announced block leaves with its remove": {
			before: opened, calls: []call{detected(batch(remove(3))), detected(batch(remove(2)))}, want: []uint64{1},
		},
		"open: a block stays as long as a child does": {
			before: opened, calls: []call{detected(batch(remove(2)))}, want: []uint64{1, 2, 3},
		},
		"open: a block whose child has left goes": {
			before: opened, calls: []call{detected(batch(remove(2), remove(3), remove(2)))}, want: []uint64{1},
		},
		"open: a block stays for a child that came before it": {
			before: opened, calls: []call{
				detected(batch(after(7, store(8)), store(7), store(7), store(5, 7), remove(7))),
			}, want: []uint64{1, 2, 3, 5, 7, 8},
		},
		"open: a copy leaves first": {
			before: opened, calls: []call{detected(batch(after(2, store(3)), remove(3)))}, want: []uint64{1, 2, 3},
		},
		"open: another tier counts": {
			before: opened, calls: []call{detected(batch(host(store(9)), host(store(9)), host(remove(9))))}, want: []uint64{1, 2, 3, 9},
		},
		"two announcements do not open": {
			before: opened[:3], calls: []call{detected(batch(remove(3), remove(2)))}, want: []uint64{1, 2},
		},
		"a store of one block announces nothing": {
			before: opened[:3], calls: []call{detected(batch(store(1), after(1, store(4)), remove(4))), detected(batch(remove(3), remove(2)))}, want: []uint64{1, 2},
		},
		"a store with a parent announces nothing": {
			before: opened[:3], calls: []call{
				detected(batch(after(1, store(2, 3)), after(3, store(4)), remove(4))), detected(batch(remove(3, 2), remove(3), remove(2))),
			}, want: []uint64{1, 2},
		},
		"a store with an unknown block announces nothing": {
			before: opened[:3], calls: []call{detected(batch(store(1, 2, 5), after(5, store(4)), remove(4, 5))), detected(batch(remove(3), remove(2)))}, want: []uint64{1, 2},
		},
		"a store that is not continued announces nothing": {
			before: opened[:3], calls: []call{detected(batch(store(1, 2), after(1, store(4)), remove(4))), detected(batch(remove(3), remove(2)))}, want: []uint64{1, 2},
		},
		"a store that another batch continues announces nothing": {
			before: opened[:3], calls: []call{detected(batch(store(1, 2))), detected(batch(after(2, store(4)), remove(4))), detected(batch(remove(3), remove(2)))},
			want: []uint64{1, 2},
		},
		"the next store of the group continues an announcement": {
			before: opened[:3], calls: []call{
				detected(batch(ofGroup(1, store(1, 2)), store(9), ofGroup(1, after(2, store(4))), remove(4, 9))), detected(batch(remove(3), remove(2))),
			}, want: []uint64{1},
		},
		"a store of another group does not": {
			before: opened[:3], calls: []call{
				detected(batch(ofGroup(1, store(1, 2)), after(2, store(4)), remove(4))), detected(batch(remove(3), remove(2))),
			}, want: []uint64{1, 2},
		},
		"a clear closes the gate": {
			before: opened, calls: []call{detected(batch(cleared())), detected(prompt), detected(batch(store(1, 2))), detected(batch(remove(3), remove(2)))},
			want: []uint64{1, 2},
		},
		"a restart closes the gate": {
			before: opened, calls: []call{restarted(0), detected(prompt), detected(batch(store(1, 2))), detected(batch(remove(3), remove(2)))},
			want: []uint64{1, 2},
		},
		"a gap does not, and nothing is unsure after it": {
			before: opened, calls: []call{gap(0), detected(batch(remove(1))), detected(batch(store(2))), detected(batch(remove(3), remove(2)))},
		},
		"after a gap children are known": {
			before: opened, calls: []call{gap(0), detected(batch(store(1, 2))), detected(batch(remove(2)))}, want: []uint64{1, 2, 3},
		},
		"offload: loads of branches are copies": {
			calls: []call{offloads, branches, loads, loads, loads, detected(batch(remove(2, 2, 2)))}, want: []uint64{1, 2, 3},
		},
		"offload: loads without branches are announcements": {
			calls: []call{offloads, loads, loads, loads, detected(batch(remove(3, 2)))}, want: []uint64{1},
		},
		"offload: an announced block leaves before its child": {
			calls: []call{offloads, loads, loads, loads, detected(batch(remove(2)))}, want: []uint64{1, 3},
		},
		"offload: a block that is not offloaded is announced": {
			calls: []call{offloads, branches, detected(batch(host(remove(1)))), loads, loads, loads, detected(batch(remove(3, 2)))}, want: []uint64{1},
		},
		"offload: the child of an announcement is no branch": {
			calls: []call{offloads, loads, loads, detected(batch(store(1, 2), after(2, store(6)))), detected(batch(remove(6, 3, 2)))}, want: []uint64{1},
		},
		"offload: a block of host memory is no branch": {
			calls: []call{
				offloads, detected(batch(after(2, host(store(7))), after(2, store(7)), remove(7), host(remove(7)))), loads, loads, loads, detected(batch(remove(3, 2))),
			}, want: []uint64{1},
		},
		"offload: after a branch a block stays as long as a child does": {
			calls: []call{offloads, loads, loads, loads, branches, detected(batch(remove(2)))}, want: []uint64{1, 2, 3},
		},
		"announced last: one remove takes all copies away": {
			calls: []call{last(store(1)), last(store(1)), last(after(9, store(1))), last(remove(1))},
		},
		"a new block is a copy": {
			before: opened, calls: []call{detected(batch(ofOrigin(wire.OriginNew, store(3)))), detected(batch(remove(3)))}, want: []uint64{1, 2, 3},
		},
		"a reused block is not": {
			calls: []call{batch(store(1)), batch(ofOrigin(wire.OriginReused, store(1))), batch(remove(1))},
		},
		"a reused block that is unknown is stored": {
			calls: []call{batch(ofOrigin(wire.OriginReused, store(1)))}, want: []uint64{1},
		},
		"an explicit announcement does not open the gate": {
			before: opened[:3], calls: []call{
				detected(batch(ofOrigin(wire.OriginReused, store(1, 2)), after(2, store(4)), remove(4))), detected(batch(remove(3), remove(2))),
			}, want: []uint64{1, 2},
		},
		"a remove that leaves copies": {
			calls: []call{batch(store(1)), batch(leaving(2, 1)), batch(remove(1))}, want: []uint64{1},
		},
		"a remove that leaves none": {
			calls: []call{batch(store(1), store(1), store(1)), batch(leaving(0, 1))},
		},
		"a remove that leaves copies leaves nothing unsure": {
			calls: []call{detected(batch(store(1), store(1), leaving(1, 1), remove(1)))},
		},
	}
	for name, test := range tests {
		offload := strings.HasPrefix(name, "offload:")
		for _, mode := range []feed.Consolidate{"", feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
			if offload && mode == feed.ConsolidateDedup {
				continue // trackers do not tell tiers apart
			}
			t.Run(name+"/"+string(mode), func(t *testing.T) {
				s, err := newSubject(pipeline.Config{})
				if err != nil {
					t.Fatal(err)
				}
				if mode == "" {
					added().on(s)
				} else {
					sharing(mode, feed.EngineVLLM, feed.EngineKVBM).on(s)
				}
				for _, c := range slices.Concat(test.before, test.calls) {
					c.on(s)
				}
				r := newRouter()
				r.apply(s.journal.all())
				blocks := maps.Clone(r.blocksIn(kvblock.TierDevice))
				if blocks == nil {
					blocks = make(map[uint64]bool)
				}
				if !offload {
					maps.Copy(blocks, r.blocksIn(kvblock.TierHostPinned))
				}
				if diff := cmp.Diff(test.want, slices.Sorted(maps.Keys(blocks))); diff != "" {
					t.Errorf("blocks (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestEachSourceHasItsOwnGate lets one of two sources announce blocks: the other's stores
// stay ambiguous.
func TestEachSourceHasItsOwnGate(t *testing.T) {
	for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
		t.Run(string(mode), func(t *testing.T) {
			withSharing(t, pipeline.Config{}, mode, func(t *testing.T, s *subject) {
				announces := func() call { return detected(batch(store(1, 2), after(2, store(4)), remove(4))) }
				s.play(t, announces(), announces(), announces(), announces())
				second := by2(detected(batch(store(8, 9), store(8, 9), remove(9))))
				got := describe(s.play(t, second))
				for _, events := range got {
					if slices.Contains(events, "remove [9]") {
						t.Errorf("entries of the second source: got %v, want no remove", got)
					}
				}
			})
		})
	}
}
