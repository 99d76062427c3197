package cluster

import (
	"maps"
	"slices"
	"time"
)

// progress is how far this instance is with a worker.
type progress uint8

// The states of progress.
const (
	idle      progress = iota // not ingested here
	claiming                  // Claim is in progress
	ingesting                 // claimed, recovered and ingested here
	releasing                 // Release or Remove is in progress
	dropping                  // Drop is in progress
	released                  // the release is in the log, but has not been read back yet
)

// limitID is what limits the actions in progress.
type limitID uint8

const (
	noLimit limitID = iota
	claims
	releases  // and removals
	handOvers // workers on their way to their next owner
	numLimits
)

// limit bounds what is in progress. waiting are the workers whose actions wait for others to end, in order, and some
// that no longer wait.
type limit struct {
	most, inProgress int
	waiting          []string
}

// worker is what a Machine knows of a worker.
type worker struct {
	name string
	// owner owns the worker by the log; empty if none does. seq is of the record that says so, which was given at
	// recordAt. released reports whether it is a release: then owner is to claim the worker.
	owner    string
	seq      uint64
	released bool
	recordAt time.Time

	wanted, inStream bool
	// removeNow reports whether the worker is removed without waiting for Config.Grace.
	removeNow bool
	// connected reports whether an engine of the worker is connected here, and claimDue whether it has connected
	// since this instance last ingested the worker.
	connected, claimDue bool

	progress progress
	refused  bool      // an append was refused since the last claim
	retryAt  time.Time // no claim or release before, because one failed
	// followsConnection reports whether an engine has been connected since the last claim.
	followsConnection bool
	handingOver       bool    // counted in handOvers
	waitsFor          limitID // it is in limit.waiting

	orphanedAt  time.Time // since when it is neither wanted nor connected here; zero if it is
	ownerlessAt time.Time // since when no instance that lives owns it; zero if one does
	due         time.Time // when to decide again; zero if only after an input
}

// Machine decides what one instance does. Use New to create one.
type Machine struct {
	cfg Config
	// instances are known by heartbeats, self included. candidates are those to which workers are assigned.
	instances  map[string]*instance
	self       *instance
	candidates []*instance
	workers    map[string]*worker

	draining bool
	engines  Reach
	loaded   bool
	loadedAt time.Time
	// isolated reports whether own heartbeats have not been read back; returnedAt is when they were again.
	isolated   bool
	returnedAt time.Time
	seq        uint64 // of the newest ownership record

	// Workers to decide on in Next: those in dirty, or all.
	dirty    map[string]*worker
	allDirty bool
	due      time.Time // the earliest worker.due, or earlier
	limits   [numLimits]limit
}

// New returns a Machine that knows nothing yet.
func New(c Config) *Machine {
	m := &Machine{
		cfg:       c.withDefaults(),
		instances: make(map[string]*instance),
		workers:   make(map[string]*worker),
		dirty:     make(map[string]*worker),
		isolated:  true,
	}
	m.limits[claims].most, m.limits[releases].most, m.limits[handOvers].most = m.cfg.MaxActions, m.cfg.MaxActions, m.cfg.MaxHandOvers
	m.self = newInstance(c.ID)
	m.self.live = true
	m.instances[c.ID] = m.self
	return m
}

// worker returns a worker, known before or not, on which Next is to decide.
func (m *Machine) worker(name string) *worker {
	w := m.workers[name]
	if w == nil {
		w = &worker{name: name}
		m.workers[name] = w
	}
	m.dirty[name] = w
	return w
}

// Loaded is the input once the log up to its end, the heartbeats and the wanted workers that existed at the start have
// been given. There is no action before.
func (m *Machine) Loaded(now time.Time) {
	m.loaded, m.loadedAt = true, now
	m.allDirty = true
}

// Wanted is the input when kvcast is to connect to the worker's engines, or no longer.
func (m *Machine) Wanted(name string, wanted bool) {
	w := m.worker(name)
	w.wanted, w.removeNow = wanted, w.removeNow && !wanted
}

// Unwanted is the input when a worker that is not wanted is to be removed without waiting for Config.Grace.
func (m *Machine) Unwanted(name string) { m.worker(name).removeNow = true }

// InStream is the input when the log says that the worker was added or removed.
func (m *Machine) InStream(name string, exists bool) { m.worker(name).inStream = exists }

// Connected is the input when an engine of the worker has connected to this instance.
func (m *Machine) Connected(name string) {
	w := m.worker(name)
	w.connected, w.followsConnection = true, true
	if w.progress != ingesting {
		w.claimDue = true
	}
}

// Disconnected is the input when no engine of the worker is connected to this instance any more.
func (m *Machine) Disconnected(name string) {
	w := m.worker(name)
	w.connected = false
}

// ClaimRead is the input for a claim that was read from the log. Records of a worker are given in order.
func (m *Machine) ClaimRead(name string, seq uint64, owner string, now time.Time) {
	w := m.worker(name)
	m.endHandOver(w)
	m.recordRead(w, seq, owner, false, now)
}

// ReleaseRead is the input for a release that was read from the log. next is empty for a release to nobody.
func (m *Machine) ReleaseRead(name string, seq uint64, next string, now time.Time) {
	m.recordRead(m.worker(name), seq, next, true, now)
}

func (m *Machine) recordRead(w *worker, seq uint64, owner string, release bool, now time.Time) {
	w.owner, w.seq, w.released, w.recordAt = owner, seq, release && owner != "", now
	m.seq = max(m.seq, seq)
	if w.progress == released {
		w.progress = idle
	}
}

