package radix

import (
	"cmp"
	"slices"
)

// Bounds of a Sharing.
const (
	// MaxRanksCounted is the length of Sharing.ByRanks.
	MaxRanksCounted = 32
	// maxNodeTokens bounds the tokens hashes of a Node, and maxAncestors the runs before it that are followed.
	maxNodeTokens = 256
	maxAncestors  = 4096
)

// Sharing says how many ranks hold the same blocks. Only blocks that have a place count, once for each rank whatever the tier.
type Sharing struct {
	// Blocks is the number of distinct blocks, and Copies the sum of the ranks that hold each.
	Blocks, Copies uint64
	// ByRanks has at n-1 the number of blocks that n ranks hold; the last element also counts those that more hold.
	ByRanks [MaxRanksCounted]uint64
	// Nodes are the nodes with the most copies beside the first of each block, in no order before Resolve.
	Nodes []Node

	counts []int32 // reused: of holders, by offset
}

// Node is consecutive blocks of the tree, up to a block that several blocks follow, or none.
type Node struct {
	// ID names the node, as long as the tree does not change. Parent is the ID of the node before it; 0 if there is none, or it
	// is not among the nodes.
	ID, Parent uint64
	Model      string
	// First is the number of blocks from the start of the prompt to the node, and Blocks the number of its blocks.
	First, Blocks int
	// Copies is the sum of the ranks that hold each block, and MaxRanks the most that hold one.
	Copies, MaxRanks int
	// Tokens are the tokens hashes of the first blocks, at most 256. The caller must not modify them.
	Tokens []uint64

	at stretch
}

func (n *Node) saved() int { return n.Copies - n.Blocks }

// AddRuns adds runs to a Sharing of a model; of all models if the name is empty. It begins with a run and ends when it has
// done some work, or with the last run. It returns the run with which the next call begins; 0 if there is none. The first call
// begins with 0. The index may change between the calls: a run is counted as it is at its call. Sharing.Nodes keeps most nodes.
func (x *Index) AddRuns(s *Sharing, modelName string, from uint32, work, most int) (next uint32) {
	for id := max(from, 1); id < x.tree.runs; id++ {
		if work <= 0 {
			return id
		}
		r := x.tree.run(id)
		work -= 8 + len(r.tokens) + len(r.holdings)
		model := x.modelOf(r)
		if model == nil || modelName != "" && model.name != modelName {
			continue
		}
		s.count(x, r)
		for _, n := range s.counts {
			if n > 0 {
				s.Blocks++
				s.Copies += uint64(n)
				s.ByRanks[min(int(n), MaxRanksCounted)-1]++
			}
		}
		for begin := uint32(0); begin < uint32(len(s.counts)); {
			node := s.node(id, r, begin)
			begin = node.at.to
			if node.saved() > 0 {
				node.Model = model.name
				s.keep(node, most)
			}
		}
	}
	return 0
}

// modelOf returns the model of a run; nil if no rank holds a block of it.
func (x *Index) modelOf(r *run) *model {
	for i := range r.holdings {
		if rank := &x.ranks[r.holdings[i].rank]; r.holdings[i].tiers&rank.live != 0 {
			return rank.rank.model
		}
	}
	return nil
}

// count sets s.counts to the numbers of ranks that hold each block of a run.
func (s *Sharing) count(x *Index, r *run) {
	s.counts = append(s.counts[:0], make([]int32, len(r.tokens)+1)...)
	for i := range r.holdings {
		if e := &r.holdings[i]; e.tiers&x.ranks[e.rank].live != 0 {
			s.counts[e.from]++
			s.counts[min(int(e.to), len(r.tokens))]--
		}
	}
	for i := 1; i < len(s.counts); i++ {
		s.counts[i] += s.counts[i-1]
	}
	s.counts = s.counts[:len(r.tokens)]
}

// node returns the node that begins with a block of the run whose counts are in s.counts, without its model.
func (s *Sharing) node(id uint32, r *run, begin uint32) Node {
	end := uint32(len(r.tokens))
	if i, _ := r.findBranch(begin); i < len(r.branches) {
		end = min(end, r.branches[i].offset+1)
	}
	n := Node{ID: uint64(id)<<16 | uint64(begin), at: stretch{id, begin, end}}
	for _, ranks := range s.counts[begin:end] {
		if ranks > 0 {
			n.Blocks++
		}
		n.Copies += int(ranks)
		n.MaxRanks = max(n.MaxRanks, int(ranks))
	}
	return n
}

