package radix

import (
	"cmp"
	"maps"
	"slices"
)

// stepWork is the work of following a path by one node: some cache misses, and lookups in maps.
const stepWork = 64

// resolver links the nodes of a Sharing that were found to the start of their prompts, in two phases:
//
//  1. Link. The path of a found node is the node and those before it that are not linked yet. If it leads to a linked node or to
//     the start of the prompt, and there is room for all its nodes, they are linked. Nodes that save more are linked first.
//  2. Count. The ranks that hold the blocks of each linked node are counted.
type resolver struct {
	found  []Node         // not linked yet, the one that saves most first
	linked map[uint64]int // index in Sharing.Nodes, by ID
	// rejected has the IDs of nodes with paths for which there is no room, or that lead to forgotten blocks. A node stays rejected:
	// a linked node shortens the paths through it by one at most, and takes one place of the room.
	rejected map[uint64]bool
	path     []nodeRef // reused by link
	counted  int       // of Sharing.Nodes
}

// Resolve adds to the nodes those before them, up to some number in total, and sorts them: each after its parent. It drops
// nodes that do not exist any more, and those with more nodes before them than there is room for. It ends when it has done some
// work, and reports whether it must be called again. The index may change between the calls: a node has the blocks that it had
// at one call, and the copies that it had at another. No more runs may be added.
func (x *Index) Resolve(s *Sharing, work, most int) (more bool) {
	if s.resolver == nil {
		s.resolver = &resolver{found: s.Nodes, linked: make(map[uint64]int), rejected: make(map[uint64]bool)}
		s.Nodes = nil
		slices.SortFunc(s.resolver.found, bySaved)
	}
	r := s.resolver
	for ; len(r.found) > 0 && len(s.Nodes) < most; r.found = r.found[1:] {
		if work <= 0 {
			return true
		}
		work -= r.link(x, s, &r.found[0], most-len(s.Nodes))
	}
	for r.counted < len(s.Nodes) {
		if work <= 0 {
			return true
		}
		work -= r.count(x, s)
	}
	slices.SortFunc(s.Nodes, func(a, b Node) int {
		return cmp.Or(cmp.Compare(a.First, b.First), b.Copies-a.Copies, cmp.Compare(a.ID, b.ID))
	})
	s.resolver = nil
	return false
}

func bySaved(a, b Node) int { return cmp.Or(b.saved()-a.saved(), cmp.Compare(a.ID, b.ID)) }

// link links the path of a found node, if there is room. It returns its work, which the room bounds.
func (r *resolver) link(x *Index, s *Sharing, found *Node, room int) (work int) {
	if !x.exists(found.at) {
		return stepWork
	}
	r.path = r.path[:0]
	parent := Node{} // none
	at, ok := position{found.at.run, found.at.from}, true
	// A path for which there is no room is followed twice as far, so that half of its nodes are known to be rejected.
	for ok && len(r.path) <= 2*room {
		node := x.nodeAt(at)
		if r.rejected[node.id()] {
			return r.reject(len(r.path))
		}
		if i, linked := r.linked[node.id()]; linked {
			parent = s.Nodes[i]
			if parent.at != node {
				return stepWork * (1 + len(r.path)) // the index has changed since
			}
			break
		}
		r.path = append(r.path, node)
		at, ok = x.before(node.stretch)
	}
	switch {
	case x.tree.run(at.run).detached:
		return r.reject(len(r.path))
	case len(r.path) > room:
		return r.reject(len(r.path) - room)
	}
	r.add(x, s, parent, found.Model)
	return stepWork * (1 + 2*len(r.path))
}

// reject notes that the first nodes of the path are rejected, and returns the work of link.
func (r *resolver) reject(nodes int) (work int) {
	for _, node := range r.path[:nodes] {
		r.rejected[node.id()] = true
	}
	return stepWork * (1 + len(r.path))
}

// add links the nodes of the path, the last of which is after a linked node; its ID is 0 if there is none.
func (r *resolver) add(x *Index, s *Sharing, parent Node, model string) {
	first := parent.First + int(parent.at.to-parent.at.from)
	for _, at := range slices.Backward(r.path) {
		tokens := x.tree.run(at.run).tokens
		node := Node{
			ID: at.id(), Parent: parent.ID, Model: model, First: first, at: at,
			Tokens: slices.Clone(tokens[at.from:min(at.to, at.from+maxNodeTokens)]),
		}
		r.linked[node.ID] = len(s.Nodes)
		s.Nodes = append(s.Nodes, node)
		first += int(at.to - at.from)
		parent = node
	}
}

// count counts the copies of the next nodes that are in the same run, which have none if the run does not exist any more. It
// returns its work.
func (r *resolver) count(x *Index, s *Sharing) (work int) {
	of := s.Nodes[r.counted].at
	isThere := x.exists(of)
	if isThere {
		s.count(x, x.tree.run(of.run))
	}
	for ; r.counted < len(s.Nodes) && s.Nodes[r.counted].at.isIn(of); r.counted++ {
		if isThere {
			s.countNode(&s.Nodes[r.counted])
		}
	}
	return countWork(x.tree.run(of.run))
}

// Heaviest returns at most so many nodes of a resolved Sharing, in its order. About half of them are those that save most; the others
// are the nodes before them. A node is left out if there is no room for those before it.
func (s *Sharing) Heaviest(most int) []Node {
	shared := slices.DeleteFunc(slices.Clone(s.Nodes), func(n Node) bool { return n.saved() <= 0 })
	slices.SortFunc(shared, bySaved)
	parents := make(map[uint64]uint64, len(s.Nodes))
	for i := range s.Nodes {
		parents[s.Nodes[i].ID] = s.Nodes[i].Parent
	}
	kept, chosen := make(map[uint64]bool), 0
	for _, n := range shared {
		if chosen == (most+1)/2 {
			break
		}
		path := make(map[uint64]bool)
		for id := n.ID; id != 0 && !kept[id]; id = parents[id] {
			path[id] = true
		}
		if len(kept)+len(path) <= most {
			maps.Copy(kept, path)
			chosen++
		}
	}
	return slices.DeleteFunc(slices.Clone(s.Nodes), func(n Node) bool { return !kept[n.ID] })
}