// Claimed is the result of Claim: ok if the worker is ingested. Otherwise the claim was refused, its outcome is unknown,
// or the recovery failed. Before it is ok, the caller gives the machine the claim that it read back.
func (m *Machine) Claimed(name string, ok bool, now time.Time) {
	w := m.worker(name)
	if w.progress != claiming {
		return
	}
	m.endAction(w)
	if !ok {
		w.retryAt = now.Add(m.cfg.Retry)
		return
	}
	w.progress = ingesting
	w.refused, w.claimDue = false, false
}

// Released is the result of Release and Remove: the seq of the release, or 0 if it was refused or its outcome is unknown.
// In any case the worker is no longer ingested.
func (m *Machine) Released(name string, seq uint64, now time.Time) {
	w := m.worker(name)
	if w.progress != releasing {
		return
	}
	m.endAction(w)
	if seq == 0 {
		m.endHandOver(w)
		w.retryAt = now.Add(m.cfg.Retry)
	} else if w.seq < seq {
		w.progress = released
	}
}

// Lost is the input when an append of a worker that is ingested was refused, or its outcome is unknown.
func (m *Machine) Lost(name string) {
	m.worker(name).refused = true
}

// Dropped is the result of Drop.
func (m *Machine) Dropped(name string, now time.Time) {
	w := m.worker(name)
	if w.progress != dropping {
		return
	}
	m.endAction(w)
	w.retryAt = now.Add(m.cfg.Retry)
}

// Drain is the input when this instance is shutting down: it claims nothing, and releases its workers.
func (m *Machine) Drain() { m.draining = true }

// Engines is the input when it changes whether this instance reaches engines. While it is ReachNone, and another instance
// has ReachSome, this one is cut off: it releases its wanted workers, and none is assigned to it.
func (m *Machine) Engines(r Reach) { m.engines = r }

// endAction ends the action in progress.
func (m *Machine) endAction(w *worker) {
	switch w.progress {
	case claiming:
		m.limits[claims].inProgress--
	case releasing:
		m.limits[releases].inProgress--
	default:
	}
	w.progress = idle
}

func (m *Machine) endHandOver(w *worker) {
	if w.handingOver {
		w.handingOver = false
		m.limits[handOvers].inProgress--
	}
}

// Next returns what to do now, and when to call it again at the latest; zero if only after another input. It is called
// after each input, or after several.
func (m *Machine) Next(now time.Time) (actions []Action, again time.Time) {
	again = m.refreshInstances(now)
	if m.allDirty {
		m.allDirty, m.due = false, time.Time{}
		for name, w := range m.workers {
			m.dirty[name] = w
		}
	} else if !m.due.IsZero() && !now.Before(m.due) {
		m.due = time.Time{}
		for name, w := range m.workers {
			if w.due.IsZero() {
				continue
			}
			if now.Before(w.due) {
				m.due = earliest(m.due, w.due)
			} else {
				m.dirty[name] = w
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.dirty)) {
		actions = m.appendAction(actions, m.workers[name], now)
	}
	clear(m.dirty)
	for id := range m.limits {
		l := &m.limits[id]
		for l.inProgress < l.most && len(l.waiting) > 0 {
			w := m.workers[l.waiting[0]]
			l.waiting = l.waiting[1:]
			if w != nil {
				actions = m.appendAction(actions, w, now)
			}
		}
	}
	return actions, earliest(again, m.due)
}

// appendAction begins the action for a worker and appends it, if there is one and no limit is reached.
func (m *Machine) appendAction(actions []Action, w *worker, now time.Time) []Action {
	a, ok := m.decide(w, now)
	waitsFor := noLimit
	if ok {
		waitsFor = m.reached(a)
	}
	if waitsFor != noLimit && waitsFor != w.waitsFor {
		l := &m.limits[waitsFor]
		l.waiting = append(l.waiting, w.name)
	}
	w.waitsFor = waitsFor
	if ok && waitsFor == noLimit {
		m.begin(w, a)
		actions = append(actions, a)
	}
	m.due = earliest(m.due, w.due)
	if w.forgettable() {
		delete(m.workers, w.name)
	}
	return actions
}

// reached returns the limit that the action would exceed.
func (m *Machine) reached(a Action) limitID {
	full := func(id limitID) bool { return m.limits[id].inProgress >= m.limits[id].most }
	switch {
	case a.Kind == Claim && full(claims):
		return claims
	case a.Reason == ReasonAssigned && full(handOvers):
		return handOvers
	case (a.Kind == Release || a.Kind == Remove) && full(releases):
		return releases
	default:
		return noLimit
	}
}

// begin notes that an action is in progress.
func (m *Machine) begin(w *worker, a Action) {
	switch a.Kind {
	case Claim:
		w.progress = claiming
		w.followsConnection = w.connected
		m.limits[claims].inProgress++
	case Release, Remove:
		w.progress = releasing
		m.limits[releases].inProgress++
		if a.Reason == ReasonAssigned {
			w.handingOver = true
			m.limits[handOvers].inProgress++
		}
	case Drop:
		w.progress = dropping
	}
}

// forgettable reports whether nothing is known of the worker.
func (w *worker) forgettable() bool {
	return w.progress == idle && w.owner == "" && !w.wanted && !w.connected && !w.inStream
}
