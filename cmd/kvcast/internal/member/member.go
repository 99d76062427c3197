// Package member makes this process one of the instances of kvcast that share a stream of NATS servers.
//
// Package cluster decides which workers the instance ingests. A Member gives it what it needs: the heartbeats of the
// instances and the workers that they announce, from a KV bucket; the registered workers, from another one; the records of
// owners, from the journal. It executes the decisions: it claims a worker, recovers it, and lets ingest read it; or it
// releases or drops it.
package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cluster"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/index"
	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
)

// Config configures a Member.
type Config struct {
	// ID names this instance; another run of the process has another ID.
	ID string
	// TTL is how long an instance without a heartbeat is held for live.
	TTL time.Duration
	// Grace is how long a worker that nobody wants stays in the stream.
	Grace time.Duration
	// About is what other instances show of this one.
	About About
	// Metrics receives the metrics.
	Metrics prometheus.Registerer
	Log     *slog.Logger
}

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
	// Seq is the newest entry that the instance has applied, and Workers the number of workers that it ingests.
	Seq     uint64 `json:"seq"`
	Workers int    `json:"workers"`
	// RetainAfter is the seq after which the instance's recovery needs the entries of the workers that it had claimed when
	// it had applied the entry RetainAt.
	RetainAfter uint64 `json:"retain_after"`
	RetainAt    uint64 `json:"retain_at"`
}

// Member is one of the instances.
type Member struct {
	cfg     Config
	wake    chan struct{}
	metrics *metrics

	// The parts, set by Attach.
	journal  *jetstream.Journal
	follower *index.Follower
	ingest   *ingest.Ingest
	pipeline *pipeline.Pipeline
	kv       *jetstream.KV
	// pipelineConfig is the configuration of pipeline.
	pipelineConfig pipeline.Config
	actions        sync.WaitGroup

	mu         sync.Mutex // guards all below
	machine    *cluster.Machine
	owners     map[string]jetstream.Owner
	claims     map[string]uint64 // seqs of the claims of the workers that are ingested here
	claiming   int               // claims in progress
	local      map[string]ingestconfig.Worker
	changed    bool // local has changed since it was announced
	announced  map[string]map[string]ingestconfig.Worker
	registered map[string]ingestconfig.Worker
	wanted     map[string]bool // as the machine knows it
	instances  map[string]*instance
	waiting    map[string]chan *feed.Recovered // workers of listeners that wait for a claim
	recovered  map[string]*feed.Recovered      // of workers that are claimed and not wanted: the state that ingest continues with
	reading    map[string]ingestconfig.Worker  // those that ingest connects to, as it was told
	// deregistered are the workers whose registration was removed, until they are removed from the stream.
	deregistered map[string]bool
	lost         map[string]time.Time // when workers of listeners were dropped
	bound        map[string]bool      // workers of listeners: whether they are connected, as the machine knows it
	inStream     map[string]bool      // as the machine knows it
	// retain is what the last call of Retain has found: the seq after which this instance needs the entries, the newest one
	// that it had applied then, and the generation.
	retain struct {
		after, at  uint64
		generation int
	}
	draining   bool
	settled    chan struct{} // closed when every wanted worker had a live owner once
	isSettled  bool
	isLoaded   bool // the machine is
	hasLeft    bool // no heartbeat is written any more
	generation int  // of claims: each that begins counts
	attached   bool // the parts are set
}

// instance is another instance, or this one, as the bucket shows it.
type instance struct {
	heartbeat
	seen   time.Time
	before uint64 // the seq of the heartbeat before
}

