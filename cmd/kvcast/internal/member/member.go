// Package member makes this process one of the instances of kvcast that share a stream of NATS servers.
//
// Package cluster decides which workers the instance ingests. A Member gives it what it needs: the heartbeats of the instances and the
// workers that they announce, from a KV bucket; the registered workers, from another one; the records of owners, from the journal. It
// executes the decisions: it claims a worker, recovers it, and lets ingest read it; or it releases or drops it.
package member

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/cluster"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// Config configures a Member.
type Config struct {
	// ID names this instance; another run of the process has another ID.
	ID string
	// TTL is the time after its last heartbeat during which an instance is considered live.
	TTL time.Duration
	// Grace is how long a worker that nobody wants stays in the stream.
	Grace time.Duration
	// About is what other instances show of this one.
	About About
	// Metrics receives the metrics, and Incidents the workers that this instance takes, hands over and loses.
	Metrics   prometheus.Registerer
	Incidents *incident.Log
	Log       *slog.Logger
}

// Member is one of the instances.
type Member struct {
	cfg     Config
	wake    chan struct{}
	metrics *metrics

	parts   Parts // set by Attach
	kv      *jetstream.KV
	actions sync.WaitGroup
	beating sync.Mutex // held while a heartbeat is written

	settled chan struct{} // closed when every wanted worker had a live owner once that had confirmed it

	mu        sync.Mutex // guards all below
	machine   *cluster.Machine
	catalog   *catalog
	owners    map[string]owner
	recency   recency
	claims    claims
	listened  listened
	wanted    map[string]bool // as the machine knows it
	inStream  map[string]bool // as the machine knows it
	instances map[string]*instance
	// deregistered are the workers whose registration was removed, until they are removed from the stream.
	deregistered map[string]bool
	// bucket is that of the instances: when it was created, how often it was created again, and what makes its watch begin anew.
	bucket struct {
		created time.Time
		number  uint64
		rewatch func()
	}
	// registrations are the bucket of the registrations: when it was created, and what makes its watch begin anew.
	registrations struct {
		created time.Time
		rewatch func()
	}
	isolated time.Time     // since when the machine is; zero: it is not
	engines  cluster.Reach // as the machine knows it
	start    startPhase
	ending   endPhase
}

// startPhase is how far the start is.
type startPhase int

const (
	created  startPhase = iota
	attached            // the parts are set
	loaded              // the machine has the instances and the registrations
	settled             // Member.settled is closed
)

// endPhase is how far the end is.
type endPhase int

const (
	staying  endPhase = iota
	draining          // workers are handed over
	left              // no heartbeat is written any more
)

// New returns a Member, which must be attached and run.
func New(c Config) *Member {
	m := &Member{
		cfg: c, wake: make(chan struct{}, 1), catalog: newCatalog(), settled: make(chan struct{}),
		machine:      cluster.New(cluster.Config{ID: c.ID, Ingest: c.About.Ingest, TTL: c.TTL, Grace: c.Grace}),
		claims:       claims{seqs: make(map[string]uint64), recovered: make(map[string]*feed.Recovered), reading: make(map[string]ingestconfig.Worker)},
		listened:     listened{waiting: make(map[string]chan *feed.Recovered), connected: make(map[string]bool), lost: make(map[string]time.Time)},
		owners:       make(map[string]owner),
		wanted:       make(map[string]bool),
		inStream:     make(map[string]bool),
		instances:    make(map[string]*instance),
		deregistered: make(map[string]bool),
	}
	m.metrics = newMetrics(m, c.Metrics)
	return m
}

// Parts are what a Member runs with. One that ingests nothing needs the journal, the follower and the address.
type Parts struct {
	Journal  *jetstream.Journal
	Follower *follow.Follower
	Ingest   *ingest.Ingest
	Pipeline *pipeline.Pipeline
	// PipelineConfig is the configuration of Pipeline.
	PipelineConfig pipeline.Config
	// States returns the states of the workers with some sources of Ingest.
	States func([]ingest.SourceStatus) map[string]kvcastv1.WorkerState
	// Overpredicted returns the dp ranks that this instance calls OVERPREDICTED; nil: none.
	Overpredicted func() []server.RankSince
	// Address is that of the gRPC port.
	Address string
}

