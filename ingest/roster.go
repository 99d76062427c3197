package ingest

import "sync"

// roster is the names of all workers of an Ingest, whichever goroutine reads
// them.
type roster struct {
	max int

	mu    sync.Mutex // guards names
	names map[string]struct{}
}

// claim takes a name; why tells why that can not be.
func (r *roster) claim(name string) (why refusal, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.names[name]; taken {
		return refusedTaken, false
	}
	if len(r.names) >= r.max {
		return refusedWorkers, false
	}
	r.names[name] = struct{}{}
	return 0, true
}

// reserve takes a name of the configuration, which Validate has found free.
func (r *roster) reserve(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[name] = struct{}{}
}

// release gives a name back.
func (r *roster) release(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
}
