package member

import (
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// claims are the workers that this instance has claimed. Member.mu guards them.
type claims struct {
	seqs       map[string]uint64 // of the claims of the workers that are ingested here
	inProgress int
	generation int // each claim that begins counts
	// reading are the workers that ingest was last asked to connect to.
	reading map[string]ingestconfig.Worker
	// recovered has the state that ingest continues with, of workers that are claimed and not wanted.
	recovered map[string]*feed.Recovered
	// retain is what the last call of Retain has found: the seq after which this instance needs the entries, the newest one
	// that it had applied then, and the generation.
	retain struct {
		after, at  uint64
		generation int
	}
}

// forget forgets a worker that is not ingested here any more.
func (c *claims) forget(worker string) {
	delete(c.seqs, worker)
	delete(c.recovered, worker)
}

// takeRecovered returns the state of ingest of a worker that is not wanted; nil if there is none. It has not been used.
func (c *claims) takeRecovered(worker string) *feed.Recovered {
	r := c.recovered[worker]
	delete(c.recovered, worker)
	return r
}

// Retain is recovery.Checkpointer's Retain: it notes the seq after which this instance's workers need the entries, and lets
// the journal remove what no instance needs, if this instance is the first of those that ingest.
func (m *Member) Retain(after uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	// Workers that were claimed since the last call, or are being claimed, or will be, may need earlier entries.
	if m.claims.inProgress == 0 && m.claims.generation == m.claims.retain.generation && m.ingestsAllOwned() {
		m.claims.retain.after, m.claims.retain.at = after, m.parts.Follower.Bounds().Newest
	}
	m.claims.retain.generation = m.claims.generation
	m.parts.Journal.Retain(m.retainAll())
}

// ingestsAllOwned reports whether the pipeline has all workers of which this instance is the owner.
func (m *Member) ingestsAllOwned() bool {
	for name, o := range m.owners {
		if o.Instance == m.cfg.ID && m.claims.seqs[name] == 0 {
			return false
		}
	}
	return true
}

// retainAll returns the seq after which some instance needs the entries; 0 if that is not known, or if it is for another
// instance to remove entries.
func (m *Member) retainAll() uint64 {
	if m.start < loaded {
		return 0
	}
	for name := range m.inStream {
		if m.owners[name].Instance == "" { // its next owner needs them
			return 0
		}
	}
	after := m.claims.retain.after
	live := make(map[string]*instance)
	for _, s := range m.machine.Instances() {
		if !s.Live || !s.Ingest || s.ID == m.cfg.ID {
			continue
		}
		i := m.instances[s.ID]
		if s.ID < m.cfg.ID || i == nil || i.RetainAt > m.parts.Journal.Bounds().Newest { // it may have claimed workers since
			return 0
		}
		live[s.ID] = i
		after = min(after, i.RetainAfter)
	}
	for _, o := range m.owners {
		at := m.claims.retain.at
		if o.Instance != m.cfg.ID {
			i := live[o.Instance]
			switch {
			case o.Instance == "":
				continue
			case i == nil:
				return 0
			}
			at = i.RetainAt
		}
		if o.Seq > at {
			return 0
		}
	}
	return after
}
