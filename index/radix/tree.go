package radix

import (
	"slices"

	"github.com/kvcast/kvcast/internal/hashtable"
)

// minTokens is the capacity of a new run.
const minTokens = 4

// tree is a compressed radix tree: a forest of runs, one root for each model. Runs have numbers from 1, so that the
// tables that refer to them have no pointers for the garbage collector.
type tree struct {
	runs []*run   // by number; nil: unused
	free []uint32 // unused numbers
	// byHead finds the run that follows a block and begins with some tokens hash. If two runs have the same key,
	// which is as likely as a collision of 64-bit hashes, it has one of them, and the other is never found.
	byHead hashtable.Table[uint32, struct{}]
	// headMask is the bits of the keys in use; all, except in tests of collisions.
	headMask uint64
	limits   limits
}

func newTree() tree {
	return tree{runs: []*run{nil}, byHead: hashtable.New[uint32, struct{}](), headMask: ^uint64(0), limits: defaults}
}

// headKey returns the key in byHead. Hash depends on a random seed, so that nobody can choose tokens whose keys are
// equal; the table hashes the key again.
func (t *tree) headKey(after position, tokens uint64) uint64 {
	return (hashtable.Hash(tokens) ^ (uint64(after.run)<<32 | uint64(after.offset))) & t.headMask
}

// add adds a run and returns its number.
func (t *tree) add(r *run) uint32 {
	if n := len(t.free); n > 0 {
		id := t.free[n-1]
		t.free = t.free[:n-1]
		t.runs[id] = r
		return id
	}
	t.runs = append(t.runs, r)
	return uint32(len(t.runs) - 1)
}

func (t *tree) addRoot() uint32 { return t.add(new(run)) }

func (t *tree) drop(id uint32) {
	t.runs[id] = nil
	t.free = append(t.free, id)
}

// resolve returns where a block is that may have been split off the end of its run.
func (t *tree) resolve(p position) position {
	for {
		r := t.runs[p.run]
		if p.offset < uint32(len(r.tokens)) || r.forward == 0 {
			return p
		}
		p = position{r.forward, p.offset - uint32(len(r.tokens))}
	}
}

// follow returns the block with a tokens hash that follows the block p.
func (t *tree) follow(p position, tokens uint64) (_ position, ok bool) {
	r := t.runs[p.run]
	if next := p.offset + 1; next < uint32(len(r.tokens)) && r.tokens[next] == tokens {
		return position{p.run, next}, true
	}
	if r.children == 0 {
		return position{}, false
	}
	id, _, ok := t.byHead.Get(t.headKey(p, tokens))
	if !ok || t.runs[id].after != p || t.runs[id].tokens[0] != tokens {
		return position{}, false
	}
	return position{id, 0}, true
}

// place returns the block with a tokens hash that follows the block p, and creates it if it does not exist. The caller
// must call hold for the block, with the holder h among others.
func (t *tree) place(p position, tokens uint64, h holder) position {
	p = t.resolve(p)
	if at, ok := t.follow(p, tokens); ok {
		return at
	}
	r := t.runs[p.run]
	n := uint32(len(r.tokens))
	if p.offset+1 == n && n < t.limits.run && r.forward == 0 && r.held(h) == n {
		r.tokens = append(r.tokens, tokens)
		return position{p.run, n}
	}
	child := newRun(append(make([]uint64, 0, minTokens), tokens), p)
	id := t.add(child)
	t.link(id, child)
	return position{id, 0}
}

// link makes a run a child of the run of r.after.
func (t *tree) link(id uint32, r *run) {
	parent := t.runs[r.after.run]
	if r.prev, r.next = 0, parent.firstChild; r.next != 0 {
		t.runs[r.next].prev = id
	}
	parent.firstChild = id
	parent.children++
	if s, i, existed := t.byHead.Put(t.headKey(r.after, r.tokens[0])); !existed {
		s.Slots[i].Value = id
	}
}

// unlink undoes link.
func (t *tree) unlink(id uint32, r *run) {
	parent := t.runs[r.after.run]
	if r.prev != 0 {
		t.runs[r.prev].next = r.next
	} else {
		parent.firstChild = r.next
	}
	if r.next != 0 {
		t.runs[r.next].prev = r.prev
	}
	parent.children--
	if s, i, ok := t.byHead.Find(t.headKey(r.after, r.tokens[0])); ok && s.Slots[i].Value == id {
		t.byHead.Delete(s, i)
	}
}

