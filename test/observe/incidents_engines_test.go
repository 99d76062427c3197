package observe_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// engineFlag returns the value of --worker for a server that connects to an engine at a pair of endpoints.
func engineFlag(name, connect, replay string) string {
	return fmt.Sprintf("name=%s,connect=%s,replay=%s,block_size=%d", name, connect, replay, enginetest.BlockSize)
}

// clockAt returns sockets of an engine whose clock is ahead of this machine's.
func clockAt(ahead time.Duration) simulator.PublisherConfig {
	return simulator.PublisherConfig{BatchConfig: simulator.BatchConfig{Now: func() time.Time { return time.Now().Add(ahead) }}}
}

// TestIncidentsOfEngines has one server with an engine for each incident.
func TestIncidentsOfEngines(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	args := []string{"--bind", bindAny, "--ingest-silence", "2s", "--ingest-replay-timeout", "1s", "--ingest-replay-patience", "5s", "--ingest-grace", "1h"}
	engines := make(map[string]*simulator.Publisher)
	add := func(name string, c simulator.PublisherConfig) *simulator.Publisher {
		e := enginetest.NewSimulated(t, c)
		engines[name] = e
		args = append(args, "--worker", engineFlag(name, e.Endpoint(), e.ReplayEndpoint()))
		return e
	}
	loses, repairs, unrepaired := add("loses", simulator.PublisherConfig{}), add("repairs", simulator.PublisherConfig{}), add("unrepaired", simulator.PublisherConfig{})
	large, skips, leaves := add("large", simulator.PublisherConfig{}), add("skips", simulator.PublisherConfig{}), add("leaves", simulator.PublisherConfig{})
	behind, ahead := add("behind", clockAt(-time.Minute)), add("ahead", clockAt(time.Minute))
	hangs := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	engines["hangs"] = hangs
	var proxies [2]*harness.Proxy
	for i, endpoint := range []string{hangs.Endpoint(), hangs.ReplayEndpoint()} {
		proxies[i] = harness.NewProxy(t, strings.TrimPrefix(endpoint, "tcp://"))
	}
	args = append(args, "--worker", engineFlag("hangs", "tcp://"+proxies[0].Addr(), "tcp://"+proxies[1].Addr()))
	server := fleet.Start(t, args...)
	addr := fleet.Address(t, server)
	harness.WaitFor(t, func() bool {
		m, err := server.Metrics(harness.Context(t))
		return err == nil && m.Sum("kvcast_ingest_publishers", "state", "live") == float64(len(engines))
	})
	fleet.Follow(t, addr, fleet.RouterConfig{})
	for name, e := range engines {
		if name != "behind" && name != "ahead" {
			publish(t, e, enginetest.Stored(1))
		}
	}
	harness.WaitFor(t, func() bool {
		m, err := server.Metrics(harness.Context(t))
		return err == nil && m.Sum("kvcast_ingest_events_total", "kind", "stored") == float64(len(engines)-2)
	})
	is := instance(t, server)
	p := watch(t, is)
	alerts := []alert{
		of("KvcastBatchesLost", "instance", is, "worker", "loses"),
		of("KvcastRankIncomplete", "worker", "loses", "reason", "gap"),
		of("KvcastBlockSizeMismatch", "worker", "large"),
		of("KvcastEventsSkipped", "worker", "skips"),
		of("KvcastRepairsFail", "instance", is, "worker", "unrepaired"),
		of("KvcastRepairsContinue", "instance", is, "worker", "repairs"),
		of("KvcastEngineUnreachable", "instance", is),
		of("KvcastEngineSilent", "instance", is),
		of("KvcastBatchesRejected", "instance", is, "worker", ""),
		of("KvcastEngineDelayHigh", "instance", is),
		of("KvcastEngineClockAhead", "worker", "ahead"),
	}
	p.quiet(alerts...)

	if _, err := loses.Lose(enginetest.Stored(2)); err != nil {
		t.Fatal(err)
	}
	publish(t, loses, enginetest.Stored(3))
	publish(t, large, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{2}, Tokens: make([]uint32, 3*enginetest.BlockSize), BlockSize: 3 * enginetest.BlockSize})
	publish(t, skips, unheardOf)
	if err := unrepaired.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := unrepaired.Drop(enginetest.Stored(2)); err != nil {
		t.Fatal(err)
	}
	publish(t, unrepaired, enginetest.Stored(3))
	if err := leaves.Disconnect(); err != nil {
		t.Fatal(err)
	}
	for _, proxy := range proxies {
		proxy.Partition()
	}
	sendFaults(t, server)
	p.wantFiring(func() {
		publish(t, behind, enginetest.Stored(1))
		publish(t, ahead, enginetest.Stored(1))
		for range 5 {
			asked := repairs.Replays()
			if _, err := repairs.Drop(enginetest.Stored(1)); err != nil {
				t.Fatal(err)
			}
			publish(t, repairs, enginetest.Stored(1))
			if err := repairs.WaitReplays(harness.Context(t), asked+1); err != nil {
				t.Fatal(err)
			}
		}
	}, alerts...)
}

