package radix

import (
	"math/bits"
	"slices"
)

// Bounds of a Sharing.
const (
	// MaxRanksCounted is the length of Sharing.ByRanks.
	MaxRanksCounted = 32
	// maxNodeTokens bounds the tokens hashes of a Node.
	maxNodeTokens = 256
)

// Sharing says how many ranks hold the same blocks. Only blocks that have a place count, once for each rank whatever the tier.
type Sharing struct {
	// Blocks is the number of distinct blocks, and Copies the sum of the ranks that hold each.
	Blocks, Copies uint64
	// ByRanks has at n-1 the number of blocks that n ranks hold; the last element also counts those that more hold.
	ByRanks [MaxRanksCounted]uint64
	// Nodes are the nodes with the most copies beside the first of each block, in no order before Resolve.
	Nodes []Node

	counts   []int32   // reused: of holders, by offset
	resolver *resolver // nil before Resolve
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

	at nodeRef
}

// nodeRef refers to a node between calls. The run may be dropped meanwhile, and its number used again: its generation is then another one.
type nodeRef struct {
	stretch
	generation uint32
}

func (n nodeRef) id() uint64 { return uint64(n.run)<<16 | uint64(n.from) }

// isIn reports whether a node is in the run of another.
func (n nodeRef) isIn(o nodeRef) bool { return n.run == o.run && n.generation == o.generation }

// exists reports whether the run of a node, and the node's first block, still exist.
func (x *Index) exists(n nodeRef) bool {
	r := x.tree.run(n.run)
	return r.generation == n.generation && n.from < uint32(len(r.tokens))
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
		work -= countWork(r)
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
			node := Node{Model: model.name, at: x.nodeAt(position{id, begin})}
			node.ID, begin = node.at.id(), node.at.to
			if s.countNode(&node); node.saved() > 0 {
				s.keep(node, most)
			}
		}
	}
	return 0
}

// modelOf returns the model of a run; nil if no rank holds a block of it.
func (x *Index) modelOf(r *run) *model {
	if r.plain != nil {
		for _, s := range r.plain.sets {
			if s.ranks &= x.plainLive[s.word]; s.ranks != 0 {
				return x.ranks[s.first()].rank.model
			}
		}
	}
	for e := range r.holdings.all() {
		if rank := &x.ranks[e.rank]; e.tiers&rank.live != 0 {
			return rank.rank.model
		}
	}
	return nil
}

// countWork is the work of counting the ranks that hold the blocks of a run.
func countWork(r *run) int {
	work := 8 + len(r.tokens) + r.holdings.len()
	if r.plain != nil {
		work += len(r.plain.sets)
	}
	return work
}

// count sets s.counts to the numbers of ranks that hold each block of a run.
func (s *Sharing) count(x *Index, r *run) {
	s.counts = append(s.counts[:0], make([]int32, len(r.tokens)+1)...)
	if r.plain != nil {
		for _, set := range r.plain.sets {
			ranks := int32(bits.OnesCount64(set.ranks & x.plainLive[set.word]))
			s.counts[0] += ranks
			s.counts[min(int(r.plain.to), len(r.tokens))] -= ranks
		}
	}
	for e := range r.holdings.all() {
		if e.tiers&x.ranks[e.rank].live != 0 {
			s.counts[e.from]++
			s.counts[min(int(e.to), len(r.tokens))]--
		}
	}
	for i := 1; i < len(s.counts); i++ {
		s.counts[i] += s.counts[i-1]
	}
	s.counts = s.counts[:len(r.tokens)]
}

// nodeAt returns the node that has a block.
func (x *Index) nodeAt(at position) nodeRef {
	r := x.tree.run(at.run)
	begin, end := uint32(0), uint32(len(r.tokens))
	i, _ := r.findBranch(at.offset)
	if i > 0 {
		begin = r.branches[i-1].offset + 1
	}
	if i < len(r.branches) {
		end = min(end, r.branches[i].offset+1)
	}
	return nodeRef{stretch{at.run, begin, end}, r.generation}
}

// countNode counts the ranks that hold the blocks of a node, after count for its run. The run may have become shorter.
func (s *Sharing) countNode(n *Node) {
	end := min(n.at.to, uint32(len(s.counts)))
	for _, ranks := range s.counts[min(n.at.from, end):end] {
		if ranks > 0 {
			n.Blocks++
		}
		n.Copies += int(ranks)
		n.MaxRanks = max(n.MaxRanks, int(ranks))
	}
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
