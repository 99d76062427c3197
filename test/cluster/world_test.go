package cluster_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

const (
	memberCount = 3
	workerCount = 8
	routerCount = 20
	// batchRate is the rate of each engine, in batches a second.
	batchRate = 10
	// takeOverLimit bounds the time from a fault until all workers are taken over and have a new entry. Measured with the race
	// detector on two cores that other programs use too, with the TTL of 3 s: 2.2 s to 3.7 s after most kills, pauses and
	// partitions of one server or two, 4 s to 8 s if all are killed, 0.1 s to 12 s after a fault of a NATS server, since NATS
	// elects a leader after 4 s to 9 s, and 0.2 s after a planned shutdown, but 7 s when NATS servers had just started. With a
	// load of 15: up to 28 s.
	takeOverLimit = harness.Timeout
	// idleTimeout is after how long routers leave a server that says nothing.
	idleTimeout = 5 * time.Second
)

// world is servers that share a stream, their engines, and routers that know all servers.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	engines *fleet.Fleet
	nats    *natstest.Cluster
	js      jetstream.JetStream
	owners  *owners
	members []*member
	routers []*fleet.Router
	// fault is the name of the current fault.
	fault string
	// took has for each fault how long it took until workers were taken over.
	took map[string][]time.Duration
	// registered is the engine of the worker that is registered, which all servers reach through the proxies registeredAt.
	registered   fleet.Engine
	registeredAt []*harness.Proxy
}

// member is one of the servers. It reaches engines and NATS servers through proxies.
type member struct {
	*fleet.Server
	name    string
	id      string // of the current run
	runs    []*harness.Process
	engines []*harness.Proxy
	nats    []*harness.Proxy
	router  *fleet.Router // knows this server alone
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		t: t, rng: rand.New(rand.NewPCG(*seed, 1)), engines: fleet.New(t, *seed), nats: natstest.StartCluster(t),
	}
	w.js = w.nats.JetStream()
	w.engines.Rate = batchRate
	var all []fleet.Engine
	for i := range workerCount {
		all = append(all, w.engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()))
	}
	w.registered = all[0]
	for i := range memberCount {
		w.members = append(w.members, w.newMember(fmt.Sprintf("server-%d", i), all[1:]))
	}
	t.Cleanup(w.writeLogs)
	for _, m := range w.members {
		m.run(t)
	}
	for _, m := range w.members {
		w.serve(m)
	}
	w.register()
	return w
}

// follow follows the stream, by routers that know all servers and one for each server.
func (w *world) follow() {
	w.t.Helper()
	w.owners = readOwners(w.t, w.js)
	w.routers = nil
	config := fleet.RouterConfig{Lossless: *lossless, IdleTimeout: idleTimeout}
	for i := range routerCount {
		var addresses []string
		for k := range w.members {
			addresses = append(addresses, w.members[(i+k)%memberCount].Proxy.Addr())
		}
		w.routers = append(w.routers, fleet.Follow(w.t, strings.Join(addresses, ","), config))
	}
	for _, m := range w.members {
		m.router = fleet.Follow(w.t, m.Proxy.Addr(), config)
		m.router.Tell(w.engines.Truth)
		w.engines.Ask(m.Proxy.Addr())
	}
}

func (w *world) newMember(name string, engines []fleet.Engine) *member {
	w.t.Helper()
	m := &member{name: name}
	var servers []string
	for _, u := range strings.Split(w.nats.URLs(), ",") {
		servers = append(servers, w.proxied(&m.nats, u))
	}
	args := []string{
		"--journal", strings.Join(servers, ","), "--journal-replicas", "3", "--journal-max-bytes", *maxBytes,
		"--journal-checkpoint-bytes", "64KiB", "--subscribers-progress", "1s",
	}
	for _, e := range engines {
		args = append(args, "--worker", e.FlagAt(w.proxied(&m.engines, e.Endpoint()), w.proxied(&m.engines, e.ReplayEndpoint())))
	}
	m.Server = fleet.NewServer(w.t, args...)
	return m
}

// proxied returns the address of a new proxy of an address, as a URL.
func (w *world) proxied(proxies *[]*harness.Proxy, address string) string {
	w.t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		w.t.Fatal(err)
	}
	p := harness.NewProxy(w.t, u.Host)
	*proxies = append(*proxies, p)
	u.Host = p.Addr()
	return u.String()
}

