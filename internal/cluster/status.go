package cluster

import (
	"slices"
	"strings"
	"time"
)

// InstanceStatus is an instance as the machine sees it.
type InstanceStatus struct {
	ID       string
	Live     bool
	Ingest   bool
	Draining bool
	CutOff   bool      // it reaches no engine, and another instance does
	Since    time.Time // since when it has been live, or dead; zero for this instance
}

// Instances returns the known instances, this one included, in the order of their ids.
func (m *Machine) Instances() []InstanceStatus {
	all := make([]InstanceStatus, 0, len(m.instances))
	for _, i := range m.instances {
		s := InstanceStatus{ID: i.id, Live: i.live, Ingest: i.info.Ingest, Draining: i.info.Draining, CutOff: i.live && i.cutOff, Since: i.since}
		if i == m.self {
			s.Ingest, s.Draining = m.cfg.Ingest, m.draining
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b InstanceStatus) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Ingested reports whether this instance ingests a worker.
func (m *Machine) Ingested(name string) bool {
	w := m.workers[name]
	return w != nil && w.progress == ingesting
}

// Isolated reports whether own heartbeats have not been read back for TTL/2: others may soon hold this instance for dead,
// and it cannot tell whether they live. It begins nothing then, and keeps ingesting its workers until an append is refused.
func (m *Machine) Isolated() bool { return m.isolated }

// CutOff reports whether this instance reaches no engine, and another one does.
func (m *Machine) CutOff() bool { return m.self.cutOff }

// Drained reports whether the instance drains, has no action in progress, and owns nothing.
func (m *Machine) Drained() bool {
	for _, w := range m.workers {
		if w.progress != idle || w.owner == m.cfg.ID && !w.released {
			return false
		}
	}
	return m.draining
}
