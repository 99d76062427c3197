package engineclient_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
)

func TestClientMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	var clients []*engineclient.Client
	for _, name := range []string{"a", "b"} {
		p := newPublisher(t, simulator.PublisherConfig{})
		got := newLines()
		cfg := clientOf(p)
		cfg.Worker, cfg.Metrics = name, registry
		clients = append(clients, connectClient(t, p, cfg, got))
		publish(t, p.Publish, 1)
		got.want(t, "0/0 removed [1]")

		again := newClient(t, cfg, discard)
		if err := again.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "start client of "+name+": register metrics: duplicate") {
			t.Errorf("Start of a second Client %s: %v", name, err)
		}
	}
	waitFor(t, func() bool { return clients[0].Stats().Handled == 1 && clients[1].Stats().Handled == 1 })
	// samples returns the metrics that speak of a client, by its name.
	samples := func() map[string][]string {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		all := make(map[string][]string)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "worker" {
						all[l.GetValue()] = append(all[l.GetValue()], f.GetName())
					}
				}
			}
		}
		return all
	}
	got := samples()
	if d := cmp.Diff(got["a"], got["b"]); d != "" || len(got["a"]) < 20 {
		t.Errorf("metrics of a and b differ (-a +b):\n%s", d)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
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
		sum, found := 0.0, false
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == name {
					found = true
					sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
				}
			}
		}
		if !found || sum != want {
			t.Errorf("%s comes to %v, want %v", name, sum, want)
		}
	}
	stopClient(t, clients[0])
	if left := samples(); len(left["a"]) != 0 || len(left["b"]) == 0 {
		t.Errorf("metrics after a was stopped: %v", left)
	}
	if s := clients[0].Stats(); s.Connections != 1 || s.Removed != 1 {
		t.Errorf("stats of a, which was stopped: %+v", s)
	}
	stopClient(t, clients[1])
	if left := samples(); len(left) != 0 {
		t.Errorf("metrics after both were stopped: %v", left)
	}
}

// TestClientCountsMessages checks that every message counts, also one that is no
// batch, or has come before.
func TestClientCountsMessages(t *testing.T) {
	p := newPublisher(t, simulator.PublisherConfig{})
	got := newLines()
	c := connectClient(t, p, clientOf(p), got)
	publish(t, p.Publish, 1)
	if err := errors.Join(p.SendFrames([]byte("kv"), []byte("no batch")), p.SendPayload(1, []byte{0xc1})); err != nil {
		t.Fatal(err)
	}
	publish(t, p.Publish, 2)
	got.want(t, "0/0 removed [1]")
	waitFor(t, func() bool { return c.Stats().Messages == 4 })
	if s := c.Stats(); s.Refused != 1 || s.Rejected == 0 {
		t.Errorf("stats %+v", s)
	}
}