// register registers a worker with one of the members.
func (w *world) register() {
	w.t.Helper()
	e := w.registered
	conn := harness.Dial(w.t, w.members[w.rng.IntN(memberCount)].Proxy.Addr())
	_, err := kvcastv1.NewWorkerServiceClient(conn).RegisterWorker(harness.Context(w.t), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
		Name: e.Worker, Model: fleet.Model, Sources: []*kvcastv1.SourceSpec{{
			Connect: w.proxied(&w.registeredAt, e.Endpoint()), Replay: w.proxied(&w.registeredAt, e.ReplayEndpoint()),
		}},
	}})
	if err != nil {
		w.t.Fatal(err)
	}
}

// run starts the next run of a member.
func (m *member) run(t *testing.T) {
	t.Helper()
	m.Launch(t)
	m.id = ""
	m.runs = append(m.runs, m.Process)
}

// serve waits until a member serves, and finds out its id.
func (w *world) serve(m *member) {
	w.t.Helper()
	m.Serve(w.t)
	harness.WaitFor(w.t, func() bool {
		ids, err := instances(w.t.Context(), w.js)
		if err != nil {
			w.t.Fatal(err)
		}
		m.id = ids[m.Process.PID()]
		return m.id != ""
	})
}

// restart starts members whose processes have ended.
func (w *world) restart(members ...*member) {
	w.t.Helper()
	for _, m := range members {
		m.run(w.t)
	}
	for _, m := range members {
		w.serve(m)
	}
}

// victim returns a member at random that owns workers.
func (w *world) victim() *member {
	w.t.Helper()
	var victim *member
	order := w.rng.Perm(memberCount)
	w.await("no server owns a worker", func(map[string]worker) bool {
		i := slices.IndexFunc(order, func(i int) bool { return len(w.ownedBy(w.members[i].id)) > 0 })
		if i >= 0 {
			victim = w.members[order[i]]
		}
		return i >= 0
	})
	return victim
}

// ownedBy returns the names of the workers that instances have claimed.
func (w *world) ownedBy(instances ...string) (names []string) {
	all, _ := w.owners.all()
	for name, is := range all {
		if slices.Contains(instances, is.owner) && !is.released {
			names = append(names, name)
		}
	}
	return names
}

