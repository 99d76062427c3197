package member

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/cluster"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// About describes an instance.
type About struct {
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Address string    `json:"address"` // of the gRPC port
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Ingest  bool      `json:"ingest"`
}

// heartbeat is what an instance writes in each third of the TTL, under its id.
type heartbeat struct {
	About
	Draining bool `json:"draining,omitempty"`
	// Engines is "reached", "unreached", or empty if that is not known.
	Engines engines `json:"engines,omitempty"`
	// Seq is the newest entry that the instance has applied.
	Seq uint64 `json:"seq"`
	// RetainAfter is the seq after which the instance's recovery needs the entries of the workers that it had claimed when
	// it had applied the entry RetainAt.
	RetainAfter uint64 `json:"retain_after"`
	RetainAt    uint64 `json:"retain_at"`
	// Down are the dp ranks without a connection to a source; if there are more than maxDown, those without one for longest.
	Down []sourceSince `json:"down,omitempty"`
	// Behind are the dp ranks of which published batches are being replayed, bounded as Down. If there are more, Stalled has the time
	// of the one that comes next.
	Behind []sourceSince `json:"behind,omitempty"`
	// Over are the dp ranks that the instance calls OVERPREDICTED, at most maxDown.
	Over []sourceSince `json:"over,omitempty"`
	// Stalled is how long the stream has not accepted what the instance appends.
	Stalled time.Duration `json:"stalled_nano,omitempty"`
	// Wait is how long events may wait for others before the instance appends them.
	Wait time.Duration `json:"wait_nano,omitempty"`
	// States has the workers that the instance owned at Seq and that are not live, at most maxStates. OthersLive reports whether its other
	// workers are live. Otherwise, their states are unknown: there are too many, or the heartbeat is of a version without states.
	States     map[string]kvcastv1.WorkerState `json:"states,omitempty"`
	OthersLive bool                            `json:"others_live,omitempty"`
}

// Bounds of a heartbeat: NATS servers accept 1 MiB by default.
const (
	maxDown   = 500
	maxStates = 500
)

// setStates sets States and OthersLive to the states of owned workers.
func (h *heartbeat) setStates(owned []string, states map[string]kvcastv1.WorkerState) {
	h.States, h.OthersLive = make(map[string]kvcastv1.WorkerState), true
	for _, name := range owned {
		state := states[name]
		if state == kvcastv1.WorkerState_WORKER_STATE_LIVE {
			continue
		}
		if len(h.States) == maxStates {
			h.OthersLive = false
			return
		}
		h.States[name] = state
	}
}

// state returns the state of a worker that the instance owns.
func (h *heartbeat) state(worker string) kvcastv1.WorkerState {
	if state, ok := h.States[worker]; ok || !h.OthersLive {
		return state
	}
	return kvcastv1.WorkerState_WORKER_STATE_LIVE
}

// sourceSince is a dp rank whose source had been in a state for a time when the heartbeat was made.
type sourceSince struct {
	Worker string        `json:"worker"`
	Rank   uint32        `json:"dp_rank,omitempty"`
	For    time.Duration `json:"for_nano"`
}

// longest returns the ranks that have been in a state, which began at since, for longest, at most maxDown, and for how long the next
// one has been.
func longest(sources []ingest.SourceStatus, since func(*ingest.SourceStatus) time.Time, now time.Time) (all []sourceSince, next time.Duration) {
	for i := range sources {
		s := &sources[i]
		at := since(s)
		if at.IsZero() {
			continue
		}
		for _, rank := range s.Ranks() {
			all = append(all, sourceSince{s.Worker, rank, max(now.Sub(at), 1)})
		}
	}
	slices.SortStableFunc(all, func(a, b sourceSince) int { return cmp.Compare(b.For, a.For) })
	if len(all) <= maxDown {
		return all, 0
	}
	return all[:maxDown], all[maxDown].For
}

func downSince(s *ingest.SourceStatus) time.Time { return s.DownSince }

func behindSince(s *ingest.SourceStatus) time.Time { return s.BehindSince }