// New returns a Member, which must be attached and run.
func New(c Config) *Member {
	m := &Member{
		cfg: c, wake: make(chan struct{}, 1), settled: make(chan struct{}),
		machine:    cluster.New(cluster.Config{ID: c.ID, Ingest: c.About.Ingest, TTL: c.TTL, Grace: c.Grace}),
		owners:     make(map[string]jetstream.Owner),
		claims:     make(map[string]uint64),
		local:      make(map[string]ingestconfig.Worker),
		announced:  make(map[string]map[string]ingestconfig.Worker),
		registered: make(map[string]ingestconfig.Worker),
		wanted:     make(map[string]bool),
		instances:  make(map[string]*instance),
		waiting:    make(map[string]chan *feed.Recovered),
		bound:      make(map[string]bool),
		recovered:  make(map[string]*feed.Recovered), deregistered: make(map[string]bool), lost: make(map[string]time.Time),
		inStream: make(map[string]bool), reading: make(map[string]ingestconfig.Worker),
	}
	m.metrics = newMetrics(m, c.Metrics)
	return m
}

// Attach gives the Member what Run needs; for Observe, the journal, the follower and the address suffice. Until then, Owned
// may be called, Claim waits, and no instances are known.
func (m *Member) Attach(j *jetstream.Journal, f *index.Follower, in *ingest.Ingest, p *pipeline.Pipeline, cfg pipeline.Config, address string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.journal, m.follower, m.ingest, m.pipeline = j, f, in, p
	m.pipelineConfig, m.cfg.About.Address, m.attached = cfg, address, true
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
	m.owners[source.Worker] = o
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
	m.machine.Lost(worker)
	m.signal()
}

// Settled returns a channel that is closed when every wanted worker has had a live owner once.
func (m *Member) Settled() <-chan struct{} { return m.settled }

// Claimed returns the seq of the claim of a worker that is ingested here; 0 for another worker.
func (m *Member) Claimed(worker string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claims[worker]
}

