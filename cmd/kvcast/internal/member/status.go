package member

import (
	"time"

	"github.com/kvcast/kvcast/internal/cluster"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

var _ server.Cluster = (*Member)(nil)

// ID implements server.Cluster: it names this instance.
func (m *Member) ID() string { return m.cfg.ID }

// Instances implements server.Cluster. It returns nil before Attach.
func (m *Member) Instances() []*kvcastv1.InstanceStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.start < attached {
		return nil
	}
	owned := make(map[string]uint64)
	for _, o := range m.owners {
		if !o.IsReleased() {
			owned[o.Instance]++
		}
	}
	known := m.machine.Instances()
	all := make([]*kvcastv1.InstanceStatus, 0, len(known))
	for _, i := range known {
		status := m.instanceStatus(i)
		status.Workers = owned[i.ID]
		all = append(all, status)
	}
	return all
}

// instanceStatus returns the status of an instance without the number of its workers.
func (m *Member) instanceStatus(i cluster.InstanceStatus) *kvcastv1.InstanceStatus {
	var of instance
	if i.ID == m.cfg.ID {
		of.heartbeat = m.heartbeat()
	} else {
		of = *m.instances[i.ID]
	}
	h := of.heartbeat
	return &kvcastv1.InstanceStatus{
		Id: i.ID, Host: h.Host, Pid: uint32(h.PID), GrpcAddress: h.Address, Version: h.Version,
		StartTimeUnixNano: h.Started.UnixNano(), Ingests: i.Ingest, Draining: i.Draining, Live: i.Live, CutOff: i.CutOff,
		NewestSeq: h.Seq, Behind: of.behind,
	}
}

// owned returns the workers that this instance owns. The lock is held.
func (m *Member) owned() (names []string) {
	for name, o := range m.owners {
		if o.Instance == m.cfg.ID && !o.IsReleased() {
			names = append(names, name)
		}
	}
	return names
}

// WorkerStates implements server.Cluster: it returns the states in the last heartbeats of live instances. A worker that was taken
// after the heartbeat is left out.
func (m *Member) WorkerStates() map[string]kvcastv1.WorkerState {
	m.mu.Lock()
	defer m.mu.Unlock()
	live := make(map[string]*instance)
	for _, i := range m.machine.Instances() {
		if of := m.instances[i.ID]; of != nil && i.Live && i.ID != m.cfg.ID {
			live[i.ID] = of
		}
	}
	all := make(map[string]kvcastv1.WorkerState)
	for name, o := range m.owners {
		if of := live[o.Instance]; of != nil && !o.IsReleased() && o.Seq <= of.Seq {
			all[name] = of.state(name)
		}
	}
	return all
}

// SourcesDown implements server.Cluster.
func (m *Member) SourcesDown() []server.RankSince {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sources(func(h *heartbeat) []sourceSince { return h.Down })
}

// Overpredicted implements server.Cluster. It returns what the last heartbeats of live instances say.
func (m *Member) Overpredicted() (all []server.RankSince) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.machine.Instances() {
		if of := m.instances[i.ID]; of != nil && i.Live && i.ID != m.cfg.ID {
			for _, s := range of.Over {
				all = append(all, server.RankSince(s))
			}
		}
	}
	return all
}

// sources returns dp ranks of other instances' heartbeats that these own. The lock is held.
func (m *Member) sources(of func(*heartbeat) []sourceSince) (all []server.RankSince) {
	for id, i := range m.instances {
		if id == m.cfg.ID {
			continue
		}
		for _, s := range of(&i.heartbeat) {
			if m.owners[s.Worker].Instance == id {
				all = append(all, server.RankSince{Worker: s.Worker, Rank: s.Rank, For: s.For + time.Since(i.seen)})
			}
		}
	}
	return all
}

// Owners implements server.Cluster.
func (m *Member) Owners() map[string]*kvcastv1.WorkerOwner {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make(map[string]*kvcastv1.WorkerOwner, len(m.owners))
	for name, o := range m.owners {
		if o.Instance != "" {
			all[name] = &kvcastv1.WorkerOwner{InstanceId: o.Instance, HandedOver: o.IsReleased()}
		}
	}
	for name := range m.wanted {
		if all[name] == nil {
			all[name] = &kvcastv1.WorkerOwner{}
		}
	}
	return all
}