// writeFile replaces a file, which a program may read at any time.
func writeFile(t *testing.T, path, text string) {
	t.Helper()
	err := os.WriteFile(path+".new", []byte(text), 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// discover starts a server with discoveries from files, and returns the files. Each has the given workers at first.
func discover(t *testing.T, workers []string, args ...string) (server *harness.Process, files []string) {
	t.Helper()
	dir := t.TempDir()
	var config strings.Builder
	config.WriteString("discovery:\n")
	for i, text := range workers {
		file := filepath.Join(dir, fmt.Sprintf("workers-%d.yaml", i))
		writeFile(t, file, text)
		files = append(files, file)
		fmt.Fprintf(&config, "  - {file: %q, interval: 100ms}\n", file)
	}
	writeFile(t, filepath.Join(dir, "kvcast.yaml"), config.String())
	return fleet.Start(t, append([]string{"--config", filepath.Join(dir, "kvcast.yaml")}, args...)...), files
}

// TestIncidentsOfDiscovery has servers whose workers are not what was configured or found before.
func TestIncidentsOfDiscovery(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	found := func(name string) string {
		e := enginetest.NewSimulated(t, simulator.PublisherConfig{})
		publish(t, e, enginetest.Stored(1))
		return fmt.Sprintf("- {name: %s, sources: [{connect: %q, replay: %q}]}\n", name, e.Endpoint(), e.ReplayEndpoint())
	}
	configured := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	confused, files := discover(t, []string{found("good"), found("other")}, "--worker", engineFlag("configured", configured.Endpoint(), configured.ReplayEndpoint()))
	emptied, empties := discover(t, []string{found("a") + found("b")}, "--ingest-grace", "1s")
	listener := fleet.Start(t, "--bind", bindAny, "--ingest-grace", "1s")
	endpoint, err := listener.Logged(listening)
	if err != nil {
		t.Fatal(err)
	}
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		Endpoint: "tcp://" + endpoint, Mode: simulator.ModeConnect, Topic: "kv@pod@m",
	}})
	if err := engine.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	publish(t, engine, enginetest.Stored(1))
	servers := []*harness.Process{confused, emptied, listener}
	for i, workers := range []int{3, 2, 1} {
		harness.WaitFor(t, func() bool {
			m, err := servers[i].Metrics(harness.Context(t))
			return err == nil && len(m.Select("kvcast_index_incomplete")) == workers && m.Sum("kvcast_server_ready") == 1
		})
	}
	addresses := adminAddresses(t, servers...)
	p := watch(t, addresses...)
	alerts := []alert{
		of("KvcastDiscoveryFails", "instance", addresses[0], "discovery", files[0]),
		of("KvcastDiscoveryRejects", "instance", addresses[0], "discovery", files[1]),
		of("KvcastWorkersGone", "instance", addresses[1]),
		of("KvcastWorkersGone", "instance", addresses[2]),
	}
	p.quiet(alerts...)

	writeFile(t, files[0], "no list of workers")
	writeFile(t, files[1], found("configured"))
	writeFile(t, empties[0], "[]")
	if err := engine.Disconnect(); err != nil {
		t.Fatal(err)
	}
	p.wantFiring(nil, alerts...)
}
