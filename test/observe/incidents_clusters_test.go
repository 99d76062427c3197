package observe_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestIncidentsOfClusters has three servers on one NATS server, each with proxies of its own to NATS and to all engines. What the first
// server sends to NATS arrives late, so that another one takes its workers. The second is cut off from the engines.
func TestIncidentsOfClusters(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	// Random ids of the servers decide which of the last two has which workers. The late one has none of 20 in one of a million runs.
	const workers, late, cutOff, taker = 20, 0, 1, 2
	url := natstest.Start(t)
	engines := make([]*simulator.Publisher, workers)
	for i := range engines {
		engines[i] = enginetest.NewSimulated(t, simulator.PublisherConfig{})
	}
	servers, toNATS, reached := make([]*harness.Process, 3), make([]*harness.Proxy, 3), make([][]*harness.Proxy, 3)
	for s := range servers {
		toNATS[s] = harness.NewProxy(t, strings.TrimPrefix(url, "nats://"))
		args := []string{"--journal", "nats://" + toNATS[s].Addr(), "--journal-checkpoint-bytes", "64KiB", "--cluster-name", fmt.Sprintf("server-%d", s), "--cluster-ttl", "10s"}
		for i, e := range engines {
			var addrs []string
			for _, endpoint := range []string{e.Endpoint(), e.ReplayEndpoint()} {
				p := harness.NewProxy(t, strings.TrimPrefix(endpoint, "tcp://"))
				reached[s], addrs = append(reached[s], p), append(addrs, "tcp://"+p.Addr())
			}
			args = append(args, "--worker", engineFlag(workerName(i), addrs[0], addrs[1]))
		}
		servers[s] = fleet.Start(t, args...)
	}
	reads := func(s int) float64 {
		m, err := servers[s].Metrics(harness.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		return m.Sum("kvcast_cluster_workers")
	}
	harness.WaitFor(t, func() bool { return reads(late)+reads(cutOff)+reads(taker) == workers })
	is := adminAddresses(t, servers...)
	p := watch(t, is...)
	js := natstest.JetStream(t, url)
	foreign, checkpoints := of("KvcastForeignMessages", "instance", is[taker]), of("KvcastCheckpointsFail", "instance", is[taker])
	takenOver, fenced := of("KvcastWorkersTakenOver", "instance", is[taker]), of("KvcastFenced", "instance", is[late])
	isCutOff := of("KvcastCutOff", "instance", is[cutOff])
	for _, e := range engines {
		publish(t, e, enginetest.Stored(1))
	}
	p.quiet(foreign, checkpoints, takenOver, fenced, isCutOff)

	if _, err := js.Publish(t.Context(), "kvcast.kvcast.other", []byte("no entry")); err != nil {
		t.Fatal(err)
	}
	for _, proxy := range reached[cutOff] {
		proxy.Retarget("")
		proxy.Cut()
	}
	p.wantFiring(nil, foreign, isCutOff)

	harness.WaitFor(t, func() bool { return reads(late) > 0 && reads(late)+reads(taker) == workers })
	toNATS[late].Hold()
	for _, e := range engines {
		publish(t, e, enginetest.Stored(2))
	}
	harness.WaitFor(t, func() bool {
		m, err := servers[late].Metrics(harness.Context(t))
		return err == nil && m.Sum("kvcast_journal_appends_in_flight") > 0
	})
	var lost []alert
	for i, e := range engines {
		if _, err := e.Lose(enginetest.Stored(3)); err != nil {
			t.Fatal(err)
		}
		publish(t, e, enginetest.Stored(4))
		lost = append(lost, of("KvcastBatchesLost", "instance", is[taker], "worker", workerName(i)))
	}
	harness.WaitFor(t, func() bool { return reads(taker) == workers })
	toNATS[late].Heal()
	p.wantFiring(nil, append(lost, takenOver, fenced)...)

	if err := js.DeleteStream(t.Context(), "OBJ_kvcast-checkpoints"); err != nil {
		t.Fatal(err)
	}
	first := uint64(1000)
	p.wantFiring(func() { // some looks make a checkpoint due
		for _, e := range engines {
			publish(t, e, stored(first, 500))
		}
		first = 1000 + (first+500)%10_000
	}, checkpoints)
}

func workerName(i int) string { return fmt.Sprintf("w-%d", i) }

// TestIncidentsOfTakeovers has two servers on one NATS server, which one of them reaches over a slow network when the other hands over a worker
// with a large checkpoint.
func TestIncidentsOfTakeovers(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	url := natstest.Start(t)
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	servers, proxies := make([]*harness.Process, 2), make([]*harness.Proxy, 2)
	for i := range servers {
		proxies[i] = harness.NewProxy(t, strings.TrimPrefix(url, "nats://"))
		servers[i] = fleet.Start(t, "--journal", "nats://"+proxies[i].Addr(), "--journal-checkpoint-bytes", "64KiB", "--cluster-ttl", "1m",
			"--cluster-name", fmt.Sprintf("server-%d", i), "--worker", engineFlag("w", engine.Endpoint(), engine.ReplayEndpoint()))
	}
	metric := func(i int, name string) float64 {
		m, err := servers[i].Metrics(harness.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		return m.Sum(name)
	}
	harness.WaitFor(t, func() bool { return metric(0, "kvcast_cluster_workers")+metric(1, "kvcast_cluster_workers") == 1 })
	from, to := 0, 1
	if metric(to, "kvcast_cluster_workers") > 0 {
		from, to = to, from
	}
	const batches, blocks = 100, 500
	for i := range batches {
		publish(t, engine, stored(uint64(1+i*blocks), blocks))
	}
	harness.WaitFor(t, func() bool { return metric(to, "kvcast_index_blocks") == batches*blocks })
	store, err := natstest.JetStream(t, url).ObjectStore(t.Context(), "kvcast-checkpoints")
	if err != nil {
		t.Fatal(err)
	}
	var size uint64
	harness.WaitFor(t, func() bool {
		size = 0
		all, err := store.List(t.Context())
		for _, o := range all {
			size = max(size, o.Size)
		}
		return err == nil && size > batches*blocks*8
	})
	is := instance(t, servers[to])
	p := watch(t, is)
	slow := of("KvcastTakeoverSlow", "instance", is)
	p.quiet(slow)
	const takes = 12 // seconds, at least
	proxies[to].Throttle(int(size / takes))
	if err := servers[from].Stop(); err != nil {
		t.Fatal(err)
	}
	p.wantFiring(nil, slow)
}