// engines is a cluster.Reach in a heartbeat.
type engines cluster.Reach

var engineTexts = [...]string{cluster.ReachUnknown: "", cluster.ReachSome: "reached", cluster.ReachNone: "unreached"}

func (e engines) MarshalText() ([]byte, error) { return []byte(engineTexts[e]), nil }

// UnmarshalText implements encoding.TextUnmarshaler. What another version has written may be unknown.
func (e *engines) UnmarshalText(b []byte) error {
	*e = engines(max(0, slices.Index(engineTexts[:], string(b))))
	return nil
}

// instance is another instance, or this one, as the bucket shows it.
type instance struct {
	heartbeat
	seen   time.Time
	stored time.Time // by the clock of the NATS servers
	before uint64    // the seq of the heartbeat before
	behind uint64    // number of entries that this instance had read when the heartbeat was seen, and that one had not applied
}

// Heartbeats are those of the instances that ingest.
type Heartbeats struct{ KV *jetstream.KV }

// Revisions returns the revision of the newest heartbeat of each instance that ingests.
func (b Heartbeats) Revisions(ctx context.Context) (map[string]uint64, error) {
	values, err := b.KV.Values(ctx)
	all := make(map[string]uint64)
	for _, v := range values {
		var h heartbeat
		if jetstream.IsInstance(v.Key) && json.Unmarshal(v.Data, &h) == nil && h.Ingest {
			all[v.Key] = v.Revision
		}
	}
	return all, err
}

func workersKey(id string) string { return id + ".workers" }