// await waits until a condition of the workers is true.
func (w *world) await(unmet string, condition func(map[string]worker) bool) {
	w.t.Helper()
	err := w.owners.until(w.t.Context(), harness.Timeout, func(all map[string]worker) error {
		if condition(all) {
			return nil
		}
		return fmt.Errorf("%s: %+v", unmet, all)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// entries waits for some entries.
func (w *world) entries() {
	w.t.Helper()
	_, last := w.owners.all()
	next := last + 1 + w.rng.Uint64N(maxEntries)
	if err := w.routers[w.rng.IntN(len(w.routers))].Await(w.t.Context(), next); err != nil {
		w.t.Fatal(err)
	}
}

// progress waits until each of some workers has an entry with events that is not there yet.
func (w *world) progress(workers ...string) {
	w.t.Helper()
	_, last := w.owners.all()
	began := time.Now()
	err := w.owners.until(w.t.Context(), takeOverLimit, func(all map[string]worker) error {
		for _, name := range workers {
			if all[name].event <= last {
				return fmt.Errorf("%s has no entry after %d: %+v", name, last, all)
			}
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("  %d workers have new entries after %v", len(workers), time.Since(began).Round(time.Millisecond))
}

// allWorkers returns the names of the workers.
func (w *world) allWorkers() []string {
	var names []string
	for i := range workerCount {
		names = append(names, fmt.Sprintf("engine-%d", i))
	}
	return names
}

// takenOver waits until instances other than former have claimed workers after an entry, and have appended to them.
func (w *world) takenOver(began time.Time, after uint64, workers []string, former ...string) {
	w.t.Helper()
	err := w.owners.until(w.t.Context(), takeOverLimit, func(all map[string]worker) error {
		for _, name := range workers {
			is := all[name]
			if slices.Contains(former, is.owner) || is.claimed <= after || is.event <= is.claimed {
				return fmt.Errorf("%s is not taken over since entry %d: %+v", name, after, all)
			}
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	took := time.Since(began).Round(time.Millisecond)
	w.t.Logf("  %d workers were taken over within %v", len(workers), took)
	if w.took == nil {
		w.took = make(map[string][]time.Duration)
	}
	w.took[w.fault] = append(w.took[w.fault], took)
}

// writeTimes writes how long workers had no entries after each fault to bin/test/takeover.md, and logs it.
func (w *world) writeTimes() {
	w.t.Helper()
	text := "| fault | times | p50 | max |\n|---|---|---|---|\n"
	for _, fault := range slices.Sorted(maps.Keys(w.took)) {
		all := slices.Sorted(slices.Values(w.took[fault]))
		text += fmt.Sprintf("| %s | %d | %.1f s | %.1f s |\n", fault, len(all), all[len(all)/2].Seconds(), all[len(all)-1].Seconds())
	}
	w.t.Logf("from a fault until all workers of the server have new entries:\n%s", text)
	if err := os.WriteFile(filepath.Join("../../bin/test", "takeover.md"), []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// catchUp waits until the router of a member has all entries that there are now.
func (w *world) catchUp(m *member) {
	w.t.Helper()
	_, last := w.owners.all()
	began := time.Now()
	if err := m.router.Await(w.t.Context(), last); err != nil {
		w.t.Fatalf("the router of %s: %v", m.name, err)
	}
	w.t.Logf("  %s has caught up after %v", m.name, time.Since(began).Round(time.Millisecond))
}

// check compares the views of all routers with the engines, and checks the stream and the logs.
func (w *world) check() {
	w.t.Helper()
	began := time.Now()
	routers := slices.Clone(w.routers)
	for _, m := range w.members {
		routers = append(routers, m.router)
	}
	w.engines.WantViews(routers...)
	w.owners.mu.Lock()
	last, records, batches, err := w.owners.last, w.owners.records, w.owners.batches, w.owners.err
	w.owners.mu.Unlock()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range w.members {
		for i, p := range m.runs {
			if lines := p.LogFaults(); len(lines) > 0 {
				w.t.Errorf("run %d of %s logged: %q", i, m.name, lines)
			}
		}
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
	gaps := w.routers[0].Gaps()
	stored, err := w.js.Stream(harness.Context(w.t), stream)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("checked after %d entries, %d of them records, %d in batches and %d removed, %d gaps, in %v",
		last, records, batches, stored.CachedInfo().State.FirstSeq-1, gaps, time.Since(began).Round(time.Millisecond))
}

// stop stops the servers, once they have stored everything that the engines published.
func (w *world) stop() {
	w.t.Helper()
	w.engines.PauseAndWantViews(w.routers...)
	w.wantLive()
	truth := w.engines.Truth.Counts()
	if w.t.Logf("answers: %v", truth); truth.Exact == 0 {
		w.t.Error("no answer was exact")
	}
	for _, m := range w.members {
		if err := m.Process.Stop(); err != nil {
			w.t.Error(err)
		}
	}
}

// wantLive waits until each server lists all workers as live, most of which other servers own.
func (w *world) wantLive() {
	w.t.Helper()
	for _, m := range w.members {
		conn := harness.Dial(w.t, m.Proxy.Addr())
		harness.WaitFor(w.t, func() bool {
			list, err := kvcastv1.NewRouterEventServiceClient(conn).ListWorkers(w.t.Context(), &kvcastv1.ListWorkersRequest{})
			if err != nil {
				w.t.Fatal(err)
			}
			return len(list.GetWorkers()) > 0 && !slices.ContainsFunc(list.GetWorkers(), func(s *kvcastv1.WorkerStatus) bool {
				return s.GetState() != kvcastv1.WorkerState_WORKER_STATE_LIVE
			})
		})
	}
}

// writeLogs writes the logs of all runs to the directory of -logs.
func (w *world) writeLogs() {
	if *logs == "" {
		return
	}
	for _, m := range w.members {
		for i, p := range m.runs {
			name := filepath.Join(*logs, fmt.Sprintf("%s-%d.log", m.name, i))
			if err := os.WriteFile(name, []byte(strings.Join(p.Log(), "\n")+"\n"), 0o644); err != nil {
				w.t.Error(err)
			}
		}
	}
}