// Attach gives the Member what Run and Observe need. Until then, Owned may be called, Claim waits, and no instances are known.
func (m *Member) Attach(p Parts) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.parts, m.cfg.About.Address, m.start = p, p.Address, attached
}

// signal makes Run decide again.
func (m *Member) signal() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Owned is jetstream.Config.Owned.
func (m *Member) Owned(source journal.Source, o jetstream.Owner) {
	m.mu.Lock()
	defer m.mu.Unlock()
	confirmed := m.recency.stream // there was nothing to confirm
	if before, ok := m.owners[source.Worker]; ok {
		confirmed = m.confirmed(source.Worker, before, time.Time{})
	}
	m.owners[source.Worker] = owner{o, confirmed}
	if now := time.Now(); o.IsReleased() {
		m.machine.ReleaseRead(source.Worker, o.Seq, o.Instance, now)
	} else {
		m.machine.ClaimRead(source.Worker, o.Seq, o.Instance, now)
	}
	m.signal()
}

// Fenced is pipeline.Config.Fenced.
func (m *Member) Fenced(worker string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.metrics.fenced.Inc()
	m.cfg.Incidents.Add(&kvcastv1.Incident{
		Kind: kvcastv1.IncidentKind_INCIDENT_KIND_FENCED, Worker: worker, InstanceId: m.owners[worker].Instance,
	})
	m.machine.Lost(worker)
	m.signal()
}

// Settled returns a channel that is closed when every wanted worker has had a live owner once that has confirmed it.
func (m *Member) Settled() <-chan struct{} { return m.settled }

// Claimed returns the seq of the claim of a worker that is ingested here; 0 for another worker.
func (m *Member) Claimed(worker string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claims.seqs[worker]
}

// IsolatedSince returns since when this instance cannot read back its heartbeats; the zero time if it can.
func (m *Member) IsolatedSince() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.isolated
}

// OthersIngest reports whether another instance that reads engines lives. While this one is isolated, it is what it knew before.
func (m *Member) OthersIngest() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.machine.Instances(), func(i cluster.InstanceStatus) bool {
		return i.ID != m.cfg.ID && i.Live && i.Ingest && !i.Draining
	})
}

// Run takes part until ctx ends. It then hands over all workers, until handOver ends.
func (m *Member) Run(ctx, handOver context.Context) error {
	kv, err := m.parts.Journal.Instances(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.kv = kv
	m.mu.Unlock()
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var loops sync.WaitGroup
	defer loops.Wait()
	defer stop()
	loops.Go(func() { m.beat(running) })
	loops.Go(func() { m.watchEngines(running) })
	loops.Go(func() { m.confirm(running) })
	instances, registrations := make(chan struct{}), make(chan struct{})
	loops.Go(func() {
		m.watch(running, kv, &m.bucket.rewatch, m.instanceChanged, sync.OnceFunc(func() { close(instances) }))
	})
	loops.Go(func() {
		m.watch(running, m.parts.Journal.Registrations().KV(), &m.registrations.rewatch, m.registrationChanged,
			sync.OnceFunc(func() { close(registrations) }))
	})
	loops.Go(func() {
		for _, loaded := range []chan struct{}{instances, registrations} {
			select {
			case <-loaded:
			case <-running.Done():
				return
			}
		}
		m.look() // before workers can be removed
		m.mu.Lock()
		defer m.mu.Unlock()
		m.start = loaded
		m.machine.Loaded(time.Now())
		m.signal()
	})
	acting, stopActing := context.WithCancel(running)
	defer m.actions.Wait()
	defer stopActing()
	m.decide(ctx, acting)
	m.drain(handOver, acting)
	return nil
}

// decideInterval is how often connections and workers in the stream are looked at.
const decideInterval = time.Second

// decide executes what the machine decides, until ctx ends.
func (m *Member) decide(ctx, acting context.Context) {
	poll := time.NewTicker(decideInterval)
	defer poll.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
			m.look()
		case <-m.wake:
		case <-timer.C:
		}
		if again := m.turn(acting); !again.IsZero() {
			timer.Reset(time.Until(again))
		}
	}
}

