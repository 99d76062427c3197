// Package incident remembers what has happened to workers, subscribers and servers, for operators.
//
// In: incidents, from the parts of a server as they happen. Out: the last ones of each kind, selected by a request.
// Guarantee: bounded memory, and a flood of one kind does not evict another kind.
package incident

import (
	"cmp"
	"slices"
	"sync"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// PerKind is how many incidents of each kind a Log has. The memory of all kinds is some 10 MB at most.
	PerKind = 2048
	// DefaultLimit is the limit of a request that has none.
	DefaultLimit = 100
	// MaxLimit is the highest limit of a request.
	MaxLimit = 1000
)

// Log has the last incidents of each kind. The zero value is empty. A nil Log remembers nothing. It is safe for
// concurrent use.
type Log struct {
	mu     sync.Mutex // guards all below
	newest uint64     // id
	kinds  map[kvcastv1.IncidentKind]*ring
}

// ring has the last incidents of a kind. next is the index of the oldest, if the ring is full.
type ring struct {
	all  []*kvcastv1.Incident
	next int
}

// Add adds an incident, which must not be modified afterwards. It sets the id, and the time unless it is set.
func (l *Log) Add(i *kvcastv1.Incident) {
	if l == nil {
		return
	}
	if i.GetTimeUnixNano() == 0 {
		i.TimeUnixNano = time.Now().UnixNano()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newest++
	i.Id = l.newest
	if l.kinds == nil {
		l.kinds = make(map[kvcastv1.IncidentKind]*ring)
	}
	r := l.kinds[i.GetKind()]
	if r == nil {
		r = new(ring)
		l.kinds[i.GetKind()] = r
	}
	r.add(i)
}

// Newest returns the id of the newest incident; 0 if there was none.
func (l *Log) Newest() uint64 {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest
}

// List returns the incidents that a request selects. The caller must not modify them.
func (l *Log) List(req *kvcastv1.ListIncidentsRequest) *kvcastv1.ListIncidentsResponse {
	out := new(kvcastv1.ListIncidentsResponse)
	if l == nil {
		return out
	}
	limit := int(req.GetLimit())
	if limit == 0 {
		limit = DefaultLimit
	}
	l.mu.Lock()
	out.NewestId = l.newest
	for kind, r := range l.kinds {
		if len(req.GetKinds()) == 0 || slices.Contains(req.GetKinds(), kind) {
			out.Incidents = r.appendSelected(out.Incidents, req, limit+1)
		}
	}
	l.mu.Unlock()
	slices.SortFunc(out.Incidents, func(a, b *kvcastv1.Incident) int { return cmp.Compare(b.GetId(), a.GetId()) })
	if out.More = len(out.GetIncidents()) > limit; out.GetMore() {
		out.Incidents = out.GetIncidents()[:limit]
	}
	return out
}

func (r *ring) add(i *kvcastv1.Incident) {
	if len(r.all) < PerKind {
		r.all = append(r.all, i)
		return
	}
	r.all[r.next] = i
	r.next = (r.next + 1) % PerKind
}

// appendSelected appends the newest incidents that a request selects, up to a limit.
func (r *ring) appendSelected(to []*kvcastv1.Incident, req *kvcastv1.ListIncidentsRequest, limit int) []*kvcastv1.Incident {
	for n := len(r.all); n > 0 && limit > 0; n-- {
		i := r.all[(r.next+n-1)%len(r.all)]
		if i.GetId() <= req.GetAfterId() {
			break
		}
		if isSelected(i, req) {
			to = append(to, i)
			limit--
		}
	}
	return to
}

func isSelected(i *kvcastv1.Incident, req *kvcastv1.ListIncidentsRequest) bool {
	t := i.GetTimeUnixNano()
	switch {
	case req.GetWorker() != "" && i.GetWorker() != req.GetWorker():
		return false
	case req.GetBeforeId() != 0 && i.GetId() >= req.GetBeforeId():
		return false
	case req.GetFromUnixNano() != 0 && t < req.GetFromUnixNano():
		return false
	}
	return req.GetUntilUnixNano() == 0 || t < req.GetUntilUnixNano()
}
