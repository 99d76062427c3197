package server

import (
	"sync"
	"sync/atomic"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// sourcesDownAge is the maximum age of the status of sources in answers of MatchPrefix.
const sourcesDownAge = 100 * time.Millisecond

// sourcesDown knows which sources of dp ranks have no connection. It reads their status at most once in
// sourcesDownAge, since that takes longer than a match.
type sourcesDown struct {
	sources func() map[string][]*kvcastv1.SourceStatus // nil: none is known
	cluster Cluster                                    // nil: there are no other servers
	mu      sync.Mutex                                 // held to replace newest
	newest  atomic.Pointer[downSince]
}

// downSince is when connections were lost.
type downSince struct {
	read   time.Time
	byRank map[dpRank]time.Time // the source that has been down longest
}

type dpRank struct {
	worker string
	rank   uint32
}

// lookup returns a function that returns how long a source of a rank has been down at now, in nanoseconds; 0: none is.
// It returns nil if no source is down.
func (d *sourcesDown) lookup(now time.Time) func(worker string, rank uint32) uint64 {
	newest := d.newest.Load()
	if newest == nil || now.Sub(newest.read) > sourcesDownAge {
		newest = d.read(now, newest)
	}
	if len(newest.byRank) == 0 {
		return nil
	}
	return func(worker string, rank uint32) uint64 {
		since, ok := newest.byRank[dpRank{worker, rank}]
		if !ok {
			return 0
		}
		return uint64(max(now.Sub(since), 1))
	}
}

// read reads the status of all sources. While another call reads it, read returns the older status, if there is one.
func (d *sourcesDown) read(now time.Time, older *downSince) *downSince {
	if older == nil {
		d.mu.Lock()
	} else if !d.mu.TryLock() {
		return older
	}
	defer d.mu.Unlock()
	if newest := d.newest.Load(); newest != older {
		return newest
	}
	read := &downSince{read: now, byRank: make(map[dpRank]time.Time)}
	add := func(worker string, rank uint32, down time.Duration) {
		r, at := dpRank{worker, rank}, now.Add(-down)
		if since, ok := read.byRank[r]; down > 0 && (!ok || at.Before(since)) {
			read.byRank[r] = at
		}
	}
	if d.sources != nil {
		for worker, sources := range d.sources() {
			for _, s := range sources {
				add(worker, s.GetDpRank(), time.Duration(s.GetDownNano()))
			}
		}
	}
	if d.cluster != nil {
		for _, s := range d.cluster.SourcesDown() {
			add(s.Worker, s.Rank, s.For)
		}
	}
	d.newest.Store(read)
	return read
}