// Run takes part until ctx ends. It then hands over all workers, until handOver ends.
func (m *Member) Run(ctx, handOver context.Context) error {
	kv, err := m.journal.Instances(ctx)
	if err != nil {
		return err
	}
	m.kv = kv
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var loops sync.WaitGroup
	defer loops.Wait()
	defer stop()
	loops.Go(func() { m.beat(running) })
	instances, registrations := make(chan struct{}), make(chan struct{})
	loops.Go(func() { m.watch(running, kv, m.instanceChanged, sync.OnceFunc(func() { close(instances) })) })
	loops.Go(func() {
		m.watch(running, m.journal.Registrations().KV(), m.registrationChanged, sync.OnceFunc(func() { close(registrations) }))
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
		m.isLoaded = true
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
	actions, again := m.machine.Next(time.Now())
	for _, a := range actions {
		if a.Kind == cluster.Claim {
			m.claiming++
			m.generation++
		}
	}
	m.settle()
	m.mu.Unlock()
	for _, a := range actions {
		m.actions.Go(func() { m.execute(acting, a) })
	}
	return again
}

// wantWorkers tells the machine which workers instances announce or are registered.
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
	for name := range wanted {
		if !m.wanted[name] {
			m.machine.Wanted(name, true)
		}
	}
	for name := range m.wanted {
		if !wanted[name] {
			m.machine.Wanted(name, false)
		}
	}
	m.wanted = wanted
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

// settle closes settled when every wanted worker has a live owner.
func (m *Member) settle() {
	if m.isSettled || !m.isLoaded {
		return
	}
	live := make(map[string]bool)
	for _, i := range m.machine.Instances() {
		live[i.ID] = i.Live
	}
	for name, o := range m.machine.Owners() {
		if m.wanted[name] && (o.Instance == "" || !live[o.Instance] || o.Instance == m.cfg.ID && !o.Ingested) {
			return
		}
	}
	if m.machine.Isolated() || m.claiming > 0 {
		return
	}
	m.isSettled = true
	close(m.settled)
}

// look tells the machine which workers of listeners are connected, and which workers are in the stream.
func (m *Member) look() {
	all, _ := m.follower.Index().Workers(nil)
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, was := range m.bound {
		switch is := m.ingest.Connected(name); {
		case is && !was:
			m.machine.Connected(name)
			m.bound[name] = true
		case !is && was && m.waiting[name] == nil:
			m.machine.Disconnected(name)
			m.bound[name] = false
		case !is && !was && m.claims[name] == 0:
			delete(m.bound, name)
		}
	}
	maps.DeleteFunc(m.lost, func(_ string, at time.Time) bool { return time.Since(at) >= lostWait*m.cfg.TTL })
	for name, used := range m.reading {
		if w, ok := m.worker(name); ok && !reflect.DeepEqual(w, used) {
			m.cfg.Log.Info("the configuration of a worker has changed: it is read anew", "worker", name)
			m.machine.Lost(name)
			delete(m.reading, name)
		}
	}
	for id, i := range m.instances {
		if time.Since(i.seen) > jetstream.InstanceTTL { // the bucket does not say that it has removed a key
			delete(m.instances, id)
			delete(m.announced, id)
			m.machine.InstanceGone(id)
		}
	}
	now := make(map[string]bool, len(all))
	for i := range all {
		now[all[i].Name] = true
	}
	for name := range now {
		if !m.inStream[name] {
			m.machine.InStream(name, true)
		}
	}
	for name := range m.inStream {
		if !now[name] {
			m.machine.InStream(name, false)
			delete(m.deregistered, name)
		}
	}
	m.inStream = now
}

// errLost means that an engine's connection is older than the one by which another instance has got the worker.
var errLost = errors.New("another instance has taken it a moment ago, because its engine has connected there")

// lostWait is how many TTLs pass before a message of an engine makes this instance claim a worker again that another one has
// taken. What is left of a connection that has ended must not claim it, and two instances to which the same engine is
// connected must not claim it in turn all the time.
const lostWait = 2

// claimWait is how many TTLs a message of an engine waits until this instance has claimed its worker.
const claimWait = 2

// errWanted means that an engine has the name of a worker to which instances connect.
var errWanted = errors.New("a worker of this name is configured, found or registered; give the engine another name")

// Claim is ingest's config.Config.Claim.
func (m *Member) Claim(ctx context.Context, worker string) (*feed.Recovered, error) {
	m.mu.Lock()
	if m.machine.Owners()[worker].Ingested { // the grace time has removed it from the stream, or it was to be removed
		defer m.mu.Unlock()
		m.bound[worker] = true
		m.machine.Connected(worker)
		return m.takeRecovered(worker), nil
	}
	if m.wanted[worker] { // the instance to which it is assigned connects to its engine
		defer m.mu.Unlock()
		return nil, errWanted
	}
	if at, ok := m.lost[worker]; ok && time.Since(at) < lostWait*m.cfg.TTL {
		defer m.mu.Unlock()
		return nil, errLost
	}
	delete(m.lost, worker)
	claimed := make(chan *feed.Recovered, 1)
	m.waiting[worker] = claimed
	m.bound[worker] = true
	m.machine.Connected(worker)
	m.signal()
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, claimWait*m.cfg.TTL) // other engines of the listener wait, too
	defer cancel()
	select {
	case r := <-claimed:
		return r, nil
	case <-ctx.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.waiting[worker] == claimed {
			delete(m.waiting, worker)
			m.machine.Disconnected(worker)
			m.bound[worker] = false
		}
		return nil, ctx.Err()
	}
}

// drain hands over all workers, until ctx ends.
func (m *Member) drain(ctx, acting context.Context) {
	m.mu.Lock()
	m.draining = true
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
	m.hasLeft = true
	m.mu.Unlock()
	leaving, cancel := context.WithTimeout(acting, leaveTimeout)
	defer cancel()
	if err := errors.Join(m.kv.Delete(leaving, m.cfg.ID), m.kv.Delete(leaving, workersKey(m.cfg.ID))); err != nil {
		m.cfg.Log.Warn("others hold this instance for live for a while", "error", err)
	}
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
	m.local[w.Name] = w
	m.changed = true
	m.signal()
	return nil
}

// RemoveWorker removes a worker of AddWorker. It implements discovery.Workers.
func (m *Member) RemoveWorker(_ context.Context, name string, _ feed.RemoveReason) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.local[name]; !ok {
		return ingestconfig.ErrNoWorker
	}
	delete(m.local, name)
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

func workersKey(id string) string { return id + ".workers" }

// workers returns a copy of the workers that this instance announces, if they have changed or again is set.
func (m *Member) workers(again bool) (map[string]ingestconfig.Worker, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.changed && !again {
		return nil, false
	}
	m.changed = false
	return maps.Clone(m.local), true
}

// beat writes heartbeats, and announces workers, until ctx ends.
func (m *Member) beat(ctx context.Context) {
	const announceEvery = 20 * time.Second // the bucket keeps what is announced for a minute
	ticker := time.NewTicker(m.cfg.TTL / 3)
	defer ticker.Stop()
	announced := time.Time{}
	for {
		m.putHeartbeat(ctx)
		if workers, ok := m.workers(time.Since(announced) > announceEvery); ok && !m.left() {
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

func (m *Member) left() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hasLeft
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
	m.mu.Lock()
	h, hasLeft := m.heartbeat(), m.hasLeft
	m.mu.Unlock()
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
		About: m.cfg.About, Draining: m.draining, Seq: m.follower.Bounds().Newest, Workers: len(m.claims),
		RetainAfter: m.retain.after, RetainAt: m.retain.at,
	}
}

const (
	// watchRetry is the wait after a watch was interrupted.
	watchRetry = time.Second
	// leaveTimeout bounds the deletion of the instance's heartbeat.
	leaveTimeout = time.Second
)

// watch watches a bucket until ctx ends.
func (m *Member) watch(ctx context.Context, kv *jetstream.KV, changed func(jetstream.Value), loaded func()) {
	for ctx.Err() == nil {
		err := kv.Watch(ctx, changed, loaded)
		if ctx.Err() != nil {
			return
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
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.signal()
	if id, ok := strings.CutSuffix(v.Key, ".workers"); ok {
		workers := make(map[string]ingestconfig.Worker)
		if err := json.Unmarshal(v.Data, &workers); v.Data != nil && err != nil {
			m.cfg.Log.Warn("the workers of another instance cannot be read", "instance", id, "error", err)
			return
		}
		if m.announced[id] = workers; v.Data == nil {
			delete(m.announced, id)
		}
		return
	}
	if v.Data == nil {
		delete(m.instances, v.Key)
		delete(m.announced, v.Key)
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
	m.instances[v.Key] = &instance{heartbeat: h, seen: now, before: known.Seq}
	if v.Key == m.cfg.ID && m.isBehind() {
		return // what it would decide rests on outdated records
	}
	m.machine.Instance(v.Key, v.Revision, cluster.Info{Ingest: h.Ingest, Draining: h.Draining}, now)
}

// isBehind reports whether another instance had read an entry at its heartbeat before the last that this one has not read yet.
func (m *Member) isBehind() bool {
	for id, i := range m.instances {
		if id != m.cfg.ID && time.Since(i.seen) < m.cfg.TTL && i.before > m.journal.Bounds().Newest {
			return true
		}
	}
	return false
}

// replaced makes the machine hold an instance for dead that had the host and the address of a new one before.
func (m *Member) replaced(by heartbeat) {
	for id, i := range m.instances {
		if i.Host == by.Host && i.Address == by.Address && i.Started.Before(by.Started) {
			m.machine.InstanceGone(id)
		}
	}
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
	m.registered[name] = w
}

// errOwned means that another instance has claimed a worker meanwhile.
var errOwned = fmt.Errorf("%w: another instance has claimed it meanwhile", journal.ErrFenced)