// turn begins the actions of the machine, and returns when it has to decide again.
func (m *Member) turn(acting context.Context) time.Time {
	m.mu.Lock()
	m.wantWorkers()
	now := time.Now()
	actions, again := m.machine.Next(now)
	if !m.machine.Isolated() {
		m.isolated = time.Time{}
	} else if m.isolated.IsZero() {
		m.isolated = now
	}
	for _, a := range actions {
		if a.Kind == cluster.Claim {
			m.claims.inProgress++
			m.claims.generation++
		}
	}
	m.settle()
	m.mu.Unlock()
	for _, a := range actions {
		m.actions.Go(func() { m.execute(acting, a) })
	}
	return again
}

// settle closes settled when every wanted worker has a live owner that has confirmed it.
func (m *Member) settle() {
	if m.start != loaded {
		return
	}
	live := make(map[string]bool)
	for _, i := range m.machine.Instances() {
		live[i.ID] = i.Live
	}
	for name := range m.wanted {
		o := m.owners[name]
		if o.Instance == "" || !live[o.Instance] || o.Instance == m.cfg.ID && !m.machine.Ingested(name) ||
			m.confirmed(name, o, time.Time{}).IsZero() {
			return
		}
	}
	if m.machine.Isolated() || m.claims.inProgress > 0 {
		return
	}
	m.start = settled
	close(m.settled)
}

// look notifies the machine which workers of listeners are connected, and which workers are in the stream.
func (m *Member) look() {
	all, _ := m.parts.Follower.Index().Workers(nil)
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, was := range m.listened.connected {
		switch is := m.parts.Ingest.Connected(name); {
		case is && !was:
			m.machine.Connected(name)
			m.listened.connected[name] = true
		case !is && was && m.listened.waiting[name] == nil:
			m.machine.Disconnected(name)
			m.listened.connected[name] = false
		case !is && !was && m.claims.seqs[name] == 0:
			delete(m.listened.connected, name)
		}
	}
	m.listened.forgetLost(m.cfg.TTL)
	for name, used := range m.claims.reading {
		if w, ok := m.worker(name); ok && !reflect.DeepEqual(w, used) {
			m.cfg.Log.Info("the configuration of a worker has changed: it is read anew", "worker", name)
			m.machine.Lost(name)
			delete(m.claims.reading, name)
		}
	}
	for id, i := range m.instances {
		if time.Since(i.seen) > jetstream.InstanceTTL { // the bucket does not say that it has removed a key
			delete(m.instances, id)
			m.catalog.announce(id, nil)
			m.machine.InstanceGone(id)
		}
	}
	now := make(map[string]bool, len(all))
	for i := range all {
		now[all[i].Name] = true
	}
	reportChanges(m.inStream, now, m.machine.InStream)
	m.inStream = now
	maps.DeleteFunc(m.deregistered, func(name string, _ bool) bool { return !now[name] && m.owners[name].Instance == "" })
}

// drain hands over all workers, until ctx ends.
func (m *Member) drain(ctx, acting context.Context) {
	m.mu.Lock()
	m.ending = draining
	m.machine.Drain()
	m.mu.Unlock()
	m.putHeartbeat(acting)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		again := m.turn(acting)
		m.mu.Lock()
		drained := m.machine.Drained()
		m.mu.Unlock()
		if drained {
			break
		}
		if !again.IsZero() {
			timer.Reset(time.Until(again))
		}
		select {
		case <-m.wake:
			continue
		case <-timer.C:
			continue
		case <-ctx.Done():
		}
		m.cfg.Log.Warn("not all workers are handed over: other instances take them when they hold this one for dead")
		break
	}
	m.mu.Lock()
	m.ending = left
	m.mu.Unlock()
	leaving, cancel := context.WithTimeout(acting, leaveTimeout)
	defer cancel()
	if err := errors.Join(m.kv.Delete(leaving, m.cfg.ID), m.kv.Delete(leaving, workersKey(m.cfg.ID))); err != nil {
		m.cfg.Log.Warn("others hold this instance for live for a while", "error", err)
	}
}

// errOwned means that another instance has claimed a worker meanwhile.
var errOwned = fmt.Errorf("%w: another instance has claimed it meanwhile", journal.ErrFenced)
