package ingest_test

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// budgetOf returns the amount of a resource in use.
func budgetOf(t *testing.T, g prometheus.Gatherer, resource string) float64 {
	t.Helper()
	return harness.Gather(t, g).Value(t, "kvcast_budget_used", "resource", resource)
}

// A worker that needs more sources than are left is refused, and reserves nothing.
func TestSourcesOfAddedWorkersAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	in, _ := start(t, config.Config{Metrics: registry, MaxSources: 10}, views{"a": newView(), "b": newView()})
	of := func(name string, ranks int) config.Worker {
		return config.Worker{Name: name, Sources: []config.Source{{Connect: map[string]string{"a": "tcp://127.0.0.1:1", "b": "tcp://127.0.0.1:101"}[name], DPSize: ranks}}}
	}
	if err := in.AddWorker(t.Context(), of("a", 8)); err != nil {
		t.Fatal(err)
	}
	if err := in.AddWorker(t.Context(), of("b", 3)); !errors.Is(err, config.ErrTooManySources) {
		t.Errorf("AddWorker of 3 sources beside 8 of 10: %v", err)
	}
	if err := in.AddWorker(t.Context(), of("b", 2)); err != nil {
		t.Errorf("AddWorker of 2 sources beside 8 of 10: %v", err)
	}
	for _, name := range []string{"a", "b"} {
		if err := in.RemoveWorker(t.Context(), name, feed.RemovedDeregistered); err != nil {
			t.Fatal(err)
		}
	}
	if n := budgetOf(t, registry, "sources"); n != 0 {
		t.Errorf("%v sources in use without workers", n)
	}
}

// The memory of the strings of workers is bounded.
func TestBytesOfAddedWorkersAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	in, _ := start(t, config.Config{Metrics: registry, Memory: config.Memory{WorkerBytes: 64 << 10}}, views{"w-0": newView()})
	labels := make(map[string]string)
	for i := range 30 {
		labels[fmt.Sprint(i)] = strings.Repeat("x", 1000)
	}
	add := func(i int) error {
		return in.AddWorker(t.Context(), config.Worker{
			Name: fmt.Sprint("w-", i), Labels: labels, Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}},
		})
	}
	if err := add(0); !errors.Is(err, config.ErrWorkersTooLarge) {
		t.Errorf("AddWorker of labels of 30,000 bytes, kept twice: %v", err)
	}
	delete(labels, "0")
	delete(labels, "1")
	if err := add(0); err != nil {
		t.Errorf("AddWorker of labels of 28,000 bytes: %v", err)
	}
	if err := in.RemoveWorker(t.Context(), "w-0", feed.RemovedDeregistered); err != nil {
		t.Fatal(err)
	}
	if n := budgetOf(t, registry, "worker_bytes"); n != 0 {
		t.Errorf("%v bytes in use without workers", n)
	}
}

// Topics beyond the maximum number of publishers are refused, and take no memory. An engine that
// was accepted before is not affected.
func TestPublishersOfAPortAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	all := make(views)
	all["127.0.0.1"] = newView()
	for i := range 100 {
		all[fmt.Sprint("flood-", i)] = newView()
	}
	in, _ := start(t, config.Config{
		Metrics: registry, MaxSources: 10, MaxRanks: 20, Grace: time.Hour, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
	}, all)
	honest := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		Endpoint: in.Endpoints()[0], Mode: simulator.ModeConnect, Topic: "kv@127.0.0.1@m",
	}})
	honest.must(honest.WaitSubscribed(harness.Context(t), 1))
	honest.store(honest.Publish, 1)
	all["127.0.0.1"].awaitBlocks(t, honest.blocks)

	e := newEngine(t)
	e.connect(in.Endpoints()[0])
	e.awaitSubscriber("")
	for i := range 100 {
		e.send(fmt.Sprintf("kv@flood-%d@m", i), seqFrame(0), payload(0))
	}
	harness.WaitFor(t, func() bool { return harness.Gather(t, registry).Sum("kvcast_ingest_messages_refused_total") == 91 })
	if n := len(in.Sources()); n != 10 {
		t.Errorf("%d sources, want 10", n)
	}
	if n := budgetOf(t, registry, "sources"); n != 10 {
		t.Errorf("%v sources in use, want 10", n)
	}
	honest.store(honest.Publish, 1)
	all["127.0.0.1"].awaitBlocks(t, honest.blocks)
}

// One address cannot use up the sources of a listener: an engine at another address is accepted.
func TestSourcesOfAnAddressAreBounded(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	all := views{"other": newView(), "late": newView()}
	for i := range 10 {
		all[fmt.Sprint("flood-", i)] = newView()
	}
	in, stop := start(t, config.Config{
		Metrics: registry, MaxSources: 10, MaxSourcesPerAddress: 4, Grace: time.Hour,
		Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
	}, all)
	address := strings.TrimPrefix(in.Endpoints()[0], "tcp://")
	publish := func(host byte, topics ...string) {
		t.Helper()
		c, err := rawzmtp.DialFrom(t.Context(), net.IPv4(127, 0, 0, host), zmtp.PUB, address, harness.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		for _, topic := range topics {
			c.Message([]byte(topic), seqFrame(0), payload(0))
		}
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(want float64) {
		t.Helper()
		harness.WaitFor(t, func() bool {
			return harness.Gather(t, registry).Sum("kvcast_ingest_messages_refused_total", "reason", "too_many_sources_of_address") == want
		})
	}
	var flood []string
	for i := range 10 {
		flood = append(flood, fmt.Sprintf("kv@flood-%d@m", i))
	}
	publish(1, flood...)
	refused(6)
	publish(1, "kv@late@m")
	refused(7)
	publish(2, "kv@other@m")
	all["other"].await(t, "the worker", func() bool { return all["other"].workers == 1 })
	if n := len(in.Sources()); n != 5 {
		t.Errorf("%d sources, want 4 of one address and 1 of another", n)
	}
	stop()
}
