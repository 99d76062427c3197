package upgrade_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

var (
	other = flag.String("other", "", "path of the build of kvcast that is upgraded to this one, and downgraded to; default: this one as "+otherVersion)
	seed  = flag.Uint64("seed", 1, "seed of the engines")
)

func TestMain(m *testing.M) {
	status := harness.RunTests(m)
	if err := measured.write("../../bin/test/upgrades.md"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

const (
	otherVersion = "v0.0.1"
	// boundEngines is the number of engines that servers connect to.
	boundEngines = 3
	// maxBytes is the size of the entries that routers can resume from.
	maxBytes = "16MiB"
)

// rollout is how the chart replaces the pods of a kind of journal.
type rollout struct {
	name string
	pods int
	// surge starts a new pod before an old one ends, as a Deployment does with maxUnavailable 0. Otherwise the old one ends first, as with
	// Recreate and in a StatefulSet.
	surge bool
	// listens lets an engine connect to the pods, besides those that the pods connect to.
	listens bool
	// durable requires the same epoch without snapshots.
	durable bool
	// journal returns the arguments of the journal.
	journal func(*testing.T) []string
}

func inMemory(*testing.T) []string { return nil }

func inFiles(t *testing.T) []string {
	t.Helper()
	return []string{"--journal", "file:" + t.TempDir(), "--journal-checkpoint-bytes", "64KiB"}
}

func inNATS(t *testing.T) []string {
	t.Helper()
	return []string{"--journal", natstest.StartCluster(t).URLs(), "--journal-replicas", "3", "--journal-checkpoint-bytes", "64KiB"}
}

// TestServerIsUpgradedAndDowngraded replaces the only server by one of another version, and back.
func TestServerIsUpgradedAndDowngraded(t *testing.T) {
	testclass.Process(t)
	for _, r := range []rollout{
		{name: "memory, Recreate", pods: 1, listens: true, journal: inMemory},
		{name: "memory, without listeners", pods: 1, surge: true, journal: inMemory},
		{name: "file", pods: 1, listens: true, durable: true, journal: inFiles},
	} {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			r.test(t)
		})
	}
}

// TestServersOfAJournalAreUpgradedAndDowngraded replaces three servers that share a journal, one after another, so that servers of both
// versions share it meanwhile.
func TestServersOfAJournalAreUpgradedAndDowngraded(t *testing.T) {
	testclass.Cluster(t)
	rollout{name: "nats", pods: 3, surge: true, listens: true, durable: true, journal: inNATS}.test(t)
}

