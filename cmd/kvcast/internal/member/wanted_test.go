package member

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// A worker that this instance finds may not read the sockets of another that it has found, or that is registered.
func TestFoundWorkersReadNoSocketsOfAnother(t *testing.T) {
	m := New(Config{ID: "i", TTL: time.Second, Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
	worker := func(name, connect string) ingestconfig.Worker {
		return ingestconfig.Worker{Name: name, Sources: []ingestconfig.Source{{Connect: connect, DPSize: 1, Engine: feed.EngineVLLM}}}
	}
	refused := func(err error, other string) {
		t.Helper()
		if len(ingestconfig.FieldErrors(err)) != 1 || !strings.Contains(err.Error(), `where worker "`+other+`" reads the events of rank 0`) {
			t.Errorf("got %v, want an error that names worker %s", err, other)
		}
	}
	if err := m.AddWorker(t.Context(), worker("a", "tcp://h:1")); err != nil {
		t.Fatal(err)
	}
	refused(m.AddWorker(t.Context(), worker("b", "tcp://h:1")), "a")
	refused(m.CheckSockets(worker("b", "tcp://h:1")), "a")
	data, err := proto.Marshal(&statev1.Registration{Version: 1, Worker: []byte(`{"Name":"r","Sources":[{"Connect":"tcp://h:2"}]}`)})
	if err != nil {
		t.Fatal(err)
	}
	m.registrationChanged(jetstream.Value{Key: "r", Data: data})
	refused(m.AddWorker(t.Context(), worker("b", "tcp://h:2")), "r")
	refused(m.CheckSockets(worker("b", "tcp://h:2")), "r")
	if err := m.RemoveWorker(t.Context(), "a", feed.RemovedDiscovery); err != nil {
		t.Fatal(err)
	}
	m.registrationChanged(jetstream.Value{Key: "r"})
	for name, connect := range map[string]string{"b": "tcp://h:1", "c": "tcp://h:2"} {
		if err := m.AddWorker(t.Context(), worker(name, connect)); err != nil {
			t.Errorf("add %s: %v", name, err)
		}
	}
}
