package member

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// wantWorkers notifies the machine which workers instances announce or are registered.
func (m *Member) wantWorkers() {
	wanted := make(map[string]bool)
	for name := range m.local {
		wanted[name] = true
	}
	for id, workers := range m.announced {
		if !m.announces(id) {
			continue
		}
		for name := range workers {
			wanted[name] = true
		}
	}
	for name := range m.registered {
		wanted[name] = true
	}
	reportChanges(m.wanted, wanted, m.machine.Wanted)
	m.wanted = wanted
}

// reportChanges calls report with each name that only one of two sets has, and whether it is in the second.
func reportChanges(before, now map[string]bool, report func(name string, is bool)) {
	for name := range now {
		if !before[name] {
			report(name, true)
		}
	}
	for name := range before {
		if !now[name] {
			report(name, false)
		}
	}
}

// announces reports whether what another instance announces counts.
func (m *Member) announces(id string) bool {
	i := m.instances[id]
	return i != nil && id != m.cfg.ID && time.Since(i.seen) <= m.cfg.TTL
}

// worker returns how to connect to the engines of a worker: as this instance has found, as it is registered, or as the first
// of the other instances announces.
func (m *Member) worker(name string) (w ingestconfig.Worker, ok bool) {
	if w, ok = m.local[name]; ok {
		return w, true
	}
	if w, ok = m.registered[name]; ok {
		return w, true
	}
	for _, id := range slices.Sorted(maps.Keys(m.announced)) {
		if w, ok = m.announced[id][name]; ok && m.announces(id) {
			return w, true
		}
	}
	return w, false
}

// AddWorker makes the workers that this instance has found known to all. It implements discovery.Workers.
func (m *Member) AddWorker(_ context.Context, w ingestconfig.Worker) error {
	if err := (&ingestconfig.Config{Workers: []ingestconfig.Worker{w}}).Validate(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.local[w.Name]; ok || m.registered[w.Name].Name != "" {
		return ingestconfig.ErrWorkerExists
	}
	if err := m.registeredSockets.Check(w); err != nil {
		return err
	}
	if err := m.localSockets.Add(w); err != nil {
		return err
	}
	m.local[w.Name] = w
	m.changed = true
	m.signal()
	return nil
}

// CheckSockets returns an error if a worker reads sockets of another one that this instance has found, or that is registered.
func (m *Member) CheckSockets(w ingestconfig.Worker) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.localSockets.Check(w); err != nil {
		return err
	}
	return m.registeredSockets.Check(w)
}

// RemoveWorker removes a worker of AddWorker. It implements discovery.Workers.
func (m *Member) RemoveWorker(_ context.Context, name string, _ feed.RemoveReason) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.local[name]; !ok {
		return ingestconfig.ErrNoWorker
	}
	delete(m.local, name)
	m.localSockets.Remove(name)
	m.changed = true
	m.signal()
	return nil
}

// IsWanted reports whether a worker is registered, and whether it is wanted or in the stream.
func (m *Member) IsWanted(name string) (registered, wanted bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, registered = m.registered[name]
	return registered, m.wanted[name] || m.inStream[name]
}

// registrationChanged handles a value of the bucket of the registrations.
func (m *Member) registrationChanged(v jetstream.Value) {
	name, err := jetstream.RegistrationName(v.Key)
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.signal()
	m.registeredSockets.Remove(name)
	if v.Data == nil {
		delete(m.registered, name)
		if m.wantWorkers(); !m.wanted[name] && (m.inStream[name] || m.owners[name].Instance != "") {
			m.deregistered[name] = true
			m.machine.Unwanted(name)
		}
		return
	}
	delete(m.deregistered, name)
	w, err := recovery.DecodeRegistration(name, v.Data)
	if err != nil {
		m.cfg.Log.Error("a registration cannot be read: register the worker again", "worker", name, "error", err)
		return
	}
	if err := m.registeredSockets.Add(w); err != nil { // registered with two instances at the same time
		m.cfg.Log.Warn("a registered worker reads sockets of another one: deregister one of them", "worker", name, "error", err)
	}
	m.registered[name] = w
}
