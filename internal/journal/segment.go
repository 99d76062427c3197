package journal

import (
	"encoding/binary"
	"sort"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// seqSize is the encoded size of the field Entry.seq, with its tag.
const seqSize = 1 + 8

// segment is a run of consecutive entries in one buffer, which is never reallocated. Appended bytes are never
// overwritten, so readers need no lock for them.
type segment struct {
	first    uint64 // seq of the first entry
	buf      []byte // the entries as returned to readers; the capacity is fixed
	index    []indexEntry
	newestAt time.Time
}

// indexEntry has the properties of an entry that reads and filters need.
type indexEntry struct {
	source *Source
	offset uint32 // of the entry's first byte in buf
	tiers  kvblock.Tiers
}

func (s *segment) room() int { return cap(s.buf) - len(s.buf) }

// frameSize returns the size of an entry in a segment.
func frameSize(body int) int {
	return protowire.SizeTag(kvcastv1.ResponseEntriesField) + protowire.SizeBytes(seqSize+body)
}

// append appends an entry and returns the growth of the index's memory in bytes.
func (s *segment) append(seq uint64, r Record) (grown int) {
	room := cap(s.index)
	s.index = append(s.index, indexEntry{source: r.Source, offset: uint32(len(s.buf)), tiers: r.Tiers})
	s.buf = protowire.AppendTag(s.buf, kvcastv1.ResponseEntriesField, protowire.BytesType)
	s.buf = protowire.AppendVarint(s.buf, uint64(seqSize+len(r.Body)))
	s.buf = protowire.AppendTag(s.buf, kvcastv1.EntrySeqField, protowire.Fixed64Type)
	s.buf = binary.LittleEndian.AppendUint64(s.buf, seq)
	s.buf = append(s.buf, r.Body...)
	return indexBytes * (cap(s.index) - room)
}

// read adds the entries after c.Last and up to until to the chunk. It reports whether it has examined all of them
// that the segment has, so that the next segment may be read.
func (s *segment) read(c *Chunk, q *Query, until uint64) bool {
	i := int(c.Last + 1 - s.first)
	end := min(len(s.index), int(until+1-s.first))
	if q.Filter == nil {
		n := s.fit(i, end, q.MaxBytes-c.Bytes, c.Entries == 0)
		s.addTo(c, i, n)
		c.Last = s.first + uint64(n) - 1
		return n == end
	}
	start := i // of a run of selected entries
	for ; i < end; i++ {
		e := &s.index[i]
		seq := s.first + uint64(i)
		switch q.Filter(seq, e.source, e.tiers) {
		case MatchNone:
			s.addTo(c, start, i)
			start = i + 1
		case MatchSome:
			c.Partial = true
		case MatchAll:
		}
		if start <= i && c.Bytes+s.end(i)-int(s.index[start].offset) > q.MaxBytes && c.Entries+i-start > 0 {
			break
		}
		c.Last = seq
	}
	s.addTo(c, start, i)
	return i == end
}

// addTo adds the entries from i up to n, excluding n, to the chunk.
func (s *segment) addTo(c *Chunk, i, n int) {
	if i >= n {
		return
	}
	start, end := int(s.index[i].offset), s.end(n-1)
	c.Slices = append(c.Slices, s.buf[start:end:end])
	c.Bytes += end - start
	c.Entries += n - i
}

// fit returns the index after the last entry, from i and before end, that fits into limit bytes. If atLeastOne is
// set, the range from i has at least one entry.
func (s *segment) fit(i, end, limit int, atLeastOne bool) int {
	start := int(s.index[i].offset)
	n := i + sort.Search(end-i, func(k int) bool { return s.end(i+k)-start > limit })
	if n == i && atLeastOne {
		n++
	}
	return n
}

// end returns the offset after the last byte of entry i.
func (s *segment) end(i int) int {
	if i+1 < len(s.index) {
		return int(s.index[i+1].offset)
	}
	return len(s.buf)
}
