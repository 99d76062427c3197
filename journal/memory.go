package journal

import (
	"crypto/rand"
	"encoding/hex"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
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
	// eviction is counted by Retained.
	MaxBytes int
	// MaxAge is how long an entry is retained at most, at the grain of a segment.
	MaxAge time.Duration
}

const (
	minSegmentBytes = 4 << 10
	maxSegmentBytes = 1 << 20
	// indexBytes is what an entry takes in its segment's index.
	indexBytes = int(unsafe.Sizeof(indexed{}))
	// maxScan is how many entries a filter may look at in one read, since nothing
	// can be appended meanwhile.
	maxScan = 4096
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
	retained *atomic.Int64 // evicted and not freed
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
		retained:    new(atomic.Int64),
		segmentSize: min(max(cfg.MaxBytes/64, minSegmentBytes), maxSegmentBytes),
	}
}

// Append gives the record the next seq and makes it readable. It never fails,
// and never waits for a reader.
func (m *Memory) Append(r Record) Receipt {
	now := time.Now()
	m.mu.Lock()
	need := frameSize(len(r.Body))
	s := m.last()
	if s == nil || s.room() < need {
		s = m.grow(need, now)
	}
	m.newest++
	m.bytes += s.append(m.newest, r)
	s.newestAt = now
	receipt := Receipt{m.newest}
	for len(m.segments) > 1 && m.bytes > m.maxBytes {
		m.evict() // the index of many small entries has grown
	}
	changed := m.changed
	m.changed = nil
	m.mu.Unlock()
	if changed != nil {
		close(changed)
	}
	return receipt
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
	m.bytes -= cap(s.buf) + indexBytes*cap(s.index)
	size, retained := int64(cap(s.buf)), m.retained
	retained.Add(size)
	runtime.AddCleanup(unsafe.SliceData(s.buf), func(size int64) { retained.Add(-size) }, size)
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

// Retained tells what entries take that were let go of and are still in memory,
// because a reader holds what it was given, or because the garbage collector has not
// come by yet.
func (m *Memory) Retained() int { return int(m.retained.Load()) }

// Read returns the entries that the query asks for: as many as fit, but at least
// one where there is one. It appends the slices to those given. The error is a
// *PositionError. With a filter it may return before anything was found, with
// Last moved on.
func (m *Memory) Read(q Query, slices [][]byte) (Chunk, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	c := Chunk{Slices: slices, Last: q.After}
	if err := m.bounds().check(q.After); err != nil {
		return c, err
	}
	until := m.newest
	if q.Until != 0 {
		until = min(until, q.Until)
	}
	if q.Filter != nil {
		until = min(until, q.After+maxScan)
	}
	if q.After >= until {
		return c, nil
	}
	for _, s := range m.segments[m.find(q.After+1):] {
		if c.Last == until || !s.read(&c, &q, until) {
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
