package server

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

// Knowledge says until when a server knows what the workers' engines have cached.
type Knowledge struct {
	// Confirmed is when the workers' dp ranks were last known to be up to date with their engines: all that the engines had
	// published by then is in the index. A worker that it does not have was last known to be so at Others; zero: never.
	Confirmed map[string]time.Time
	Others    time.Time
	// Unowned are the workers that no server reads.
	Unowned map[string]bool
	// Behind are dp ranks of which published batches are being replayed.
	Behind []RankSince
	// Limit is the age from which on knowledge is stale; 0: it never is.
	Limit time.Duration
}

// RankSince is a dp rank that has been in a state for a time.
type RankSince struct {
	Worker string
	Rank   uint32
	For    time.Duration
}

// standingInterval is how long what standing has read is used before it is read again.
const standingInterval = 100 * time.Millisecond

// unknownAge is the age of what was never known.
const unknownAge = 1<<63 - 1

// standing knows the standing of each dp rank: which of its sources have no connection, how recent the knowledge of it is, and
// whether predictions are too long. It reads that at most once in standingInterval, since reading takes longer than a match.
type standing struct {
	sources   func() map[string][]*kvcastv1.SourceStatus // nil: none is known
	cluster   Cluster                                    // nil: there are no other servers
	knowledge func() Knowledge                           // nil: it is always up to date
	// overpredicted returns the ranks of which predictions are too long again and again; nil: there are none.
	overpredicted func() []RankSince
	mu            sync.Mutex // held to replace newest
	newest        atomic.Pointer[standings]
}

// standings are what was read at a time.
type standings struct {
	read   time.Time
	down   map[dpRank]time.Time // since when the source that has been down longest is
	behind map[dpRank]time.Time // since when batches are being replayed
	over   map[dpRank]bool      // whether predictions are too long again and again
	Knowledge
}

type dpRank struct {
	worker string
	rank   uint32
}

// lookup returns a function that returns the standing of a rank at now, or nil if that of each is the zero value.
func (r *standing) lookup(now time.Time) func(worker string, rank uint32) match.Standing {
	newest := r.newest.Load()
	if newest == nil || now.Sub(newest.read) > standingInterval {
		newest = r.read(now, newest)
	}
	if len(newest.down) == 0 && len(newest.over) == 0 && newest.Limit == 0 {
		return nil
	}
	return func(worker string, rank uint32) match.Standing { return newest.of(dpRank{worker, rank}, now) }
}

// of returns the standing of a rank.
func (r *standings) of(rank dpRank, now time.Time) (of match.Standing) {
	if since, ok := r.down[rank]; ok {
		of.Down = uint64(max(now.Sub(since), 1))
	}
	of.Overpredicted = r.over[rank]
	if r.Limit == 0 {
		return of
	}
	confirmed, ok := r.Confirmed[rank.worker]
	if !ok {
		confirmed = r.Others
	}
	if since, ok := r.behind[rank]; ok && since.Before(confirmed) {
		confirmed = since
	}
	of.Age = unknownAge
	if !confirmed.IsZero() {
		of.Age = uint64(max(now.Sub(confirmed), 0))
	}
	of.Stale = of.Age > uint64(r.Limit) || r.Unowned[rank.worker]
	return of
}

// oldest returns the age of the oldest knowledge of a rank.
func (r *standing) oldest(now time.Time, x *index.Index) (age time.Duration) {
	if r.knowledge == nil {
		return 0
	}
	of := r.lookup(now)
	if of == nil {
		return 0
	}
	all, _ := x.Workers(nil)
	for i := range all {
		for k := range all[i].Ranks {
			age = max(age, time.Duration(of(all[i].Name, all[i].Ranks[k].Rank).Age))
		}
	}
	return age
}

// read reads the status of all sources. While another call reads it, read returns the older status, if there is one.
func (r *standing) read(now time.Time, older *standings) *standings {
	if older == nil {
		r.mu.Lock()
	} else if !r.mu.TryLock() {
		return older
	}
	defer r.mu.Unlock()
	if newest := r.newest.Load(); newest != older {
		return newest
	}
	read := &standings{read: now, down: make(map[dpRank]time.Time), behind: make(map[dpRank]time.Time), over: make(map[dpRank]bool)}
	if r.sources != nil {
		for worker, sources := range r.sources() {
			for _, s := range sources {
				read.add(read.down, RankSince{worker, s.GetDpRank(), time.Duration(s.GetDownNano())})
			}
		}
	}
	if r.cluster != nil {
		for _, s := range r.cluster.SourcesDown() {
			read.add(read.down, s)
		}
		read.addOver(r.cluster.Overpredicted())
	}
	if r.overpredicted != nil {
		read.addOver(r.overpredicted())
	}
	if r.knowledge != nil {
		read.Knowledge = r.knowledge()
		for _, s := range read.Behind {
			read.add(read.behind, s)
		}
	}
	r.newest.Store(read)
	return read
}

// addOver records that ranks are OVERPREDICTED.
func (r *standings) addOver(all []RankSince) {
	for _, s := range all {
		r.over[dpRank{s.Worker, s.Rank}] = true
	}
}

// add records since when a rank has been in a state.
func (r *standings) add(to map[dpRank]time.Time, s RankSince) {
	rank, at := dpRank{s.Worker, s.Rank}, r.read.Add(-s.For)
	if since, ok := to[rank]; s.For > 0 && (!ok || at.Before(since)) {
		to[rank] = at
	}
}