// split moves the blocks of a run from an offset on, which is not 0, to a new run, and visits all runs that follow the
// run. It returns the new run's number. The caller must call shrink for the new run, which may have fewer children than
// the run that was not trimmed.
func (t *tree) split(id, offset uint32) uint32 {
	r := t.runs[id]
	rest := newRun(slices.Clone(r.tokens[offset:]), position{id, offset - 1})
	rest.forward = r.forward
	restID := t.add(rest)
	r.truncate(offset)
	for i := range r.holdings {
		if e := &r.holdings[i]; e.blocks > offset {
			rest.holdings = append(rest.holdings, holding{e.holder, e.blocks - offset})
			e.blocks = offset
		}
	}
	if len(r.twins) > 0 {
		i, _ := r.findTwin(offset, 0)
		for _, w := range r.twins[i:] {
			w.offset -= offset
			rest.twins = append(rest.twins, w)
		}
		r.twins = r.twins[:i]
	}
	for c := r.firstChild; c != 0; {
		child := t.runs[c]
		next := child.next
		if child.after.offset >= offset {
			t.unlink(c, child)
			child.after = position{restID, child.after.offset - offset}
			t.link(c, child)
		}
		c = next
	}
	r.forward = restID
	t.link(restID, rest)
	return restID
}

// hold adds a name of a block for a holder.
func (t *tree) hold(p position, h holder) {
	p = t.resolve(p)
	r := t.runs[p.run]
	i, ok := r.find(h)
	switch {
	case ok && p.offset < r.holdings[i].blocks:
		r.addTwin(p.offset, h)
	case ok && p.offset == r.holdings[i].blocks:
		r.holdings[i].blocks++
	case p.offset == 0:
		r.holdings = slices.Insert(r.holdings, i, holding{h, 1})
	default:
		id := t.split(p.run, p.offset)
		rest := t.runs[id]
		i, _ = rest.find(h)
		rest.holdings = slices.Insert(rest.holdings, i, holding{h, 1})
		t.shrink(id)
	}
}

// release removes a name of a block for a holder, which must have one.
func (t *tree) release(p position, h holder) {
	p = t.resolve(p)
	r := t.runs[p.run]
	if r.removeTwin(p.offset, h) {
		return
	}
	i, _ := r.find(h)
	last := r.holdings[i].blocks
	if p.offset+1 < last {
		rest := t.split(p.run, p.offset+1)
		r.setHeld(i, p.offset)
		t.shrink(rest)
		return
	}
	r.setHeld(i, p.offset)
	if last == uint32(len(r.tokens)) {
		t.shrink(p.run)
	}
}

// releaseRun removes all names that a holder has in the run of a block. It does nothing if the holder has none there,
// even if p is the former position of a block whose run no longer exists.
func (t *tree) releaseRun(p position, h holder) {
	for {
		r := t.runs[p.run]
		switch {
		case r == nil:
			return
		case p.offset >= uint32(len(r.tokens)):
			if r.forward == 0 {
				return
			}
			p = position{r.forward, p.offset - uint32(len(r.tokens))}
			continue
		}
		if i, ok := r.find(h); ok {
			r.setHeld(i, 0)
			r.twins = slices.DeleteFunc(r.twins, func(w twin) bool { return w.holder == h })
			t.shrink(p.run)
		}
		return
	}
}

// shrink drops the blocks at the end of a run that nobody holds and no run follows. If none are left, it drops the
// run, and continues with the run before.
func (t *tree) shrink(id uint32) {
	for {
		r := t.runs[id]
		if r.after.run == 0 || r.children > t.limits.trimmedChildren {
			return
		}
		keep, n := uint32(0), uint32(len(r.tokens))
		for i := 0; i < len(r.holdings) && keep < n; i++ {
			keep = max(keep, r.holdings[i].blocks)
		}
		for c := r.firstChild; c != 0 && keep < n; c = t.runs[c].next {
			keep = max(keep, t.runs[c].after.offset+1)
		}
		if keep == n {
			return
		}
		if keep > 0 {
			r.truncate(keep)
			return
		}
		t.unlink(id, r)
		t.drop(id)
		// No block of the dropped run is held, so that no position needs the forward.
		if parent := t.runs[r.after.run]; parent.forward == id {
			parent.forward = 0
		}
		id = r.after.run
	}
}
