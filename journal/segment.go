package journal

import (
	"encoding/binary"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Fields of the contract that the journal writes itself.
const (
	// entriesField is the field that holds entries in every response.
	entriesField protowire.Number = 1
	// seqField is Entry.seq, a fixed64.
	seqField protowire.Number = 1
	seqSize                   = 1 + 8
)

// segment is a run of entries in one piece of memory that never moves: what has
// been appended is never written again, so readers need no lock for it.
type segment struct {
	first    uint64   // seq of the first entry
	buf      []byte   // framed entries; its capacity is fixed
	offsets  []uint32 // where each entry begins
	newestAt time.Time
}

func newSegment(first uint64, size int) *segment {
	return &segment{first: first, buf: make([]byte, 0, size)}
}

// last is the seq of the newest entry.
func (s *segment) last() uint64 { return s.first + uint64(len(s.offsets)) - 1 }

func (s *segment) room() int { return cap(s.buf) - len(s.buf) }

// frameSize is what an entry of that body takes in a segment.
func frameSize(body int) int {
	return protowire.SizeTag(entriesField) + protowire.SizeBytes(seqSize+body)
}

func (s *segment) append(seq uint64, body []byte) {
	s.offsets = append(s.offsets, uint32(len(s.buf)))
	s.buf = protowire.AppendTag(s.buf, entriesField, protowire.BytesType)
	s.buf = protowire.AppendVarint(s.buf, uint64(seqSize+len(body)))
	s.buf = protowire.AppendTag(s.buf, seqField, protowire.Fixed64Type)
	s.buf = binary.LittleEndian.AppendUint64(s.buf, seq)
	s.buf = append(s.buf, body...)
}

// read returns the entries from seq on that fit into limit bytes, at least the
// first one if atLeastOne, and the seq of the last.
func (s *segment) read(seq uint64, limit int, atLeastOne bool) (data []byte, last uint64) {
	i := int(seq - s.first)
	start := int(s.offsets[i])
	// The most entries that end within the limit: ends grow, so search.
	lo, hi := i, len(s.offsets)
	for lo < hi {
		mid := (lo + hi) / 2
		if s.end(mid)-start <= limit {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == i {
		if !atLeastOne {
			return nil, 0
		}
		lo++
	}
	end := s.end(lo - 1)
	return s.buf[start:end:end], s.first + uint64(lo-1)
}

// end returns where entry i ends.
func (s *segment) end(i int) int {
	if i+1 < len(s.offsets) {
		return int(s.offsets[i+1])
	}
	return len(s.buf)
}
