package journal

import (
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"
)

// Defaults of Config.
const (
	DefaultMaxBytes = 64 << 20
	DefaultMaxAge   = time.Hour
)

// Config bounds a journal in memory. The zero value means the defaults.
type Config struct {
	// MaxBytes bounds the memory that retained entries and their index take, at
	// the grain of a segment (a 64th of it, at most 1 MiB). Only an entry that is
	// larger by itself goes beyond. Memory that a reader still holds after
	// eviction is not counted.
	MaxBytes int
	// MaxAge is how long an entry is retained at most, at the grain of a segment.
	MaxAge time.Duration
}

const (
	minSegmentBytes = 4 << 10
	maxSegmentBytes = 1 << 20
	// indexBytes is what an entry takes in its segment's index.
	indexBytes = 4
)

// Memory is a journal in this process's memory. It is lost with the process, and
// so each has an epoch of its own.
type Memory struct {
	epoch       string
	maxBytes    int
	maxAge      time.Duration
	segmentSize int

	mu       sync.RWMutex  // guards all below
	segments []*segment    // oldest first, seqs contiguous over them
	bytes    int           // what the segments take
	newest   uint64        // seq of the last entry appended
	changed  chan struct{} // closed by the next append; nil while nobody waits
}

// NewMemory makes an empty journal with a new epoch.
func NewMemory(cfg Config) *Memory {
	if cfg.MaxBytes <= 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	if cfg.MaxAge <= 0 {
		cfg.MaxAge = DefaultMaxAge
	}
	var name [8]byte
	_, _ = rand.Read(name[:]) // never fails, by its own documentation
	return &Memory{
		epoch:       hex.EncodeToString(name[:]),
		maxBytes:    cfg.MaxBytes,
		maxAge:      cfg.MaxAge,
		segmentSize: min(max(cfg.MaxBytes/64, minSegmentBytes), maxSegmentBytes),
	}
}

// Append gives the record the next seq and makes it readable. It never fails,
// and never waits for a reader.
func (m *Memory) Append(r Record) {
	now := time.Now()
	m.mu.Lock()
	need := frameSize(len(r.Body))
	s := m.last()
	if s == nil || s.room() < need {
		s = m.grow(need, now)
	}
	m.newest++
	s.append(m.newest, r.Body)
	s.newestAt = now
	m.bytes += indexBytes
	changed := m.changed
	m.changed = nil
	m.mu.Unlock()
	if changed != nil {
		close(changed)
	}
}

// grow evicts what a new segment displaces, and adds it.
func (m *Memory) grow(need int, now time.Time) *segment {
	size := max(m.segmentSize, need)
	m.expire(now)
	for len(m.segments) > 0 && m.bytes+size > m.maxBytes {
		m.evict()
	}
	s := newSegment(m.newest+1, size)
	m.segments = append(m.segments, s)
	m.bytes += size
	return s
}

// expire evicts the segments whose newest entry is too old.
func (m *Memory) expire(now time.Time) {
	for len(m.segments) > 0 && now.Sub(m.segments[0].newestAt) > m.maxAge {
		m.evict()
	}
}

// evict lets go of the oldest segment. Its memory is freed when the last reader
// lets go of it, and is never used again.
func (m *Memory) evict() {
	s := m.segments[0]
	m.bytes -= cap(s.buf) + indexBytes*len(s.offsets)
	m.segments[0] = nil
	m.segments = m.segments[1:]
}

func (m *Memory) last() *segment {
	if len(m.segments) == 0 {
		return nil
	}
	return m.segments[len(m.segments)-1]
}

// Bounds tells what is retained now.
func (m *Memory) Bounds() Bounds {
	m.evictExpired()
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.bounds()
}

// evictExpired lets entries go by age also while nothing is appended.
func (m *Memory) evictExpired() {
	now := time.Now()
	m.mu.RLock()
	expired := len(m.segments) > 0 && now.Sub(m.segments[0].newestAt) > m.maxAge
	m.mu.RUnlock()
	if expired {
		m.mu.Lock()
		m.expire(now)
		m.mu.Unlock()
	}
}

func (m *Memory) bounds() Bounds {
	b := Bounds{Epoch: m.epoch, Oldest: m.newest + 1, Newest: m.newest}
	if len(m.segments) > 0 {
		b.Oldest = m.segments[0].first
	}
	return b
}

// Bytes tells what the retained entries and their index take.
func (m *Memory) Bytes() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.bytes
}

// Read returns the entries after a seq: as many whole ones as maxBytes holds,
// but at least one where there is one. It appends the slices to those given. The
// chunk is empty when after is the newest. The error is a *PositionError.
func (m *Memory) Read(after uint64, maxBytes int, slices [][]byte) (Chunk, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	c := Chunk{Slices: slices}
	if err := m.bounds().check(after); err != nil {
		return c, err
	}
	if after == m.newest {
		return c, nil
	}
	c.First = after + 1
	for _, s := range m.segments[m.find(c.First):] {
		data, last := s.read(max(c.First, s.first), maxBytes-c.Bytes, c.Bytes == 0)
		if len(data) == 0 {
			break
		}
		c.Slices = append(c.Slices, data)
		c.Bytes += len(data)
		c.Last = last
		if last != s.last() {
			break
		}
	}
	return c, nil
}

// find returns the index of the segment that holds a retained seq.
func (m *Memory) find(seq uint64) int {
	lo, hi := 0, len(m.segments)
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		if m.segments[mid].first <= seq {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo
}

// Changed returns a channel that the next append closes. To miss nothing, call
// it before the Read that finds nothing.
func (m *Memory) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed == nil {
		m.changed = make(chan struct{})
	}
	return m.changed
}
