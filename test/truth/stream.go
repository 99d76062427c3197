package truth

import (
	"cmp"
	"slices"
	"time"
)

// Rank is a dp rank of a worker.
type Rank struct {
	Worker string
	DPRank uint32
}

// stream is the entries of an epoch, as far as routers have received them.
type stream struct {
	newest    uint64 // seq
	positions map[Rank][]position
	arrivals  []arrival
}

// position is an entry of a dp rank, and the state that its batch began.
type position struct {
	seq   uint64
	state state
}

// arrival is when the first router had received the entries up to a seq.
type arrival struct {
	at  time.Time
	seq uint64
}

// The numbers of positions of a rank, and of arrivals, that are remembered.
const (
	maxPositions = 1 << 14
	maxArrivals  = 1 << 14
)

func newStream() *stream { return &stream{positions: make(map[Rank][]position)} }

// receive adds the position of an entry, unless another router has received it. isBatch reports whether it has the batch that began
// a state.
func (s *stream) receive(at time.Time, seq uint64, r Rank, began state, isBatch bool) {
	if seq <= s.newest {
		return
	}
	s.newest = seq
	s.arrivals = append(trim(s.arrivals, maxArrivals), arrival{at, seq})
	if isBatch {
		s.positions[r] = append(trim(s.positions[r], maxPositions), position{seq, began})
	}
}

// trim removes the older half of a list that has reached a limit.
func trim[T any](list []T, limit int) []T {
	if len(list) < limit {
		return list
	}
	return slices.Clone(list[limit/2:])
}

// window returns the states of a rank that an answer at a seq may show, if newest was the newest state when it came.
func (s *stream) window(r Rank, seq uint64, newest state) window {
	w, all := window{last: newest}, s.positions[r]
	next, _ := slices.BinarySearchFunc(all, seq+1, func(p position, seq uint64) int { return cmp.Compare(p.seq, seq) })
	if next > 0 {
		w.first = all[next-1].state
	}
	if next < len(all) {
		// A worker that was added again begins with earlier states.
		w.last = max(w.first, all[next].state-1)
	}
	return w
}

// before returns the seq up to which a router had received the entries at a time.
func (s *stream) before(at time.Time) uint64 {
	next, _ := slices.BinarySearchFunc(s.arrivals, at, func(a arrival, at time.Time) int {
		if a.at.After(at) {
			return 1
		}
		return -1
	})
	if next == 0 {
		return 0
	}
	return s.arrivals[next-1].seq
}
