package consolidate

import (
	"maps"
	"slices"
)

// checkTracker checks a tracker's invariants.
func checkTracker(t interface{ Errorf(string, ...any) }, tr *Tracker) {
	blocks, names, unidentified := 0, 0, 0
	named, live := make([]int, tr.sources), make([]int, tr.sources)
	children := make([]map[uint64]uint32, tr.sources)
	last := uint32(0)
	for id := tr.oldest; id != 0; id = tr.blocks.at(id).newer {
		b := tr.blocks.at(id)
		blocks++
		if b.older != last {
			t.Errorf("block %d: older is %d, want %d", id, b.older, last)
		}
		last = id
		if b.content.scope == 0 {
			unidentified++
		} else if got := tr.find(b.content); got != id {
			t.Errorf("block %d: its content finds block %d", id, got)
		}
		if b.live == 0 {
			t.Errorf("block %d: no live name", id)
		}
		idle := make([]int, tr.sources)
		for _, ring := range []uint32{b.live, b.idle} {
			for nameID, n := range tr.ring(ring) {
				names++
				named[n.source()]++
				if n.block != id || tr.name(n.source(), n.hash) != nameID || tr.names.at(n.next).prev != nameID {
					t.Errorf("block %d: name %d is not linked: %+v", id, nameID, *n)
				}
				switch {
				case n.live() != (ring == b.live):
					t.Errorf("block %d: name %d is in the wrong ring: %+v", id, nameID, *n)
				case n.live():
					live[n.source()]++
					if n.flags&flagParent != 0 && nameID <= tr.children[n.source()].upTo {
						if children[n.source()] == nil {
							children[n.source()] = make(map[uint64]uint32)
						}
						children[n.source()][n.parent]++
					}
				case n.hash != b.routerHash:
					idle[n.source()]++
				}
			}
		}
		if slices.Max(idle) > maxIdleNames {
			t.Errorf("block %d: %v idle names by source, want at most %d", id, idle, maxIdleNames)
		}
	}
	liveNames := 0
	for _, n := range live {
		liveNames += n
	}
	if !slices.Equal(live, tr.live) || liveNames != tr.liveNames {
		t.Errorf("live names: got %v, %d in all, want %v, %d", tr.live, tr.liveNames, live, liveNames)
	}
	for source, c := range tr.children {
		if !maps.Equal(children[source], c.byParent) {
			t.Errorf("children of source %d: got %v, want %v", source, c.byParent, children[source])
		}
	}
	if last != tr.newest || blocks != tr.Len() || unidentified != tr.unidentified {
		t.Errorf("blocks: got %d, %d unidentified, newest %d, want %d, %d, %d", tr.Len(), tr.unidentified, tr.newest, blocks, unidentified, last)
	}
	if names != tr.names.len() || !slices.Equal(named, tr.named) {
		t.Errorf("names: got %d, %v by source, want %d, %v", tr.names.len(), tr.named, names, named)
	}
	if tr.byName.Len() != names || tr.byContent.Len() != blocks-unidentified {
		t.Errorf("indexes: got %d names, %d contents, want %d, %d", tr.byName.Len(), tr.byContent.Len(), names, blocks-unidentified)
	}
	if n := tr.scopes.Len(); blocks == unidentified && n != 0 {
		t.Errorf("got %d scopes, want none", n)
	}
	if len(tr.copies) > names {
		t.Errorf("got %d counts of copies of %d names", len(tr.copies), names)
	}
}
