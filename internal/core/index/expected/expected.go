// Package expected has the blocks that dp ranks are expected to store soon, because requests were routed to them.
//
// In: notes that a rank will store a prompt, what ranks have stored and that they are gone, and the time. Out: for a prompt, how many of its first blocks each
// rank is expected to have. Guarantee: a note ends at its time, when the rank stores the prompt's last block, or when the rank is dropped, whatever comes
// first; and there are never more blocks of notes than a limit, in all, of a rank and of a caller.
//
// A block is identified by its path: the hash of a start, such as a model, and of the tokens hashes of all blocks up to it.
package expected

import (
	"container/heap"
	"sort"
	"time"

	"github.com/kvcast/kvcast/internal/core/hashtable"
)

// Set has the notes of ranks, which are identified by a K. New makes an empty one. It is not safe for concurrent use.
type Set[K comparable] struct {
	limits Limits
	ranks  map[K]*notes[K]
	// byFirst has the ranks with notes, by the path of the first block.
	byFirst map[uint64]map[K]*notes[K]
	due     queue[K]
	blocks  int            // of all notes
	cost    int            // of all notes
	callers map[string]int // cost of the notes of each
	paths   []uint64       // reused by Match
}

// Limits bounds a Set, in blocks of notes, with NoteCost more for each note: some 50 bytes each.
type Limits struct{ All, Rank, Caller int }

// NoteCost is what a note costs beside its blocks: some 450 bytes.
const NoteCost = 9

// notes are those of a rank.
type notes[K comparable] struct {
	byPath map[uint64]*note[K]   // of the last block
	byLast map[uint64][]*note[K] // by the tokens hash of the last block
	// with has the number of notes that have a block, by its path. Whoever has a block has all before it.
	with map[uint64]int
	cost int
}

// note is a prompt that a rank is expected to store.
type note[K comparable] struct {
	rank   K
	caller string
	paths  []uint64 // of its blocks
	last   uint64   // tokens hash of the last block
	until  time.Time
	at     int // in the queue
	alike  int // in byLast
}

// New returns an empty Set.
func New[K comparable](l Limits) *Set[K] {
	return &Set[K]{limits: l, ranks: make(map[K]*notes[K]), byFirst: make(map[uint64]map[K]*notes[K]), callers: make(map[string]int)}
}

// Blocks returns the number of blocks of all notes.
func (s *Set[K]) Blocks() int { return s.blocks }

// Note notes, for a caller, that a rank will store a prompt, which has at least one block, until a time. It returns false, and notes nothing, if there
// would be more than the limits allow. A prompt that the rank is expected to store already is expected until the later of both times.
func (s *Set[K]) Note(caller string, rank K, start uint64, hashes []uint64, until time.Time) bool {
	paths := appendPaths(make([]uint64, 0, len(hashes)), start, hashes)
	end := paths[len(paths)-1]
	r := s.ranks[rank]
	if r != nil {
		if n := r.byPath[end]; n != nil {
			if until.After(n.until) {
				n.until = until
				heap.Fix(&s.due, n.at)
			}
			return true
		}
	}
	if r == nil {
		r = &notes[K]{byPath: make(map[uint64]*note[K]), byLast: make(map[uint64][]*note[K]), with: make(map[uint64]int)}
	}
	cost := len(paths) + NoteCost
	if s.cost+cost > s.limits.All || r.cost+cost > s.limits.Rank || s.callers[caller]+cost > s.limits.Caller {
		return false
	}
	s.ranks[rank] = r
	last := hashes[len(hashes)-1]
	n := &note[K]{rank: rank, caller: caller, paths: paths, last: last, until: until, alike: len(r.byLast[last])}
	r.byPath[end] = n
	r.byLast[last] = append(r.byLast[last], n)
	s.blocks += len(paths)
	s.cost += cost
	r.cost += cost
	s.callers[caller] += cost
	heap.Push(&s.due, n)
	for _, path := range paths {
		r.with[path]++
	}
	if s.byFirst[paths[0]] == nil {
		s.byFirst[paths[0]] = make(map[K]*notes[K])
	}
	s.byFirst[paths[0]][rank] = r
	return true
}

func appendPaths(paths []uint64, start uint64, hashes []uint64) []uint64 {
	path := hashtable.Hash(start)
	for _, h := range hashes {
		path = hashtable.Hash(path + h)
		paths = append(paths, path)
	}
	return paths
}

// Stored ends the notes of a rank whose last block has one of the tokens hashes, which the rank has stored.
func (s *Set[K]) Stored(rank K, hashes []uint64) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for _, h := range hashes {
		for len(r.byLast[h]) > 0 {
			s.end(r.byLast[h][0])
		}
	}
}

// Drop ends all notes of a rank, which has lost its blocks or is gone.
func (s *Set[K]) Drop(rank K) {
	if r := s.ranks[rank]; r != nil {
		for _, n := range r.byPath {
			s.end(n)
		}
	}
}

// Advance ends the notes whose time has come.
func (s *Set[K]) Advance(now time.Time) {
	for len(s.due) > 0 && !s.due[0].until.After(now) {
		s.end(s.due[0])
	}
}

func (s *Set[K]) end(n *note[K]) {
	r := s.ranks[n.rank]
	delete(r.byPath, n.paths[len(n.paths)-1])
	same := r.byLast[n.last]
	last := len(same) - 1
	same[n.alike], same[last].alike = same[last], n.alike
	same[last] = nil
	same = same[:last]
	if r.byLast[n.last] = same; last == 0 {
		delete(r.byLast, n.last)
	}
	cost := len(n.paths) + NoteCost
	s.blocks -= len(n.paths)
	s.cost -= cost
	r.cost -= cost
	if s.callers[n.caller] -= cost; s.callers[n.caller] == 0 {
		delete(s.callers, n.caller)
	}
	if len(r.byPath) == 0 {
		delete(s.ranks, n.rank)
	}
	heap.Remove(&s.due, n.at)
	for _, path := range n.paths {
		if r.with[path]--; r.with[path] == 0 {
			delete(r.with, path)
		}
	}
	if first := n.paths[0]; r.with[first] == 0 {
		if delete(s.byFirst[first], n.rank); len(s.byFirst[first]) == 0 {
			delete(s.byFirst, first)
		}
	}
}

// Match calls found once for each rank that has notes which begin with the prompt's first block: blocks is the length of the longest prefix of the prompt in
// them. found must not call methods of the Set. The cost for each rank is a binary search over the prompt's blocks.
func (s *Set[K]) Match(start uint64, hashes []uint64, found func(rank K, blocks int)) {
	if len(hashes) == 0 {
		return
	}
	s.paths = appendPaths(s.paths[:0], start, hashes[:1])
	ranks := s.byFirst[s.paths[0]]
	if len(ranks) == 0 {
		return
	}
	s.paths = appendPaths(s.paths[:0], start, hashes)
	for rank, r := range ranks {
		found(rank, sort.Search(len(s.paths), func(i int) bool { return r.with[s.paths[i]] == 0 }))
	}
}

// queue implements heap.Interface: the next note to end is the first.
type queue[K comparable] []*note[K]

func (q queue[K]) Len() int           { return len(q) }
func (q queue[K]) Less(i, j int) bool { return q[i].until.Before(q[j].until) }

func (q queue[K]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

func (q *queue[K]) Push(x any) {
	n := x.(*note[K])
	n.at = len(*q)
	*q = append(*q, n)
}

func (q *queue[K]) Pop() any {
	last := len(*q) - 1
	n := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return n
}
