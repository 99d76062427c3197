package journal

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sort"
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
	// MaxBytes bounds the memory of the retained entries and their index; default 64 MiB. Entries are evicted in
	// segments of a 64th of MaxBytes, at least 4 KiB and at most 1 MiB. Only a single entry larger than MaxBytes
	// exceeds the bound. EvictedBytes counts the memory of evicted entries that readers still reference.
	MaxBytes int
	// MaxAge is the maximum age of a retained entry; default 1 h. Entries are evicted in segments.
	MaxAge time.Duration
	// Epoch is the journal's epoch; default a new one.
	Epoch string
	// After is the seq before the first entry's. A journal that mirrors a durable one sets it and Epoch.
	After uint64
}

const (
	minSegmentBytes = 4 << 10
	maxSegmentBytes = 1 << 20
	// indexBytes is the memory of an entry in its segment's index.
	indexBytes = int(unsafe.Sizeof(indexEntry{}))
	// maxScan bounds the entries that one filtered read examines, since appends wait for the read.
	maxScan = 4096
)

// Memory is a journal in the memory of this process. Each Memory has a different epoch unless Config.Epoch is set, since
// its entries are lost when the process ends. An append is acknowledged at once. It waits only for a reader that pins entries, and
// fails only after Close or when its context ends.
type Memory struct {
	epoch       string
	maxBytes    int
	maxAge      time.Duration
	segmentSize int

	mu       sync.RWMutex  // guards all below
	segments []*segment    // oldest first; each starts with the seq after the previous segment's last seq
	bytes    int           // memory of the segments and their indexes
	newest   uint64        // seq of the last entry appended
	changed  chan struct{} // closed by the next append; nil if no reader waits
	closed   bool
	pinned   uint64        // entries after it are not evicted; the maximum if Pin was never called
	unpinned chan struct{} // closed by the next Pin; nil if no append waits

	evicted *atomic.Int64 // evicted bytes that are not freed yet
}

var _ Journal = (*Memory)(nil)

// NewEpoch returns a random epoch: 16 hexadecimal digits.
func NewEpoch() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// NewMemory returns an empty journal.
func NewMemory(cfg Config) *Memory {
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, DefaultMaxBytes)
	return &Memory{
		pinned:      math.MaxUint64,
		epoch:       cmp.Or(cfg.Epoch, NewEpoch()),
		newest:      cfg.After,
		maxBytes:    cfg.MaxBytes,
		maxAge:      cmp.Or(cfg.MaxAge, DefaultMaxAge),
		evicted:     new(atomic.Int64),
		segmentSize: min(max(cfg.MaxBytes/64, minSegmentBytes), maxSegmentBytes),
	}
}

// Append gives the record the next seq and makes it visible. It waits while the journal is full of pinned entries.
func (m *Memory) Append(ctx context.Context, r Record) (Pending, error) {
	now, need := time.Now(), frameSize(len(r.Body))
	m.mu.Lock()
	for !m.closed && !m.hasRoom(need) && !m.addSegment(need, now) {
		if err := m.waitForPin(ctx); err != nil {
			m.mu.Unlock()
			return Pending{}, err
		}
	}
	if m.closed {
		m.mu.Unlock()
		return Pending{}, ErrClosed
	}
	s := m.segments[len(m.segments)-1]
	m.newest++
	m.bytes += s.append(m.newest, r)
	s.newestAt = now
	pending := Acknowledged(m.newest)
	for len(m.segments) > 1 && m.bytes > m.maxBytes && m.evictable() {
		m.evict() // the index of small entries may be larger than the entries
	}
	changed := m.changed
	m.changed = nil
	m.mu.Unlock()
	if changed != nil {
		close(changed)
	}
	return pending, nil
}

// hasRoom reports whether the last segment has room for a frame.
func (m *Memory) hasRoom(need int) bool {
	n := len(m.segments)
	return n > 0 && m.segments[n-1].room() >= need
}

// addSegment evicts segments until a new one has room, and adds it. It returns false if pinned entries prevent that.
func (m *Memory) addSegment(need int, now time.Time) bool {
	size := max(m.segmentSize, need)
	m.expire(now)
	for len(m.segments) > 0 && m.bytes+size > m.maxBytes {
		if !m.evictable() {
			return false
		}
		m.evict()
	}
	m.segments = append(m.segments, &segment{first: m.newest + 1, buf: make([]byte, 0, size)})
	m.bytes += size
	return true
}

// evictable reports whether the oldest segment has no pinned entry.
func (m *Memory) evictable() bool {
	last := m.newest
	if len(m.segments) > 1 {
		last = m.segments[1].first - 1
	}
	return last <= m.pinned
}

// waitForPin waits for the next Pin without the lock.
func (m *Memory) waitForPin(ctx context.Context) error {
	if m.unpinned == nil {
		m.unpinned = make(chan struct{})
	}
	unpinned := m.unpinned
	m.mu.Unlock()
	defer m.mu.Lock()
	select {
	case <-unpinned:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Pin makes the journal retain all entries after a seq until the next call. Appends wait for the next call if there is
// no room for other entries. A reader that must not miss an entry pins the seq up to which it has read.
func (m *Memory) Pin(seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pinned = seq
	m.wakeAppends()
}

func (m *Memory) wakeAppends() {
	if m.unpinned != nil {
		close(m.unpinned)
		m.unpinned = nil
	}
}

// expire evicts the segments whose newest entry is too old.
func (m *Memory) expire(now time.Time) {
	for len(m.segments) > 0 && now.Sub(m.segments[0].newestAt) > m.maxAge && m.evictable() {
		m.evict()
	}
}

// evict removes the oldest segment. Its memory is freed when no reader references it, and never reused.
func (m *Memory) evict() {
	s := m.segments[0]
	m.bytes -= cap(s.buf) + indexBytes*cap(s.index)
	size, evicted := int64(cap(s.buf)), m.evicted
	evicted.Add(size)
	runtime.AddCleanup(unsafe.SliceData(s.buf), func(size int64) { evicted.Add(-size) }, size)
	m.segments[0] = nil
	m.segments = m.segments[1:]
}

// Bounds returns the epoch and the range of retained entries.
func (m *Memory) Bounds() Bounds {
	m.evictExpired()
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.bounds()
}

// evictExpired evicts entries by age. Append does the same, but there may be no appends.
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

// Bytes returns the memory of the retained entries and their index.
func (m *Memory) Bytes() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.bytes
}

// EvictedBytes returns the memory of evicted entries that is not freed yet: readers reference it, or no garbage collection has run since.
func (m *Memory) EvictedBytes() int { return int(m.evicted.Load()) }

// Read returns the entries that a query selects; see Journal.
func (m *Memory) Read(_ context.Context, q Query) (Chunk, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	c := Chunk{Slices: q.Slices, Last: q.After}
	if m.closed {
		return c, ErrClosed
	}
	if err := m.bounds().CheckPosition(q.After); err != nil {
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

// find returns the index of the segment of a retained seq.
func (m *Memory) find(seq uint64) int {
	after := sort.Search(len(m.segments), func(i int) bool { return m.segments[i].first > seq })
	return max(after-1, 0)
}

// Changed returns a channel that the next append closes.
func (m *Memory) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed == nil {
		m.changed = make(chan struct{})
	}
	return m.changed
}

// Close makes waiting appends, and later appends and reads, fail. It never blocks.
func (m *Memory) Close(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.wakeAppends()
	return nil
}
