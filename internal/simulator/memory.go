package simulator

import (
	"iter"
	"slices"
)

// memory is what the replay socket can give again: the last batches, in a ring
// that forgets the oldest one when it is full.
type memory struct {
	limit int
	ring  []remembered
	first int // index of the oldest
}

// remembered is a batch as it was sent.
type remembered struct {
	seq     uint64
	payload []byte
}

// add remembers a batch, whose payload is the memory's from now on.
func (m *memory) add(seq uint64, payload []byte) {
	switch {
	case m.limit == 0:
	case len(m.ring) < m.limit:
		m.ring = append(m.ring, remembered{seq, payload})
	default:
		m.ring[m.first] = remembered{seq, payload}
		m.first = (m.first + 1) % m.limit
	}
}

// since yields the batches with a seq of at least from, in the order in which they
// were added.
func (m *memory) since(from uint64) iter.Seq[remembered] {
	return func(yield func(remembered) bool) {
		for i := range m.ring {
			b := m.ring[(m.first+i)%len(m.ring)]
			if b.seq >= from && !yield(b) {
				return
			}
		}
	}
}

// punch forgets the batches with these seqs alone.
func (m *memory) punch(seqs []uint64) {
	var left []remembered
	for b := range m.since(0) {
		if !slices.Contains(seqs, b.seq) {
			left = append(left, b)
		}
	}
	m.ring, m.first = left, 0
}

func (m *memory) clear() { m.ring, m.first = nil, 0 }
