package cluster_test

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/testclass"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

// TestWorkerFollowsItsConnection moves an engine, which connects to a port behind which there are two servers, from one to the
// other: its connection closes while the former server lives, is killed, or is paused.
func TestWorkerFollowsItsConnection(t *testing.T) {
	testclass.Cluster(t)
	replay := harness.FreePort(t)
	url := harness.StartNATS(t)
	js := harness.JetStream(t, url)
	balancer := harness.NewProxy(t, "")
	engines := fleet.New(t, *seed)
	engines.Rate = 200
	engines.Add("127.0.0.1", 1, simulator.SocketConfig{
		Mode: simulator.ModeConnect, Endpoint: "tcp://" + balancer.Addr(), Topic: "kv@127.0.0.1@" + fleet.Model,
		Replay: fmt.Sprintf("tcp://127.0.0.1:%d", replay),
	})
	const name = "127%2E0%2E0%2E1" // in a subject
	var members []*member
	var listeners []string
	for i := range 2 {
		listeners = append(listeners, fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t)))
		members = append(members, &member{name: fmt.Sprintf("server-%d", i), Server: fleet.NewServer(t,
			"--journal", url, "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "64KiB", "--subscribers-progress", "1s",
			"--bind", fmt.Sprintf("tcp://%s,replay_port=%d", listeners[i], replay))})
	}
	w := &world{t: t, rng: rand.New(rand.NewPCG(*seed, 1)), engines: engines, js: js, members: members}
	t.Cleanup(w.writeLogs)
	w.restart(members...)
	w.owners = readOwners(t, js)
	config := fleet.RouterConfig{Lossless: *lossless, IdleTimeout: idleTimeout}
	for i, m := range members {
		m.router = fleet.Follow(t, m.Proxy.Addr(), config)
		m.router.Tell(engines.Truth)
		engines.Ask(m.Proxy.Addr())
		w.routers = append(w.routers, fleet.Follow(t, m.Proxy.Addr()+","+members[1-i].Proxy.Addr(), config))
	}
	for move, how := range []string{"connect", "cut", "kill", "pause", "cut"} {
		from, to := members[(move+1)%2], members[move%2]
		former := from.id
		t.Logf("%s: the engine connects to %s", how, to.name)
		_, last := w.owners.all()
		began := time.Now()
		balancer.Retarget(listeners[move%2])
		var err error
		switch how {
		case "kill":
			err = from.Process.Kill()
		case "pause":
			err = from.Process.Signal(syscall.SIGSTOP)
		}
		if err != nil {
			t.Fatal(err)
		}
		balancer.Cut()
		w.takenOver(began, last, []string{name}, former)
		w.await("another server owns the worker", func(all map[string]worker) bool { return all[name].owner == to.id })
		switch how {
		case "kill":
			w.restart(from)
		case "pause":
			err = from.Process.Signal(syscall.SIGCONT)
		}
		if err != nil {
			t.Fatal(err)
		}
		w.entries()
		w.check()
	}
	w.stop()
}
