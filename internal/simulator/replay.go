package simulator

import (
	"iter"
	"slices"

	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// ReplayFaults are the faults of a replay socket's answers. The zero value has no faults.
type ReplayFaults struct {
	// NoAnswer leaves requests unanswered.
	NoAnswer bool
	// NoEnd omits the end marker.
	NoEnd bool
	// Skip reports whether to omit a reply; nil omits none. It is called once per reply, in order,
	// by the goroutine that owns the sockets.
	Skip func(seq uint64) bool
	// Requests is the number of requests with faults; 0 means all. Later requests are answered
	// correctly.
	Requests int
}

// serveReplay answers a replay request.
func (s *sockets) serveReplay(request outbound.Event) {
	// The frames are delimiter and seq. Like vLLM, check only their number.
	if len(request.Frames) != 2 {
		return
	}
	faults := s.replayFaults()
	if !faults.NoAnswer {
		s.answer(request.Peer, outbound.ParseSeq(request.Frames[1]), faults)
		s.counters.add(counts{replays: 1})
	}
	s.counters.add(counts{requests: 1})
}

// replayFaults returns the faults of the next answer.
func (s *sockets) replayFaults() ReplayFaults {
	f := s.faults
	if f.Requests > 0 {
		if s.faults.Requests--; s.faults.Requests == 0 {
			s.faults = ReplayFaults{}
		}
	}
	return f
}

// answer replays the buffered batches from a seq on to one reader, and sends the end marker. The
// socket drops replies when the reader's queue is full, as vLLM's does.
func (s *sockets) answer(reader int, from uint64, faults ReplayFaults) {
	for b := range s.replayBuffer.since(from) {
		if faults.Skip == nil || !faults.Skip(b.seq) {
			s.reply(reader, s.cfg.Topic, b.seq, b.payload)
		}
	}
	if !faults.NoEnd {
		s.reply(reader, "", outbound.EndOfReplay, nil)
	}
}

func (s *sockets) reply(reader int, topic string, seq uint64, payload []byte) {
	if s.cfg.ReplayForm == ReplayPlain {
		s.router.Send(reader, nil, outbound.SeqFrame(seq), payload)
	} else {
		s.router.Send(reader, nil, []byte(topic), outbound.SeqFrame(seq), payload)
	}
}

// replayBuffer is a ring of the last batches, which the replay socket serves. A full buffer evicts
// the oldest batch.
type replayBuffer struct {
	limit int
	ring  []batch
	first int // index of the oldest batch
}

// batch is a batch as it was sent.
type batch struct {
	seq     uint64
	payload []byte
}

// add buffers a batch, and takes ownership of its payload.
func (m *replayBuffer) add(seq uint64, payload []byte) {
	switch {
	case m.limit == 0:
	case len(m.ring) < m.limit:
		m.ring = append(m.ring, batch{seq, payload})
	default:
		m.ring[m.first] = batch{seq, payload}
		m.first = (m.first + 1) % m.limit
	}
}

// since yields the batches with a seq of at least from, in the order in which they were added.
func (m *replayBuffer) since(from uint64) iter.Seq[batch] {
	return func(yield func(batch) bool) {
		for i := range m.ring {
			b := m.ring[(m.first+i)%len(m.ring)]
			if b.seq >= from && !yield(b) {
				return
			}
		}
	}
}

// remove removes the batches with the given seqs.
func (m *replayBuffer) remove(seqs []uint64) {
	var left []batch
	for b := range m.since(0) {
		if !slices.Contains(seqs, b.seq) {
			left = append(left, b)
		}
	}
	m.ring, m.first = left, 0
}

func (m *replayBuffer) clear() { m.ring, m.first = nil, 0 }
