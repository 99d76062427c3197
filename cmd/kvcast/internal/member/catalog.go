package member

import (
	"maps"
	"slices"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// catalog has the workers that are to be read: those that this instance has found, those that are registered, and those that other
// instances announce. Member.mu guards it.
type catalog struct {
	local      map[string]ingestconfig.Worker
	changed    bool // local has changed since it was announced
	announced  map[string]map[string]ingestconfig.Worker
	registered map[string]ingestconfig.Worker
	// localSockets and registeredSockets are the sockets that the workers of local and of registered read.
	localSockets, registeredSockets ingestconfig.SocketSet
}

func newCatalog() *catalog {
	return &catalog{
		local:      make(map[string]ingestconfig.Worker),
		announced:  make(map[string]map[string]ingestconfig.Worker),
		registered: make(map[string]ingestconfig.Worker),
	}
}

// names returns the names of all, without what instances announce that do not count.
func (c *catalog) names(announces func(id string) bool) map[string]bool {
	all := make(map[string]bool)
	for name := range c.local {
		all[name] = true
	}
	for id, workers := range c.announced {
		if !announces(id) {
			continue
		}
		for name := range workers {
			all[name] = true
		}
	}
	for name := range c.registered {
		all[name] = true
	}
	return all
}

// worker returns how to connect to the engines of a worker: as this instance has found, as it is registered, or as the first
// of the other instances announces.
func (c *catalog) worker(name string, announces func(id string) bool) (w ingestconfig.Worker, ok bool) {
	if w, ok = c.local[name]; ok {
		return w, true
	}
	if w, ok = c.registered[name]; ok {
		return w, true
	}
	for _, id := range slices.Sorted(maps.Keys(c.announced)) {
		if w, ok = c.announced[id][name]; ok && announces(id) {
			return w, true
		}
	}
	return w, false
}

// add adds a worker that this instance has found.
func (c *catalog) add(w ingestconfig.Worker) error {
	if _, ok := c.local[w.Name]; ok || c.registered[w.Name].Name != "" {
		return ingestconfig.ErrWorkerExists
	}
	if err := c.registeredSockets.Check(w); err != nil {
		return err
	}
	if err := c.localSockets.Add(w); err != nil {
		return err
	}
	c.local[w.Name] = w
	c.changed = true
	return nil
}

// remove removes a worker of add.
func (c *catalog) remove(name string) error {
	if _, ok := c.local[name]; !ok {
		return ingestconfig.ErrNoWorker
	}
	delete(c.local, name)
	c.localSockets.Remove(name)
	c.changed = true
	return nil
}

// toAnnounce returns a copy of the workers that this instance has found. ok is false if they have not changed since the last
// call, unless again is set.
func (c *catalog) toAnnounce(again bool) (_ map[string]ingestconfig.Worker, ok bool) {
	if !c.changed && !again {
		return nil, false
	}
	c.changed = false
	return maps.Clone(c.local), true
}

// announce replaces the workers that another instance has announced. If they are nil, it has none any more.
func (c *catalog) announce(id string, workers map[string]ingestconfig.Worker) {
	if c.announced[id] = workers; workers == nil {
		delete(c.announced, id)
	}
}

func (c *catalog) checkSockets(w ingestconfig.Worker) error {
	if err := c.localSockets.Check(w); err != nil {
		return err
	}
	return c.registeredSockets.Check(w)
}

func (c *catalog) isRegistered(name string) bool {
	_, ok := c.registered[name]
	return ok
}

// freeSockets forgets the sockets of a registered worker whose registration cannot be read any more.
func (c *catalog) freeSockets(name string) {
	c.registeredSockets.Remove(name)
}

// deregister removes a registered worker, and register adds or replaces one. An error says that it reads sockets of another one.
func (c *catalog) deregister(name string) {
	delete(c.registered, name)
	c.registeredSockets.Remove(name)
}

func (c *catalog) register(w ingestconfig.Worker) error {
	c.registered[w.Name] = w
	c.registeredSockets.Remove(w.Name)
	return c.registeredSockets.Add(w)
}
