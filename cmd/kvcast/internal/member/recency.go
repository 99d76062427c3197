package member

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// recency is how recent the knowledge of an instance is. A heartbeat that the instance reads may be old: the connection was
// interrupted, or the process stood still. Therefore its age is told by the clock of the NATS servers.
type recency struct {
	// stream is a time at which the stream had no entry that the index lacks now; zero: none is known.
	stream time.Time
	// asked is when the NATS servers were last asked for their time, and told what they answered later.
	asked, told time.Time
}

// stored returns when the NATS servers had stored something at a time of theirs, by the own clock, at the earliest; zero if they
// have not told their time.
func (r *recency) stored(at time.Time) time.Time {
	if r.told.IsZero() {
		return time.Time{}
	}
	return r.asked.Add(at.Sub(r.told))
}

// confirmed returns the last time that another instance has confirmed of a worker: everything that the engine had published by that time
// is in entries that the index has. o is the instance's claim, and of its last heartbeat. ok is false if the instance has not confirmed the
// worker since the claim.
func (r *recency) confirmed(worker string, o jetstream.Owner, of *instance) (at time.Time, ok bool) {
	if of == nil || of.Seq < o.Seq || of.state(worker) == kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED {
		return time.Time{}, false
	}
	return before(earlier(r.stream, r.stored(of.stored).Add(-of.Stalled)), of.Wait), true
}

// before returns a time before t; zero if t is.
func before(t time.Time, by time.Duration) time.Time {
	if t.IsZero() {
		return t
	}
	return t.Add(-by)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// owner is who owns a worker by the stream.
type owner struct {
	jetstream.Owner
	// confirmed is when the owners before it have confirmed the worker last.
	confirmed time.Time
}

// confirmed returns when a worker was last confirmed. stalled is since when the instance's own appends are not accepted; zero:
// they are. The lock is held.
func (m *Member) confirmed(name string, o owner, stalled time.Time) time.Time {
	switch {
	case o.Instance == "" || o.IsReleased():
	case o.Instance == m.cfg.ID:
		if m.claims.seqs[name] == 0 {
			break // it is not ingested yet
		}
		at := m.recency.stream
		if !stalled.IsZero() {
			at = earlier(at, stalled)
		}
		return before(at, m.parts.PipelineConfig.Timeout)
	default:
		if at, ok := m.recency.confirmed(name, o.Owner, m.instances[o.Instance]); ok {
			return at
		}
	}
	return o.confirmed
}

// Knowledge returns how recent the knowledge of the workers is, but for the sources that this instance reads.
func (m *Member) Knowledge() server.Knowledge {
	m.mu.Lock()
	start := m.start
	m.mu.Unlock()
	if start < attached {
		return server.Knowledge{Limit: m.cfg.TTL}
	}
	stalled := m.parts.Journal.Stalled() // without the lock, which the journal's callbacks take
	m.mu.Lock()
	defer m.mu.Unlock()
	k := server.Knowledge{Limit: m.cfg.TTL, Confirmed: make(map[string]time.Time, len(m.owners)), Unowned: make(map[string]bool)}
	live := make(map[string]bool)
	for _, i := range m.machine.Instances() {
		live[i.ID] = i.Live
	}
	for name, o := range m.owners {
		k.Confirmed[name] = m.confirmed(name, o, stalled)
		if o.Instance == "" || o.IsReleased() || !live[o.Instance] {
			k.Unowned[name] = true
		}
	}
	k.Behind = m.sources(func(h *heartbeat) []sourceSince { return h.Behind })
	return k
}

// StreamConfirmed returns a time at which the stream had no entry that the index lacks now; zero: none is known.
func (m *Member) StreamConfirmed() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recency.stream
}

// confirm keeps recency up to date until ctx ends. The journal and the buckets are asked as often as heartbeats are written.
func (m *Member) confirm(ctx context.Context) {
	ticker := time.NewTicker(m.cfg.TTL / 3)
	defer ticker.Stop()
	for {
		m.confirmStream(ctx)
		m.askClock(ctx)
		if m.cfg.About.Ingest {
			m.keepRegistrations(ctx)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// served returns the newest entry that this instance or another live one is known to have read.
func (m *Member) served() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	newest := m.parts.Journal.Bounds().Newest
	for _, i := range m.machine.Instances() {
		if of := m.instances[i.ID]; of != nil && i.Live {
			newest = max(newest, of.Seq)
		}
	}
	return newest
}

// confirmStream waits until the index has all entries that the stream has. A stream that ends before an entry which was served confirms
// nothing: it has lost entries.
func (m *Member) confirmStream(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TTL)
	defer cancel()
	now, served := time.Now(), m.served()
	newest, err := m.parts.Journal.Newest(ctx)
	if err == nil && newest < served {
		err = fmt.Errorf("the stream ends at %d, and entry %d was served", newest, served)
	}
	if err == nil {
		err = m.parts.Follower.Wait(ctx, newest)
	}
	if err != nil {
		m.cfg.Log.Debug("the stream is not confirmed", "error", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recency.stream = now
	m.signal()
}

// askClock asks the NATS servers for their time. If the bucket of the instances was deleted, it creates it again.
func (m *Member) askClock(ctx context.Context) {
	m.mu.Lock()
	kv := m.kv
	m.mu.Unlock()
	if kv == nil {
		return // an instance that ingests nothing waits for the bucket
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TTL)
	defer cancel()
	now := time.Now()
	bucket, err := kv.State(ctx)
	if errors.Is(err, jetstream.ErrNoBucket) && m.cfg.About.Ingest {
		m.cfg.Log.Warn("the bucket of the instances was deleted: it is created again")
		_, err = m.parts.Journal.Instances(ctx)
		now = time.Now()
		if err == nil {
			bucket, err = kv.State(ctx)
		}
	}
	if err != nil {
		m.cfg.Log.Debug("the clock of the NATS servers is not known", "error", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recency.asked, m.recency.told = now, bucket.Now
	if m.bucket.created.IsZero() {
		m.bucket.created = bucket.Created
	}
	if !m.bucket.created.Equal(bucket.Created) {
		m.bucket.created = bucket.Created
		m.bucket.number++
		if m.bucket.rewatch != nil {
			m.bucket.rewatch()
		}
	}
	m.signal()
}

// keepRegistrations creates the bucket of the registrations again if it was deleted, with the workers that this instance knows to be registered.
func (m *Member) keepRegistrations(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TTL)
	defer cancel()
	store := m.parts.Journal.Registrations()
	bucket, err := store.KV().State(ctx)
	if errors.Is(err, jetstream.ErrNoBucket) {
		m.cfg.Log.Warn("the bucket of the registrations was deleted: it is created again, with the workers that are known")
		if err = store.Recreate(ctx); err == nil {
			bucket, err = store.KV().State(ctx)
		}
	}
	if err != nil {
		m.cfg.Log.Debug("it is not known whether there are registrations", "error", err)
		return
	}
	m.mu.Lock()
	created, workers := m.registrations.created, maps.Clone(m.catalog.registered)
	m.mu.Unlock()
	isNew := !created.IsZero() && !created.Equal(bucket.Created)
	if isNew {
		for name, w := range workers { // another instance may do the same
			if err := recovery.Restore(ctx, store, w); err != nil {
				m.cfg.Log.Warn("a registration is not stored again yet", "worker", name, "error", err)
				return
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.registrations.created = bucket.Created
	if isNew && m.registrations.rewatch != nil {
		m.registrations.rewatch()
	}
}
