package member

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// wantWorkers notifies the machine which workers instances announce or are registered.
func (m *Member) wantWorkers() {
	wanted := m.catalog.names(m.announces)
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

// worker returns how to connect to the engines of a worker.
func (m *Member) worker(name string) (w ingestconfig.Worker, ok bool) {
	return m.catalog.worker(name, m.announces)
}

// AddWorker makes the workers that this instance has found known to all. It implements discovery.Workers.
func (m *Member) AddWorker(_ context.Context, w ingestconfig.Worker) error {
	err := (&ingestconfig.Config{Workers: []ingestconfig.Worker{w}}).Validate()
	if err == nil {
		m.mu.Lock()
		err = m.catalog.add(w)
		m.mu.Unlock()
	}
	if err == nil {
		m.signal()
	}
	return err
}

// CheckSockets returns an error if a worker reads sockets of another one that this instance has found, or that is registered.
func (m *Member) CheckSockets(w ingestconfig.Worker) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.catalog.checkSockets(w)
}

// RemoveWorker removes a worker of AddWorker. It implements discovery.Workers.
func (m *Member) RemoveWorker(_ context.Context, name string, _ feed.RemoveReason) error {
	m.mu.Lock()
	err := m.catalog.remove(name)
	m.mu.Unlock()
	if err == nil {
		m.signal()
	}
	return err
}

// IsWanted reports whether a worker is registered, and whether it is wanted or in the stream.
func (m *Member) IsWanted(name string) (registered, wanted bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.catalog.isRegistered(name), m.wanted[name] || m.inStream[name]
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
	if v.Data == nil {
		m.catalog.deregister(name)
		if m.wantWorkers(); !m.wanted[name] && (m.inStream[name] || m.owners[name].Instance != "") {
			m.deregistered[name] = true
			m.machine.Unwanted(name)
		}
		return
	}
	delete(m.deregistered, name)
	w, err := recovery.DecodeRegistration(name, v.Data)
	if err != nil {
		m.catalog.freeSockets(name)
		m.cfg.Log.Error("a registration cannot be read: register the worker again", "worker", name, "error", err)
		return
	}
	if err := m.catalog.register(w); err != nil { // registered with two instances at the same time
		m.cfg.Log.Warn("a registered worker reads sockets of another one: deregister one of them", "worker", name, "error", err)
	}
}
