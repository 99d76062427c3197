package cluster_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

var (
	minutes  = flag.Float64("minutes", float64(testclass.Size(0, 10)), "minutes of faults at random, after one fault of each kind")
	lossless = flag.Bool("lossless", false, "fail if a server reports a gap: every batch can be replayed, unless the machine is too busy")
	seed     = flag.Uint64("seed", 1, "seed of the engines, their faults, and the faults of the servers")
	maxBytes = flag.String("max-bytes", "16MiB", "size of the entries that the servers keep: at least those of two minutes, or a server ends that was paused for long")
	logs     = flag.String("logs", "", "directory to which the servers' logs are written at the end; it is created")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *logs != "" {
		if err := os.MkdirAll(*logs, 0o755); err != nil {
			fmt.Fprintln(os.Stderr, "flag -logs:", err)
			os.Exit(2)
		}
	}
	os.Exit(harness.RunTests(m))
}

// maxEntries is the maximum number of entries between two faults.
const maxEntries = 200

// fault is something that happens to a server, or to several, and what must come of it.
type fault struct {
	name   string
	happen func(*world)
}

var faults = []fault{
	{"kill", (*world).kill},
	{"pause", (*world).pause},
	{"partition from NATS", (*world).partitionFromNATS},
	{"partition from the engines", (*world).partitionFromEngines},
	{"stop a NATS server", (*world).stopNATS},
	{"shutdown", (*world).shutdown},
	{"kill two", (*world).killTwo},
	{"kill all", (*world).killAll},
}

// combinations are further faults, for longer runs.
var combinations = []fault{
	{"pause two", (*world).pauseTwo},
	{"partition all from NATS", (*world).partitionAll},
	{"kill one while another is partitioned from NATS", (*world).killDuringPartition},
	{"kill one while a NATS server is stopped", (*world).killWithoutNATSServer},
	{"kill one that starts", (*world).killStarting},
	{"pause for longer than heartbeats are kept", (*world).pauseLong},
	{"kill a NATS server", (*world).killNATS},
	{"pause a NATS server", (*world).pauseNATS},
	{"kill two of three NATS servers", (*world).killMajority},
	{"rolling restart", (*world).rollingRestart},
	{"power loss", (*world).losePower},
}

// TestWorkersAreTakenOver makes each fault happen. With -minutes, it also makes each of the combinations happen, and then all at
// random for that time.
func TestWorkersAreTakenOver(t *testing.T) {
	testclass.Cluster(t)
	t.Logf("seed %d", *seed)
	w := newWorld(t)
	w.follow()
	w.progress(w.allWorkers()...)
	all := faults
	if *minutes > 0 {
		all = slices.Concat(faults, combinations)
	}
	for _, f := range all {
		w.entries()
		t.Log(f.name)
		w.fault = f.name
		f.happen(w)
	}
	w.check()
	deadline := time.Now().Add(time.Duration(*minutes * float64(time.Minute)))
	for count := 1; time.Now().Before(deadline); count++ {
		w.entries()
		f := all[w.rng.IntN(len(all))]
		t.Logf("fault %d: %s", count, f.name)
		w.fault = f.name
		f.happen(w)
		if count%5 == 0 {
			w.check()
		}
	}
	w.check()
	w.stop()
	w.writeTimes()
}

// kill kills a server, and starts it again at once or when its workers are taken over.
func (w *world) kill() {
	w.t.Helper()
	m := w.victim()
	id := m.id
	if err := m.Process.Kill(); err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	_, last := w.owners.all()
	workers := w.ownedBy(id)
	if w.rng.IntN(2) == 0 {
		w.restart(m)
		w.takenOver(began, last, workers, id)
		return
	}
	w.takenOver(began, last, workers, id)
	w.restart(m)
}

// killTwo kills two of the servers at the same time.
func (w *world) killTwo() {
	w.t.Helper()
	spared := w.rng.IntN(memberCount)
	w.killMembers(w.members[(spared+1)%memberCount], w.members[(spared+2)%memberCount])
}

// killAll kills all servers.
func (w *world) killAll() {
	w.t.Helper()
	w.killMembers(w.members...)
}

