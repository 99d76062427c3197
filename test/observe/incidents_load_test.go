package observe_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// startWith starts a server with a variable, such as GOMAXPROCS=1, until the test ends.
func startWith(t *testing.T, race bool, variable string, args ...string) *harness.Process {
	t.Helper()
	p, err := harness.StartProcess(harness.ProcessConfig{Race: race, Wrapper: []string{"sh", "-c", "export " + variable + `; exec "$0" "$@"`}, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// payload returns an encoded batch.
func payload(events ...wire.Event) []byte {
	var enc wire.Encoder
	return enc.AppendBatch(nil, &wire.Batch{Time: float64(time.Now().UnixMicro()) / 1e6, HasTime: true, HasRank: true, Events: events})
}

// TestIncidentsOfMemory lets the live data of a server grow. Garbage fills the rest of the memory, and does not matter: the alert fires when live data
// is at more than 80 % of GOMEMLIMIT, and before the process uses what a container of this GOMEMLIMIT has.
func TestIncidentsOfMemory(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	const limit = 256 << 20
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	// The memory of the race detector is not that of the program.
	server := startWith(t, false, fmt.Sprintf("GOMEMLIMIT=%d", limit), "--journal-max-bytes", "1GiB", "--emit-token-ids",
		"--worker", "name=w,connect="+engine.Endpoint()+",replay="+engine.ReplayEndpoint())
	fleet.Address(t, server)
	if err := engine.WaitReplays(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	store := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3, 4}, BlockSize: 16384}
	for range len(store.BlockHashes) * int(store.BlockSize) {
		store.Tokens = append(store.Tokens, 1<<20)
	}
	batches := [2][]byte{payload(store), payload(wire.Event{Kind: wire.KindRemoved, BlockHashes: store.BlockHashes})}
	seq := uint64(0)
	growTo := func(live float64) {
		harness.WaitFor(t, func() bool {
			m, err := server.Metrics(harness.Context(t))
			if err != nil {
				t.Fatal(err)
			}
			if m.Sum("go_gc_heap_live_bytes") > live {
				return true
			}
			// A batch that does not fit into a buffer would be lost, and those after it would wait for a replay.
			for processed := uint64(m.Sum("kvcast_ingest_batches_total", "worker", "w")); seq < processed+10; seq++ {
				if err := engine.SendPayload(seq, batches[seq%2]); err != nil {
					t.Fatal(err)
				}
			}
			return false
		})
	}
	is := instance(t, server)
	high := of("KvcastMemoryHigh", "instance", is)
	growTo(0.6 * limit)
	p := watch(t, is)
	await(t, func() bool {
		return !p.isEmpty(fmt.Sprintf("count_over_time(go_gc_heap_live_bytes{instance=%q}[10m]) >= 5", is))
	})
	p.quiet(high)
	growTo(0.85 * limit)
	p.wantFiring(nil, high)
	peak, err := harness.PeakResidentBytes(server.PID())
	if err != nil {
		t.Fatal(err)
	}
	if most := int64(limit + 64<<20); peak > most {
		t.Errorf("%d bytes were in use, want at most %d before the alert", peak, most)
	}
}

// backlog is the number of batches of each engine that a flooded server has not processed.
const backlog = 4000

// flood makes engines publish, so that a server always has backlog batches of each to process, until the function that it returns is called.
// No socket drops any: a lost batch would make the server wait for a replay.
func flood(t *testing.T, server *harness.Process, batches [2][]byte, engines map[string]*simulator.Publisher) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		sent := make(map[string]uint64)
		for ctx.Err() == nil {
			m, err := server.Metrics(ctx)
			if err != nil {
				continue // it is late
			}
			for name, e := range engines {
				for processed := uint64(m.Sum("kvcast_ingest_batches_total", "worker", name)); sent[name] < processed+backlog; sent[name]++ {
					if err := e.SendPayload(sent[name], batches[sent[name]%2]); err != nil {
						ended <- err
						return
					}
				}
			}
		}
		ended <- nil
	}()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// overloadScrapes is the interval of scrapes of a server that is overloaded, and bounds one: its core has much else to do.
const overloadScrapes = 10 * time.Second

// TestIncidentsOfOverload has engines that publish faster than a server can process, and a server that has one core: what it receives waits, and what it
// appends is applied late, because each engine is read by a goroutine, and one applies the entries of all.
func TestIncidentsOfOverload(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	const count = 24
	args, engines := []string(nil), make(map[string]*simulator.Publisher)
	for i := range count {
		name, e := fmt.Sprintf("w-%d", i), enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{HWM: 2 * backlog}})
		args, engines[name] = append(args, "--worker", engineFlag(name, e.Endpoint(), e.ReplayEndpoint())), e
	}
	server := startWith(t, testclass.RaceEnabled, "GOMAXPROCS=1", args...)
	fleet.Address(t, server)
	for _, e := range engines {
		if err := e.WaitReplays(harness.Context(t), 1); err != nil {
			t.Fatal(err)
		}
	}
	is := instance(t, server)
	p := startPrometheusWith(t, overloadScrapes, shortRules(t), is)
	delay, behind := of("KvcastDelayHigh", "instance", is), of("KvcastIndexBehind", "instance", is)
	p.quiet(delay, behind)
	store := stored(1, 64)
	stop := flood(t, server, [2][]byte{payload(store), payload(wire.Event{Kind: wire.KindRemoved, BlockHashes: store.BlockHashes})}, engines)
	defer stop()
	p.wantFiring(nil, delay, behind)
}
