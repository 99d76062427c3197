package engineclient_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestClientMetrics(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	var clients []*engineclient.Client
	for _, name := range []string{"a", "b"} {
		p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
		got := newLines()
		cfg := clientOf(p)
		cfg.Worker, cfg.Metrics = name, registry
		clients = append(clients, connectClient(t, p, cfg, got))
		enginetest.Remove(t, p.Publish, 1)
		got.want(t, "0/0 removed [1]")

		again := newClient(t, cfg, discard)
		if err := again.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "start client of "+name+": register metrics: duplicate") {
			t.Errorf("Start of a second Client %s: %v", name, err)
		}
	}
	// The replay socket may have given the batch before its message came.
	harness.WaitFor(t, func() bool {
		return !slices.ContainsFunc(clients, func(c *engineclient.Client) bool {
			s := c.Stats()
			return s.Handled != 1 || s.Messages != 1
		})
	})
	// namesOf returns the names of the metrics of a client.
	namesOf := func(client string) []string {
		t.Helper()
		var names []string
		for _, s := range harness.Gather(t, registry).Select("", "worker", client) {
			// Whether a batch is read live or by replay decides whether it has a delay, and which replays there are.
			if s.Name != "kvcast_ingest_engine_delay_seconds" {
				names = append(names, s.Name)
			}
		}
		return slices.Compact(names)
	}
	a, b := namesOf("a"), namesOf("b")
	if d := cmp.Diff(a, b); d != "" || len(a) < 20 {
		t.Errorf("metrics of a and b differ (-a +b):\n%s", d)
	}
	all := harness.Gather(t, registry)
	for name, want := range map[string]float64{
		"kvcast_ingest_connections_total":      2,
		"kvcast_ingest_events_total":           2,
		"kvcast_client_events_handled_total":   2,
		"kvcast_client_connected":              2,
		"kvcast_client_handler_errors_total":   0,
		"kvcast_client_events_waiting":         0,
		"kvcast_ingest_disconnections_total":   0,
		"kvcast_ingest_missed_batches_total":   0,
		"kvcast_ingest_connect_failures_total": 0,
		"kvcast_ingest_connect_attempts_total": 2,
		"kvcast_ingest_messages_total":         2,
		"kvcast_client_handler_seconds":        2,
	} {
		if samples := all.Select(name); len(samples) == 0 || samples.Sum(name) != want {
			t.Errorf("%s comes to %v, want %v", name, samples.Sum(name), want)
		}
	}
	stopClient(t, clients[0])
	if a, b := namesOf("a"), namesOf("b"); len(a) != 0 || len(b) == 0 {
		t.Errorf("metrics after a was stopped: %v of a, %v of b", a, b)
	}
	if s := clients[0].Stats(); s.Connections != 1 || s.Removed != 1 {
		t.Errorf("stats of a, which was stopped: %+v", s)
	}
	stopClient(t, clients[1])
	if left := harness.Gather(t, registry); len(left) != 0 {
		t.Errorf("metrics after both were stopped: %v", left)
	}
}

// TestClientCountsMessages checks that every message counts, including invalid and repeated
// ones.
func TestClientCountsMessages(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	got := newLines()
	c := connectClient(t, p, clientOf(p), got)
	enginetest.Remove(t, p.Publish, 1)
	if err := errors.Join(p.SendFrames([]byte("kv"), []byte("no batch")), p.SendPayload(1, []byte{0xc1})); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 2)
	got.want(t, "0/0 removed [1]")
	harness.WaitFor(t, func() bool { return c.Stats().Messages == 4 })
	if s := c.Stats(); s.Refused != 1 || s.Rejected == 0 {
		t.Errorf("stats %+v", s)
	}
}
