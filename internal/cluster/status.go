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

// Ownership is who owns a worker by the log.
type Ownership struct {
	// Instance is empty if the worker was released to nobody, or never claimed.
	Instance string
	// Released reports whether the worker was released to Instance, which is to claim it.
	Released bool
	// Seq is of the record that says so; 0 if there is none.
	Seq uint64
	// Assigned is the instance that is first by rendezvous, if the worker is wanted.
	Assigned string
	// Ingested reports whether this instance ingests the worker.
	Ingested bool
}

// Owners returns the owners of all workers that are wanted, connected here, owned, or in the log.
func (m *Machine) Owners() map[string]Ownership {
	all := make(map[string]Ownership, len(m.workers))
	for name, w := range m.workers {
		o := Ownership{Instance: w.owner, Released: w.released, Seq: w.seq, Ingested: w.progress == ingesting}
		if next := first(m.candidates, name); w.wanted && next != nil {
			o.Assigned = next.id
		}
		all[name] = o
	}
	return all
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