func (w *world) killMembers(members ...*member) {
	w.t.Helper()
	var ids []string
	for _, m := range members {
		ids = append(ids, m.id)
		if err := m.Process.Kill(); err != nil {
			w.t.Fatal(err)
		}
	}
	began := time.Now()
	_, last := w.owners.all()
	workers := w.ownedBy(ids...)
	w.restart(members...)
	w.takenOver(began, last, workers, ids...)
}

// losePower kills all servers and all NATS servers.
func (w *world) losePower() {
	w.t.Helper()
	var ids []string
	for i, m := range w.members {
		ids = append(ids, m.id)
		if err := m.Process.Kill(); err != nil {
			w.t.Fatal(err)
		}
		w.nats.Kill(i)
	}
	began := time.Now()
	_, last := w.owners.all()
	workers := w.ownedBy(ids...)
	for i := range w.members {
		w.nats.Start(i)
	}
	w.restart(w.members...)
	w.takenOver(began, last, workers, ids...)
	w.awaitReplicas()
}

// rollingRestart stops each server as planned, and starts it again before the next.
func (w *world) rollingRestart() {
	w.t.Helper()
	for _, m := range w.members {
		w.stopMember(m)
		w.catchUp(m)
	}
}

// shutdown stops a server as planned, which hands over its workers.
func (w *world) shutdown() {
	w.t.Helper()
	w.stopMember(w.victim())
}

