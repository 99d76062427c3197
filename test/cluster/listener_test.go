package cluster_test

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestWorkerFollowsItsConnection moves an engine, which connects to a port behind which there are two servers, from one to the
// other: its connection closes while the former server lives, is killed, or is paused.
func TestWorkerFollowsItsConnection(t *testing.T) {
	testclass.Cluster(t)
	replay := harness.FreePort(t)
	url := natstest.Start(t)
	js := natstest.JetStream(t, url)
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

// TestConnectedEngineLeavesIsolatedServer isolates the server to which an engine has connected from the NATS server, until another one has
// taken the engine over and knows all its blocks. The load balancer forwards to both all the time.
func TestConnectedEngineLeavesIsolatedServer(t *testing.T) {
	testclass.Cluster(t)
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		u, err := url.Parse(natstest.Start(t))
		if err != nil {
			t.Fatal(err)
		}
		replay := harness.FreePort(t)
		balancer := harness.NewProxy(t, "")
		engines := fleet.New(t, *seed)
		engines.Rate = 200 // so that the journal of the server stalls
		engines.Add("127.0.0.1", 1, simulator.SocketConfig{
			Mode: simulator.ModeConnect, Endpoint: "tcp://" + balancer.Addr(), Topic: "kv@127.0.0.1@" + fleet.Model,
			Replay: fmt.Sprintf("tcp://127.0.0.1:%d", replay),
		})
		const name = "127%2E0%2E0%2E1" // in a subject
		w := &world{t: t, rng: rand.New(rand.NewPCG(*seed, 1)), engines: engines, js: natstest.JetStream(t, u.String())}
		t.Cleanup(w.writeLogs)
		var listeners []string
		for i := range 2 {
			m := &member{name: fmt.Sprintf("server-%d", i)}
			address := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
			m.Server = fleet.NewServer(t, "--journal", w.proxied(&m.nats, u.String()), "--journal-checkpoint-bytes", "64KiB", "--subscribers-progress", "1s",
				"--ingest-listen-transport", string(zmq), "--bind", fmt.Sprintf("tcp://%s,replay_port=%d", address, replay))
			w.members, listeners = append(w.members, m), append(listeners, address)
		}
		w.restart(w.members...)
		w.owners = readOwners(t, w.js)
		for _, m := range w.members {
			m.router = fleet.Follow(t, m.Proxy.Addr(), fleet.RouterConfig{Lossless: *lossless, IdleTimeout: idleTimeout})
			m.router.Tell(engines.Truth)
			engines.Ask(m.Proxy.Addr())
		}
		from, to := w.members[0], w.members[1]
		w.routers = []*fleet.Router{to.router}
		balancer.Retarget(listeners[0])
		w.takenOver(time.Now(), 0, []string{name})
		balancer.Retarget(listeners...)
		w.entries()

		_, last := w.owners.all()
		began := time.Now()
		heal := w.partition(from)
		w.takenOver(began, last, []string{name}, from.id)
		conn := harness.Dial(t, to.Proxy.Addr())
		harness.WaitFor(t, func() bool {
			list, err := kvcastv1.NewRouterEventServiceClient(conn).ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
			if err != nil {
				t.Fatal(err)
			}
			all := list.GetWorkers()
			return len(all) == 1 && len(all[0].GetRanks()) == 1 && all[0].GetRanks()[0].GetTrust() == kvcastv1.Trust_TRUST_EXACT
		})
		t.Logf("exact after %v", time.Since(began).Round(time.Millisecond))
		engines.WantViews(to.router)
		heal()
		w.catchUp(from)
		w.check()
		w.stop()
	})
}
