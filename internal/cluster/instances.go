package cluster

import (
	"time"

	"github.com/zeebo/xxh3"
)

// instance is an instance as its heartbeats show it.
type instance struct {
	id       string
	seed     uint64 // hash of the id
	revision uint64 // of the last heartbeat
	info     Info
	heardAt  time.Time // when the last heartbeat arrived
	live     bool
	since    time.Time // when live last changed
	// cutOff reports whether it reaches no engine, and another candidate reaches any.
	cutOff bool
	// candidate reports whether workers are assigned to it, and settled whether it has been a candidate for Config.Settle.
	candidate, settled bool
	candidateSince     time.Time
}

func newInstance(id string) *instance { return &instance{id: id, seed: xxh3.HashString(id)} }

// first returns the candidate to which the worker is assigned: the first by rendezvous hashing. When a candidate comes
// or goes, only workers that it gets or had are assigned anew. It returns nil if there is no candidate.
func first(candidates []*instance, worker string) (best *instance) {
	var most uint64
	for _, c := range candidates {
		if score := xxh3.HashStringSeed(worker, c.seed); best == nil || score > most {
			best, most = c, score
		}
	}
	return best
}

// Instance is the input for a heartbeat, this instance's own included. Revisions grow with each heartbeat of an
// instance; one that was given before is ignored. Own heartbeats show that others can read them, and that this
// instance can read theirs: without one for TTL/2 it is isolated (see Machine.Isolated).
func (m *Machine) Instance(id string, revision uint64, info Info, now time.Time) {
	i := m.instances[id]
	if i == nil {
		i = newInstance(id)
		m.instances[id] = i
	}
	if revision <= i.revision {
		return
	}
	i.revision, i.info, i.heardAt = revision, info, now
	if !i.live {
		i.live, i.since = true, now
		m.allDirty = true
	}
}

// InstanceGone is the input when an instance's key was deleted: it has shut down, or it has been dead for so long that
// its key expired. The caller lets keys expire: dead instances are kept until then.
func (m *Machine) InstanceGone(id string) {
	if id != m.cfg.ID {
		delete(m.instances, id)
		m.allDirty = true
	}
}

// refreshInstances brings states of instances and candidates up to date, and marks all workers if any changed. It
// returns when that is due again; zero if only after another heartbeat.
func (m *Machine) refreshInstances(now time.Time) (again time.Time) {
	changed := m.refreshIsolation(now)
	if !m.isolated {
		again = m.self.heardAt.Add(m.cfg.TTL / 2)
	}
	reached := false
	for _, i := range m.instances {
		if i != m.self && i.live && !m.isolated {
			deadAt := latest(i.heardAt, m.returnedAt).Add(m.cfg.TTL)
			if now.Before(deadAt) {
				again = earliest(again, deadAt)
			} else {
				i.live, i.since, changed = false, now, true
			}
		}
		reached = reached || m.mayIngest(i) && m.reach(i) == ReachSome
	}
	m.candidates = m.candidates[:0]
	for _, i := range m.instances {
		i.cutOff = reached && m.reach(i) == ReachNone
		candidate := m.mayIngest(i) && !i.cutOff
		if candidate != i.candidate {
			i.candidate, i.candidateSince, changed = candidate, now, true
		}
		settledAt := i.candidateSince.Add(m.cfg.Settle)
		settled := candidate && !now.Before(settledAt)
		if settled != i.settled {
			i.settled, changed = settled, true
		}
		if candidate {
			m.candidates = append(m.candidates, i)
			if !settled {
				again = earliest(again, settledAt)
			}
		}
	}
	if changed {
		m.allDirty = true
	}
	return again
}

// mayIngest reports whether an instance lives, ingests and does not drain.
func (m *Machine) mayIngest(i *instance) bool {
	if i == m.self {
		return m.cfg.Ingest && !m.draining
	}
	return i.live && i.info.Ingest && !i.info.Draining
}

// reach returns whether an instance reaches engines.
func (m *Machine) reach(i *instance) Reach {
	if i == m.self {
		return m.engines
	}
	return i.info.Engines
}

// refreshIsolation brings m.isolated up to date, and reports whether it changed.
//
// While it is isolated, heartbeats of others are not expected, and no instance is considered dead. When isolation ends, others
// get another TTL for their next heartbeat: they may return later than this instance. Isolation begins before others
// that fell silent at the same time can be considered dead: their last heartbeats may be TTL/3 older than this
// instance's.
func (m *Machine) refreshIsolation(now time.Time) (changed bool) {
	isolated := !now.Before(m.self.heardAt.Add(m.cfg.TTL / 2))
	if isolated == m.isolated {
		return false
	}
	m.isolated = isolated
	if !isolated {
		m.returnedAt = now
	}
	return true
}

// earliest returns the earlier time; a zero time is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