func (w *world) stopMember(m *member) {
	w.t.Helper()
	id := m.id
	_, last := w.owners.all()
	workers := w.ownedBy(id)
	began := time.Now()
	if err := m.Process.Stop(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("  %s stopped within %v", m.name, time.Since(began).Round(time.Millisecond))
	w.takenOver(began, last, workers, id)
	w.restart(m)
}

// pause stops a server in the middle of what it does until its workers are taken over. It then goes on.
func (w *world) pause() {
	w.t.Helper()
	w.pauseMembers(0, w.victim())
}

// pauseTwo pauses two of the servers.
func (w *world) pauseTwo() {
	w.t.Helper()
	spared := w.rng.IntN(memberCount)
	w.pauseMembers(0, w.members[(spared+1)%memberCount], w.members[(spared+2)%memberCount])
}

// pauseLong pauses a server until the others know nothing of it any more, and the NATS servers have removed its consumers.
func (w *world) pauseLong() {
	w.t.Helper()
	w.pauseMembers(70*time.Second, w.victim())
}

func (w *world) pauseMembers(least time.Duration, members ...*member) {
	w.t.Helper()
	var ids []string
	for _, m := range members {
		ids = append(ids, m.id)
		if err := m.Process.Signal(syscall.SIGSTOP); err != nil {
			w.t.Fatal(err)
		}
	}
	began := time.Now()
	_, last := w.owners.all()
	w.takenOver(began, last, w.ownedBy(ids...), ids...)
	<-time.After(time.Until(began.Add(least)))
	for _, m := range members {
		if err := m.Process.Signal(syscall.SIGCONT); err != nil {
			w.t.Fatal(err)
		}
	}
	for _, m := range members {
		w.catchUp(m)
	}
}

// partitionFromNATS isolates a server from the NATS servers until its workers are taken over.
func (w *world) partitionFromNATS() {
	w.t.Helper()
	m := w.victim()
	heal := w.partition(m)
	began := time.Now()
	_, last := w.owners.all()
	w.takenOver(began, last, w.ownedBy(m.id), m.id)
	heal()
	w.catchUp(m)
}

// partition isolates servers from the NATS servers until heal is called, which closes the connections, or leaves them as if
// packets of them were lost for ever.
func (w *world) partition(members ...*member) (heal func()) {
	for _, m := range members {
		for _, p := range m.nats {
			p.Partition()
		}
	}
	return func() {
		isReset := w.rng.IntN(2) == 0
		for _, m := range members {
			for _, p := range m.nats {
				p.Heal()
				if isReset {
					p.Cut()
				}
			}
		}
	}
}

// partitionAll isolates all servers from the NATS servers. None can take over anything.
func (w *world) partitionAll() {
	w.t.Helper()
	heal := w.partition(w.members...)
	<-time.After(time.Duration(w.rng.Int64N(int64(10 * time.Second))))
	heal()
	w.progress(w.allWorkers()...)
}

// killDuringPartition kills a server while another one is isolated from the NATS servers, so that the third takes over all.
func (w *world) killDuringPartition() {
	w.t.Helper()
	isolated := w.victim()
	killed := w.members[(slices.Index(w.members, isolated)+1)%memberCount]
	heal := w.partition(isolated)
	w.killMembers(killed)
	heal()
	w.catchUp(isolated)
}

// killWithoutNATSServer kills a server while one of the NATS servers is stopped.
func (w *world) killWithoutNATSServer() {
	w.t.Helper()
	i := w.rng.IntN(memberCount)
	w.nats.Stop(i)
	w.killMembers(w.victim())
	w.startNATS(i)
}

// killStarting kills a server, and then the same one while it starts.
func (w *world) killStarting() {
	w.t.Helper()
	m := w.victim()
	id := m.id
	_, last := w.owners.all()
	workers := w.ownedBy(id)
	began := time.Now()
	for range 3 {
		if err := m.Process.Kill(); err != nil {
			w.t.Fatal(err)
		}
		m.run(w.t)
		<-time.After(time.Duration(w.rng.Int64N(int64(time.Second))))
	}
	if err := m.Process.Kill(); err != nil {
		w.t.Fatal(err)
	}
	w.restart(m)
	w.takenOver(began, last, workers, id)
}

// partitionFromEngines isolates a server from the engines until its workers are taken over. The engine of the registered
// worker has one address for all servers: it is isolated from all.
func (w *world) partitionFromEngines() {
	w.t.Helper()
	m := w.victim()
	_, last := w.owners.all()
	workers := slices.DeleteFunc(w.ownedBy(m.id), func(name string) bool { return name == w.registered.Worker })
	began := time.Now()
	proxies := slices.Concat(m.engines, w.registeredAt)
	for _, p := range proxies {
		p.Partition()
	}
	w.takenOver(began, last, workers, m.id)
	for _, p := range proxies {
		p.Heal()
		p.Cut()
	}
	w.progress(w.allWorkers()...)
}

// stopNATS stops one of the NATS servers for a while.
func (w *world) stopNATS() {
	w.t.Helper()
	i := w.rng.IntN(memberCount)
	w.nats.Stop(i)
	w.progress(w.allWorkers()...)
	w.startNATS(i)
}

// killNATS kills one of the NATS servers for a while.
func (w *world) killNATS() {
	w.t.Helper()
	i := w.rng.IntN(memberCount)
	w.nats.Kill(i)
	w.progress(w.allWorkers()...)
	w.startNATS(i)
}

// pauseNATS pauses one of the NATS servers for a while: its connections do not close.
func (w *world) pauseNATS() {
	w.t.Helper()
	i := w.rng.IntN(memberCount)
	w.nats.Signal(i, syscall.SIGSTOP)
	w.progress(w.allWorkers()...)
	w.nats.Signal(i, syscall.SIGCONT)
	w.awaitReplicas()
}

// killMajority kills two of the NATS servers, until no server is ready.
func (w *world) killMajority() {
	w.t.Helper()
	spared := w.rng.IntN(memberCount)
	for i := range memberCount {
		if i != spared {
			w.nats.Kill(i)
		}
	}
	began := time.Now()
	w.awaitReady(false)
	w.t.Logf("  no server is ready after %v", time.Since(began).Round(time.Millisecond))
	for i := range memberCount {
		if i != spared {
			w.nats.Start(i)
		}
	}
	w.progress(w.allWorkers()...)
	w.awaitReplicas()
	w.awaitReady(true)
}

// awaitReady waits until all servers are ready, or none.
func (w *world) awaitReady(ready bool) {
	w.t.Helper()
	for _, m := range w.members {
		harness.WaitFor(w.t, func() bool {
			_, err := m.Process.Get(w.t.Context(), "/readyz")
			return (err == nil) == ready
		})
	}
}

// startNATS starts a NATS server, and waits until it has what the others have.
func (w *world) startNATS(i int) {
	w.t.Helper()
	w.nats.Start(i)
	w.awaitReplicas()
}

func (w *world) awaitReplicas() {
	w.t.Helper()
	w.nats.AwaitReplicas(stream, "OBJ_"+stream+"-checkpoints", "KV_"+stream+"-workers", "KV_"+stream+"-instances")
}
