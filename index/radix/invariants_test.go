package radix

import (
	"cmp"
	"fmt"
	"slices"
)

// names counts the names of blocks by holder.
type names map[position]map[holder]uint32

func (n names) add(at position, number uint32, tag tag) {
	for tier := range NumTiers {
		if tag&tierBit(tier) != 0 {
			if n[at] == nil {
				n[at] = make(map[holder]uint32)
			}
			n[at][newHolder(number, tier)]++
		}
	}
}

// checkInvariants returns an error that describes what is wrong with an index.
func checkInvariants(x *Index) error {
	t := &x.tree
	want := make(names)
	for number, r := range x.ranks {
		if r == nil {
			continue
		}
		if r.number != uint32(number) {
			return fmt.Errorf("rank %d has number %d", number, r.number)
		}
		sets := map[uint32]bool{0: true} // the rank uses it itself
		for s := range r.table.Segments() {
			for i := range s.Slots {
				if !s.Slots[i].Used() {
					continue
				}
				tag := s.Tags[i]
				sets[tag.attr()] = true
				if tag.hasPlace() {
					want.add(t.resolve(s.Slots[i].Value.at), r.number, tag)
				}
			}
		}
		if n := r.attrs.Len(); n != len(sets) {
			return fmt.Errorf("rank %d has %d combinations of attributes, but its blocks %d", number, n, len(sets))
		}
	}
	reachable, heads := make(map[uint32]bool), 0
	for name, m := range x.models {
		if root := t.runs[m.root]; len(root.tokens)+len(root.holdings) > 0 || root.after.run != 0 || name != m.name {
			return fmt.Errorf("root of %q: %+v", name, root)
		}
		if err := checkRun(x, m.root, want, reachable); err != nil {
			return err
		}
	}
	for at, holders := range want {
		if len(holders) > 0 {
			return fmt.Errorf("the tree does not have the names %v of %v", holders, at)
		}
	}
	free := make(map[uint32]bool)
	for _, id := range t.free {
		free[id] = true
	}
	for id, r := range t.runs {
		if id == 0 {
			continue
		}
		if reachable[uint32(id)] == free[uint32(id)] || reachable[uint32(id)] != (r != nil) {
			return fmt.Errorf("run %d: reachable is %t, free is %t", id, reachable[uint32(id)], free[uint32(id)])
		}
		if r != nil && r.after.run != 0 {
			if found, _, ok := t.byHead.Get(t.headKey(r.after, r.tokens[0])); ok && found == uint32(id) {
				heads++
			} else if t.headMask == ^uint64(0) {
				return fmt.Errorf("run %d is not found", id)
			}
		}
	}
	if len(t.free)+len(reachable) != len(t.runs)-1 || len(free) != len(t.free) {
		return fmt.Errorf("%d of %d runs are free, %d reachable", len(t.free), len(t.runs)-1, len(reachable))
	}
	if heads != t.byHead.Len() {
		return fmt.Errorf("%d runs are found, but there are %d heads", heads, t.byHead.Len())
	}
	return nil
}

// checkRun checks a run and those that follow. It takes the names that they have from want.
func checkRun(x *Index, id uint32, want names, reachable map[uint32]bool) error {
	t, r := &x.tree, x.tree.runs[id]
	n := uint32(len(r.tokens))
	if reachable[id] {
		return fmt.Errorf("run %d is reachable twice", id)
	}
	reachable[id] = true
	keep := uint32(0)
	for i, e := range r.holdings {
		if e.blocks == 0 || e.blocks > n || i > 0 && r.holdings[i-1].holder >= e.holder {
			return fmt.Errorf("run %d has %d blocks and holdings %+v", id, n, r.holdings)
		}
		keep = max(keep, e.blocks)
		retired := x.ranks[e.holder.rank()] == nil
		for offset := range e.blocks {
			at := position{id, offset}
			count := uint32(1)
			if k, ok := r.findTwin(offset, e.holder); ok {
				count += r.twins[k].names
			}
			if !retired && want[at][e.holder] != count {
				return fmt.Errorf("%v has %d names of %d, want %d", at, count, e.holder, want[at][e.holder])
			}
			delete(want[at], e.holder)
		}
	}
	if !slices.IsSortedFunc(r.twins, func(a, b twin) int {
		return cmp.Or(cmp.Compare(a.offset, b.offset), cmp.Compare(a.holder, b.holder))
	}) {
		return fmt.Errorf("run %d has twins %+v", id, r.twins)
	}
	for _, w := range r.twins {
		if w.names == 0 || r.held(w.holder) <= w.offset {
			return fmt.Errorf("run %d has holdings %+v and twins %+v", id, r.holdings, r.twins)
		}
	}
	if r.forward != 0 && t.runs[r.forward].after != (position{id, n - 1}) {
		return fmt.Errorf("run %d has forward %d, after %+v", id, r.forward, t.runs[r.forward].after)
	}
	children, prev := uint32(0), uint32(0)
	for c := r.firstChild; c != 0; c = t.runs[c].next {
		child := t.runs[c]
		if child.after.run != id || child.after.offset >= max(n, 1) || child.prev != prev || len(child.tokens) == 0 {
			return fmt.Errorf("run %d has the child %d: %+v", id, c, child)
		}
		keep = max(keep, child.after.offset+1)
		children, prev = children+1, c
		if err := checkRun(x, c, want, reachable); err != nil {
			return err
		}
	}
	if children != r.children {
		return fmt.Errorf("run %d has %d children, counted %d", id, children, r.children)
	}
	if r.after.run != 0 && keep != n && r.children <= t.limits.trimmedChildren {
		return fmt.Errorf("run %d has %d blocks, but needs %d", id, n, keep)
	}
	return nil
}
