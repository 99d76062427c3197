package cluster

import "time"

// decide returns the action for a worker, if one is due, and sets when to decide again.
//
// The rules, in the order of the functions below:
//
//  1. What is ingested although another instance owns it, or although an append was refused, is dropped. Nothing else
//     happens while the instance is loading or isolated.
//  2. What is ingested is released if the instance drains, or if the worker is assigned to another instance that has
//     settled. A wanted worker is released, too, if this instance is cut off from the engines. A worker that is neither wanted nor connected is removed after Config.Grace; before, it is released if its
//     engine may have connected elsewhere.
//  3. What is owned but not ingested, because an action failed, is claimed again, or released to where it is assigned.
//  4. What was released to this instance is claimed.
//  5. A worker without a live owner is claimed if it is assigned here, or if its engine is connected here. If it is
//     neither wanted nor connected for Config.Grace, it is claimed where it is assigned, to be removed.
//  6. A worker with a live owner is claimed if it is not wanted and its engine has connected here: a connection claims
//     once, so that two instances with connections do not take the worker from each other in turn.
func (m *Machine) decide(w *worker, now time.Time) (a Action, ok bool) {
	w.due = time.Time{}
	m.observe(w, now)
	if w.progress == ingesting && (w.refused || w.owner != m.cfg.ID || w.released) {
		return m.action(w, Drop, ReasonFenced), true
	}
	if !m.loaded || m.isolated || w.progress != idle && w.progress != ingesting {
		return Action{}, false
	}
	if w.progress == idle && !passed(w, w.retryAt, now) {
		return Action{}, false
	}
	switch {
	case w.progress == ingesting:
		a, ok = m.decideIngested(w, now)
	case w.owner == m.cfg.ID && !w.released:
		a, ok = m.decideIncomplete(w, now)
	case !m.mayIngest(m.self):
	case w.owner == m.cfg.ID:
		a, ok = m.action(w, Claim, ReasonHandedOver), m.self.candidate || w.connected && !w.wanted
	default:
		a, ok = m.decideOther(w, now)
	}
	return a, ok
}

// observe notes since when the worker has neither engine nor owner.
func (m *Machine) observe(w *worker, now time.Time) {
	if w.wanted || w.connected {
		w.orphanedAt = time.Time{}
	} else if w.orphanedAt.IsZero() {
		w.orphanedAt = now
	}
	ownerless, at := m.ownerless(w, now)
	if !ownerless {
		w.ownerlessAt = time.Time{}
		w.due = at
	} else if w.ownerlessAt.IsZero() {
		w.ownerlessAt = now
	}
}

// ownerless reports whether no live instance owns the worker. If one does only until the time at, it returns that.
func (m *Machine) ownerless(w *worker, now time.Time) (_ bool, at time.Time) {
	if w.owner == "" {
		return true, time.Time{}
	}
	i := m.instances[w.owner]
	if i != nil && i.live {
		return w.released && !i.candidate, time.Time{}
	}
	// An instance of which the log has a recent record may be about to send its first heartbeat.
	at = latest(latest(w.recordAt, m.loadedAt), m.returnedAt).Add(m.cfg.TTL)
	return !now.Before(at), at
}

// decideIngested decides on a worker that is ingested here.
func (m *Machine) decideIngested(w *worker, now time.Time) (a Action, ok bool) {
	switch {
	case m.draining:
		return m.action(w, Release, ReasonDraining), true
	case w.wanted:
		next := first(m.candidates, w.name)
		switch {
		case next == nil || next == m.self:
			return Action{}, false
		case m.self.cutOff:
			return m.action(w, Release, ReasonCutOff), true
		default:
			return m.action(w, Release, ReasonAssigned), next.settled
		}
	case w.connected:
		return Action{}, false
	case w.followsConnection && len(m.candidates) > 1:
		return m.action(w, Release, ReasonDisconnected), passed(w, w.orphanedAt.Add(m.cfg.Settle), now)
	default:
		return m.action(w, Remove, ReasonUnwanted), passed(w, m.orphanedSince(w).Add(m.grace(w)), now)
	}
}

// decideIncomplete decides on a worker that this instance owns and does not ingest.
func (m *Machine) decideIncomplete(w *worker, now time.Time) (a Action, ok bool) {
	switch {
	case m.draining:
		return m.action(w, Release, ReasonDraining), true
	case w.wanted && first(m.candidates, w.name) != m.self:
		return m.action(w, Release, ReasonAssigned), true
	case w.wanted, w.connected:
		return m.action(w, Claim, ReasonIncomplete), true
	default:
		return m.action(w, Claim, ReasonUnwanted), passed(w, m.orphanedSince(w).Add(m.grace(w)), now)
	}
}

// decideOther decides on a worker that this instance does not own.
func (m *Machine) decideOther(w *worker, now time.Time) (a Action, ok bool) {
	ownerless := !w.ownerlessAt.IsZero()
	if w.connected && !w.wanted {
		return m.action(w, Claim, ReasonConnected), ownerless || w.claimDue
	}
	if !ownerless || first(m.candidates, w.name) != m.self {
		return Action{}, false
	}
	if !w.wanted {
		exists := w.inStream || w.owner != ""
		return m.action(w, Claim, ReasonUnwanted), exists && passed(w, latest(m.orphanedSince(w), w.ownerlessAt).Add(m.grace(w)), now)
	}
	reason := ReasonUnowned
	switch i := m.instances[w.owner]; {
	case i != nil && i.live, w.owner == "" && w.seq > 0:
		reason = ReasonReleased
	case w.owner != "":
		reason = ReasonOwnerDead
	}
	return m.action(w, Claim, reason), true
}

// orphanedSince returns since when it is known that the worker is neither wanted nor connected: while this instance was
// isolated, it could not know who wants it.
func (m *Machine) orphanedSince(w *worker) time.Time { return latest(w.orphanedAt, m.returnedAt) }

// grace returns how long a worker that is neither wanted nor connected stays in the log.
func (m *Machine) grace(w *worker) time.Duration {
	if w.removeNow {
		return 0
	}
	return m.cfg.Grace
}

// passed reports whether it is time, and otherwise makes the machine decide again then.
func passed(w *worker, at, now time.Time) bool {
	if now.Before(at) {
		w.due = earliest(w.due, at)
		return false
	}
	return true
}

func (m *Machine) action(w *worker, k Kind, r Reason) Action {
	a := Action{Kind: k, Worker: w.name, Reason: r, Seq: m.seq}
	if k == Release && w.wanted {
		if next := first(m.candidates, w.name); next != nil {
			a.To = next.id
		}
	}
	return a
}
