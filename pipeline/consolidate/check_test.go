package consolidate

import (
	"maps"
	"slices"
)

// checkTracker checks a tracker's invariants.
func checkTracker(t interface{ Errorf(string, ...any) }, tr *Tracker) {
	blocks, names, alone := 0, 0, 0
	named, held := make([]int, tr.sources), make([]int, tr.sources)
	children := make([]map[uint64]uint32, tr.sources)
	last := uint32(0)
	for ref := tr.oldest; ref != 0; ref = tr.blocks.at(ref).newer {
		b := tr.blocks.at(ref)
		blocks++
		if b.older != last {
			t.Errorf("block %d comes after %d, says it comes after %d", ref, last, b.older)
		}
		last = ref
		if b.space == 0 {
			alone++
		} else if got := tr.find(content{b.space, b.sequence}); got != ref {
			t.Errorf("block %d is found as %d", ref, got)
		}
		if b.names == 0 {
			t.Errorf("block %d has no holder", ref)
		}
		idle := make([]int, tr.sources)
		for _, ring := range []uint32{b.names, b.idle} {
			for name := ring; name != 0; {
				n := tr.names.at(name)
				names++
				named[n.source()]++
				if n.block != ref || tr.name(n.source(), n.hash) != name || tr.names.at(n.next).prev != name {
					t.Errorf("name %d of block %d is out of order: %+v", name, ref, *n)
				}
				if isIdle := n.flags&nameIdle != 0; isIdle != (ring == b.idle) {
					t.Errorf("name %d of block %d is in the wrong ring: %+v", name, ref, *n)
				} else if !isIdle {
					held[n.source()]++
					if n.flags&nameParent != 0 && name < tr.children[n.source()].upTo {
						if children[n.source()] == nil {
							children[n.source()] = make(map[uint64]uint32)
						}
						children[n.source()][n.parent]++
					}
				} else if n.hash != b.first {
					idle[n.source()]++
				}
				if name = n.next; name == ring {
					break
				}
			}
		}
		if slices.Max(idle) > maxIdleNames {
			t.Errorf("block %d has %v idle names, want at most %d of a source", ref, idle, maxIdleNames)
		}
	}
	holdings := 0
	for _, n := range held {
		holdings += n
	}
	if !slices.Equal(held, tr.held) || holdings != tr.holdings {
		t.Errorf("names that count: %v and %d, want %v and %d", tr.held, tr.holdings, held, holdings)
	}
	for source, c := range tr.children {
		if !maps.Equal(children[source], c.of) {
			t.Errorf("children of source %d: got %v, want %v", source, c.of, children[source])
		}
	}
	if last != tr.newest || blocks != tr.Len() || names != tr.names.len() || alone != tr.unresolved || !slices.Equal(named, tr.named) {
		t.Errorf("%d blocks up to %d, %d of them known by name alone, and names %v, want %d up to %d, %d and %v (%d)",
			blocks, last, alone, named, tr.Len(), tr.newest, tr.unresolved, tr.named, tr.names.len())
	}
	if tr.byName.Len() != names || tr.byContent.Len() != blocks-alone {
		t.Errorf("found by name %d and by content %d, want %d and %d", tr.byName.Len(), tr.byContent.Len(), names, blocks-alone)
	}
	if uses := tr.spaces.Len(); blocks == alone && uses != 0 {
		t.Errorf("%d adapters and salts of no block", uses)
	}
	if len(tr.copies) > names {
		t.Errorf("%d names have more than one copy, of %d", len(tr.copies), names)
	}
}