// beat writes heartbeats, and announces workers, until ctx ends.
func (m *Member) beat(ctx context.Context) {
	const announceEvery = 20 * time.Second // the bucket keeps what is announced for a minute
	ticker := time.NewTicker(m.cfg.TTL / 3)
	defer ticker.Stop()
	announced := time.Time{}
	for {
		m.putHeartbeat(ctx)
		m.mu.Lock()
		workers, ok := m.catalog.toAnnounce(time.Since(announced) > announceEvery)
		ok = ok && m.ending != left
		m.mu.Unlock()
		if ok {
			if err := m.announce(ctx, workers); err != nil {
				m.cfg.Log.Warn("other instances do not get to know the workers that this one has found", "error", err)
				announced = time.Time{}
			} else {
				announced = time.Now()
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Member) announce(ctx context.Context, workers map[string]ingestconfig.Worker) error {
	b, err := json.Marshal(workers)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TTL)
	defer cancel()
	return m.kv.Put(ctx, workersKey(m.cfg.ID), b)
}

// putHeartbeat writes a heartbeat.
func (m *Member) putHeartbeat(ctx context.Context) {
	if err := m.tryHeartbeat(ctx); err != nil {
		m.cfg.Log.Debug("no heartbeat", "error", err)
	}
}

func (m *Member) tryHeartbeat(ctx context.Context) error {
	m.beating.Lock() // so that the newest is stored last
	defer m.beating.Unlock()
	var down, behind []sourceSince
	var stalled time.Duration
	var states map[string]kvcastv1.WorkerState
	if m.parts.Ingest != nil {
		sources := m.parts.Ingest.Sources()
		now := time.Now()
		down, _ = longest(sources, downSince, now)
		behind, stalled = longest(sources, behindSince, now)
		if since := m.parts.Journal.Stalled(); !since.IsZero() {
			stalled = max(stalled, now.Sub(since))
		}
		states = m.parts.States(sources)
	}
	m.mu.Lock()
	h, hasLeft, owned := m.heartbeat(), m.ending == left, m.owned()
	m.mu.Unlock()
	h.Down, h.Behind, h.Stalled = down, behind, stalled
	if m.parts.Overpredicted != nil {
		for _, s := range m.parts.Overpredicted() {
			h.Over = append(h.Over, sourceSince(s))
		}
		h.Over = h.Over[:min(len(h.Over), maxDown)]
	}
	h.setStates(owned, states)
	if hasLeft {
		return nil
	}
	b, err := json.Marshal(h)
	if err != nil {
		panic("heartbeat cannot be encoded: " + err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.TTL/3)
	defer cancel()
	return m.kv.Put(ctx, m.cfg.ID, b)
}

func (m *Member) heartbeat() heartbeat {
	return heartbeat{
		About: m.cfg.About, Draining: m.ending != staying, Engines: engines(m.engines), Seq: m.parts.Follower.Bounds().Newest,
		RetainAfter: m.claims.retain.after, RetainAt: m.claims.retain.at, Wait: m.parts.PipelineConfig.Timeout,
	}
}

const (
	// bucketShift is where the number of the bucket begins in a revision, so that revisions grow when the bucket is created again.
	bucketShift = 48
	// watchRetry is the wait after a watch was interrupted.
	watchRetry = time.Second
	// leaveTimeout bounds the deletion of the instance's heartbeat.
	leaveTimeout = time.Second
)

// watch watches a bucket until ctx ends. It sets rewatch, which m.mu guards, to what makes it begin anew.
func (m *Member) watch(ctx context.Context, kv *jetstream.KV, rewatch *func(), changed func(jetstream.Value), loaded func()) {
	for ctx.Err() == nil {
		watching, stop := context.WithCancel(ctx)
		m.mu.Lock()
		*rewatch = stop
		m.mu.Unlock()
		err := kv.Watch(watching, changed, loaded)
		again := watching.Err() != nil
		stop()
		if ctx.Err() != nil {
			return
		}
		if again {
			continue
		}
		m.cfg.Log.Warn("watching is interrupted", "error", err)
		select {
		case <-time.After(watchRetry):
		case <-ctx.Done():
		}
	}
}

// instanceChanged handles a value of the bucket of the instances.
func (m *Member) instanceChanged(v jetstream.Value) {
	if !jetstream.IsInstance(v.Key) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.signal()
	if id, ok := strings.CutSuffix(v.Key, ".workers"); ok {
		var workers map[string]ingestconfig.Worker
		if err := json.Unmarshal(v.Data, &workers); v.Data != nil && err != nil {
			m.cfg.Log.Warn("the workers of another instance cannot be read", "instance", id, "error", err)
			return
		}
		m.catalog.announce(id, workers)
		return
	}
	if v.Data == nil {
		delete(m.instances, v.Key)
		m.catalog.announce(v.Key, nil)
		m.machine.InstanceGone(v.Key)
		return
	}
	var h heartbeat
	if err := json.Unmarshal(v.Data, &h); err != nil {
		m.cfg.Log.Warn("the heartbeat of another instance cannot be read", "instance", v.Key, "error", err)
		return
	}
	now := time.Now()
	known := m.instances[v.Key]
	if known == nil {
		m.replaced(h)
		known = new(instance)
	}
	newest := m.parts.Journal.Bounds().Newest
	m.instances[v.Key] = &instance{heartbeat: h, seen: now, stored: v.Stored, before: known.Seq, behind: newest - min(newest, h.Seq)}
	if v.Key == m.cfg.ID && m.isBehind() {
		return // what it would decide rests on outdated records
	}
	m.machine.Instance(v.Key, m.bucket.number<<bucketShift+v.Revision, cluster.Info{Ingest: h.Ingest, Draining: h.Draining, Engines: cluster.Reach(h.Engines)}, now)
}

// isBehind reports whether another instance had read an entry at its heartbeat before the last that this one has not read yet.
func (m *Member) isBehind() bool {
	for id, i := range m.instances {
		if id != m.cfg.ID && time.Since(i.seen) < m.cfg.TTL && i.before > m.parts.Journal.Bounds().Newest {
			return true
		}
	}
	return false
}

// replaced makes the machine consider an instance dead that had the host and the address of a new one before.
func (m *Member) replaced(by heartbeat) {
	for id, i := range m.instances {
		if i.Host == by.Host && i.Address == by.Address && i.Started.Before(by.Started) {
			m.machine.InstanceGone(id)
		}
	}
}