// keep adds a node, in place of the one that saves least if there are too many. Nodes is a heap then.
func (s *Sharing) keep(n Node, most int) {
	if len(s.Nodes) < most {
		s.Nodes = append(s.Nodes, n)
		if len(s.Nodes) == most {
			slices.SortFunc(s.Nodes, func(a, b Node) int { return a.saved() - b.saved() })
		}
		return
	}
	if most == 0 || n.saved() <= s.Nodes[0].saved() {
		return
	}
	s.Nodes[0] = n
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(s.Nodes); child++ {
			if s.Nodes[child].saved() < s.Nodes[least].saved() {
				least = child
			}
		}
		if least == i {
			return
		}
		s.Nodes[i], s.Nodes[least] = s.Nodes[least], s.Nodes[i]
		i = least
	}
}

// Resolve adds to the nodes those before them, up to some number in total, and sorts them: each after its parent. It drops
// nodes that do not exist any more. No more runs may be added.
func (x *Index) Resolve(s *Sharing, most int) {
	found := s.Nodes
	slices.SortFunc(found, func(a, b Node) int { return cmp.Or(b.saved()-a.saved(), cmp.Compare(a.ID, b.ID)) })
	s.Nodes = nil
	known := make(map[uint64]bool)
	for _, n := range found {
		var path []Node // the node, and those before it that are not known yet
		for at, ok := (position{n.at.run, n.at.from}), true; ok; at, ok = x.before(path[len(path)-1].at) {
			node, exists := x.nodeAt(s, at, n.Model)
			if !exists || len(path) == most {
				path = nil
				break
			}
			if len(path) > 0 {
				path[len(path)-1].Parent = node.ID
			}
			if known[node.ID] {
				break
			}
			path = append(path, node)
		}
		if len(s.Nodes)+len(path) > most {
			continue
		}
		for _, node := range path {
			known[node.ID] = true
			s.Nodes = append(s.Nodes, node)
		}
	}
	slices.SortFunc(s.Nodes, func(a, b Node) int {
		return cmp.Or(cmp.Compare(a.First, b.First), b.Copies-a.Copies, cmp.Compare(a.ID, b.ID))
	})
}

// nodeAt returns the node that has a block; ok is false if the block does not exist, or has too many runs before it.
func (x *Index) nodeAt(s *Sharing, at position, modelName string) (n Node, ok bool) {
	r := x.tree.run(at.run)
	if at.offset >= uint32(len(r.tokens)) {
		return Node{}, false
	}
	begin := uint32(0)
	if i, _ := r.findBranch(at.offset); i > 0 {
		begin = r.branches[i-1].offset + 1
	}
	s.count(x, r)
	n = s.node(at.run, r, begin)
	n.Model = modelName
	n.Tokens = slices.Clone(r.tokens[n.at.from:min(n.at.to, n.at.from+maxNodeTokens)])
	n.First = int(begin)
	for runs := 0; ; runs++ {
		before := r.after
		if r = x.tree.run(before.run); len(r.tokens) == 0 {
			return n, !r.detached // it is the root, unless blocks before it were forgotten
		}
		if runs == maxAncestors {
			return Node{}, false
		}
		n.First += int(before.offset) + 1
	}
}

// before returns the block before a stretch; ok is false if it begins a prompt.
func (x *Index) before(s stretch) (_ position, ok bool) {
	if s.from > 0 {
		return position{s.run, s.from - 1}, true
	}
	after := x.tree.run(s.run).after
	return after, len(x.tree.run(after.run).tokens) > 0
}

// Chain returns the tokens hashes of the blocks from the start of the prompt to a block of a rank, at most the last so many. ok
// is false if the rank does not hold the block, or a block before it is not known. It takes a time in proportion to the chain.
func (x *Index) Chain(r *Rank, hash uint64, most int) (tokens []uint64, ok bool) {
	at, ok := r.locate(hash)
	if !ok {
		return nil, false
	}
	before := at
	for ; ok && len(tokens) < most; before, ok = x.before(stretch{at.run, 0, 0}) {
		at = before
		part := x.tree.run(at.run).tokens[:at.offset+1]
		for _, t := range slices.Backward(part[max(0, len(part)-(most-len(tokens))):]) {
			tokens = append(tokens, t)
		}
	}
	if !ok && x.tree.run(before.run).detached {
		return nil, false
	}
	slices.Reverse(tokens)
	return tokens, true
}