func (r rollout) test(t *testing.T) {
	t.Helper()
	w := newWorld(t, r)
	for range r.pods {
		w.pods = append(w.pods, w.startPod(w.other))
	}
	w.forward(w.pods)
	w.follow()
	w.awaitEntries()
	w.measure("none", func() {})
	w.measure("upgrade", func() { w.replacePods(w.this) })
	w.measure("downgrade", func() { w.replacePods(w.other) })
	for _, p := range w.pods {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// world is pods behind Services, their engines, and routers.
type world struct {
	rollout
	t           *testing.T
	other, this string // builds of kvcast
	engines     *fleet.Fleet
	workers     []string
	replay      int      // port of the replay socket of the engine that connects
	args        []string // of each pod
	pods        []*pod   // that run
	routers     []*fleet.Router
	// grpc and zmq are the Service: where routers connect, and engines. headless is the headless Service.
	grpc, zmq, headless *harness.Proxy
}

// pod is a server.
type pod struct {
	*harness.Process
	grpc, zmq string // its addresses
}

func newWorld(t *testing.T, r rollout) *world {
	t.Helper()
	w := &world{
		rollout: r, t: t, engines: fleet.New(t, *seed), args: append(r.journal(t), "--journal-max-bytes", maxBytes),
		grpc: harness.NewProxy(t, ""), zmq: harness.NewProxy(t, ""), headless: harness.NewProxy(t, ""),
	}
	w.engines.Faults = nil // what is lost is lost by the upgrade
	w.this = build(t, "")
	if w.other = *other; *other == "" {
		w.other = build(t, otherVersion)
	}
	for i := range boundEngines {
		e := w.engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound())
		w.workers = append(w.workers, e.Worker)
		w.args = append(w.args, "--worker", e.Flag())
	}
	if r.listens {
		w.replay = harness.FreePort(t)
		w.workers = append(w.workers, w.engines.Add("127.0.0.1", 1, simulator.SocketConfig{
			Mode: simulator.ModeConnect, Endpoint: "tcp://" + w.zmq.Addr(), Topic: "kv@127.0.0.1@" + fleet.Model,
			Replay: fmt.Sprintf("tcp://127.0.0.1:%d", w.replay),
		}).Worker)
	}
	return w
}

// build returns a build of kvcast with the name of a version, or without one.
func build(t *testing.T, name string) string {
	t.Helper()
	program, err := harness.ProgramOf(name, testclass.RaceEnabled)
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// startPod starts a pod, and waits until it is ready.
func (w *world) startPod(program string) *pod {
	w.t.Helper()
	args := slices.Clone(w.args)
	p := &pod{}
	if w.listens {
		p.zmq = fmt.Sprintf("127.0.0.1:%d", harness.FreePort(w.t))
		args = append(args, "--bind", fmt.Sprintf("tcp://%s,replay_port=%d", p.zmq, w.replay))
	}
	var err error
	if p.Process, err = harness.StartProcess(harness.ProcessConfig{Program: program, Args: args}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = p.Kill() })
	p.grpc = fleet.Address(w.t, p.Process)
	harness.WaitFor(w.t, func() bool {
		_, err := p.Get(w.t.Context(), "/readyz")
		return err == nil
	})
	return p
}

// follow follows the servers: by a router with the addresses of the Service and the headless Service, which tries the other one at once when its
// stream ends, and two that wait as long as the server asks for.
func (w *world) follow() {
	w.t.Helper()
	for _, addr := range []string{w.grpc.Addr() + "," + w.headless.Addr(), w.grpc.Addr(), w.grpc.Addr()} {
		w.routers = append(w.routers, fleet.Follow(w.t, addr, fleet.RouterConfig{
			Lossless: true, Snapshots: !w.durable, BackoffMin: client.DefaultBackoffMin, BackoffMax: client.DefaultBackoffMax,
		}))
	}
}

// forward makes the Services forward connections to pods.
func (w *world) forward(pods []*pod) {
	grpc, zmq := []string{}, []string{}
	for _, p := range pods {
		grpc, zmq = append(grpc, p.grpc), append(zmq, p.zmq)
	}
	if len(pods) == 0 {
		grpc, zmq = []string{""}, []string{""}
	}
	w.grpc.Retarget(grpc...)
	w.headless.Retarget(grpc...)
	w.zmq.Retarget(zmq...)
}

// replacePods replaces the pods by those of a build, as the chart's strategy says.
func (w *world) replacePods(program string) {
	w.t.Helper()
	for range w.rollout.pods {
		if w.surge {
			w.pods = append(w.pods, w.startPod(program))
		}
		old := w.pods[0]
		w.pods = w.pods[1:]
		w.forward(w.pods)
		if err := old.Stop(); err != nil {
			w.t.Error(err)
		}
		if lines := old.LogFaults(); len(lines) > 0 {
			w.t.Errorf("a server logged: %q", lines)
		}
		if !w.surge {
			w.pods = append(w.pods, w.startPod(program))
			w.forward(w.pods)
		}
	}
}

// awaitEntries waits until each router has entries of each worker.
func (w *world) awaitEntries() []fleet.Pause {
	w.t.Helper()
	var all []fleet.Pause
	for i, r := range w.routers {
		p, err := r.Pause(w.t.Context(), w.workers...)
		if err != nil {
			w.t.Fatalf("router %d: %v", i, err)
		}
		all = append(all, p)
	}
	return all
}

// measure changes the servers while engines publish, logs for how long routers got nothing, and compares the routers' views with the engines.
func (w *world) measure(change string, do func()) {
	w.t.Helper()
	epoch := w.routers[0].Epoch()
	snapshots := w.snapshots()
	for _, r := range w.routers {
		r.MeasurePause()
	}
	began := time.Now()
	do()
	took := time.Since(began)
	pauses := w.awaitEntries()
	w.engines.WantViews(w.routers...)
	if w.t.Failed() {
		w.t.FailNow()
	}
	kept := w.routers[0].Epoch() == epoch
	if w.durable && !kept {
		w.t.Errorf("%s of %s: the epoch is %s, want %s", change, w.name, w.routers[0].Epoch(), epoch)
	}
	w.t.Logf("%s of %s, to %v, within %v: longest times without an entry, of a router with two addresses and two with one: %v; the epoch stayed: %t; %d snapshots",
		change, w.name, w.versions(), took.Round(time.Millisecond), pauses, kept, w.snapshots()-snapshots)
	measured.add(fmt.Sprintf("| %s | %s | %t | %d | %v | %v |", w.name, change, kept, w.snapshots()-snapshots,
		max(pauses[1].Worker, pauses[2].Worker).Round(time.Millisecond), pauses[0].Worker.Round(time.Millisecond)))
}

// snapshots returns the number of snapshots of all routers.
func (w *world) snapshots() (sum int) {
	for _, r := range w.routers {
		sum += r.Snapshots()
	}
	return sum
}

// versions returns the versions of the pods.
func (w *world) versions() (names []string) {
	w.t.Helper()
	for _, p := range w.pods {
		status, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(w.t, p.grpc)).GetStatus(harness.Context(w.t), &kvcastv1.GetStatusRequest{})
		if err != nil {
			w.t.Fatal(err)
		}
		names = append(names, status.GetVersion())
	}
	return names
}
