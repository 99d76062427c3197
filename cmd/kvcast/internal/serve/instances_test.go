package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/member"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// runWith runs a service with flags, and a worker whose engine does not answer, until stop is called.
func runWith(t *testing.T, flags map[string]string) (s *Service, stop func()) {
	t.Helper()
	flags["listen"], flags["admin"], flags["ingest-start-wait"] = "127.0.0.1:0", "", "0s"
	cfg, _, err := config.Read(config.Sources{Flags: flags, Workers: []string{"name=w,connect=tcp://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	s, err = Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	}
	t.Cleanup(stop)
	return s, stop
}

// memberOf returns what makes a service one of the instances that share a stream.
func memberOf(s *Service) *member.Member {
	if r, ok := s.mode.(replica); ok {
		return r.member
	}
	return s.mode.(shared).member
}

func await(t *testing.T, what string, met func() bool) {
	t.Helper()
	for deadline := time.Now().Add(harness.Timeout); !met(); <-time.After(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v, still not: %s", harness.Timeout, what)
		}
	}
}

// TestEachServerShowsTheInstances runs a server that ingests and one that only serves.
func TestEachServerShowsTheInstances(t *testing.T) {
	t.Parallel()
	url := natstest.Start(t)
	ingesting, stopIngesting := runWith(t, map[string]string{"journal": url, "cluster-ttl": "10s"})
	await(t, "serving", func() bool { return isClosed(ingesting.Serving()) })
	serving, _ := runWith(t, map[string]string{"journal": url, "cluster-ttl": "10s", "cluster-ingest": "false"})
	id, other := memberOf(ingesting).ID(), memberOf(serving).ID()
	for _, s := range []*Service{ingesting, serving} {
		await(t, "two instances and an owner", func() bool {
			all := memberOf(s).Instances()
			return len(all) == 2 && all[0].GetNewestSeq() > 0 && all[1].GetNewestSeq() > 0 && all[0].GetBehind() == 0 && all[1].GetBehind() == 0 &&
				memberOf(s).Owners()["w"].GetInstanceId() == id
		})
		for _, i := range memberOf(s).Instances() {
			ingests, workers := i.GetId() == id, uint64(0)
			if ingests {
				workers = 1
			}
			if !i.GetLive() || i.GetDraining() || i.GetIngests() != ingests || i.GetWorkers() > workers || i.GetHost() == "" || i.GetPid() == 0 ||
				i.GetGrpcAddress() == "" || i.GetVersion() == "" || i.GetStartTimeUnixNano() == 0 {
				t.Errorf("instance: got %v", i)
			}
		}
	}
	await(t, "the heartbeat has the worker", func() bool {
		for _, i := range memberOf(serving).Instances() {
			if i.GetId() == id {
				return i.GetWorkers() == 1
			}
		}
		return false
	})
	wantMetrics(t, ingesting, map[string]float64{
		"kvcast_cluster_workers": 1, "kvcast_cluster_isolated": 0, `kvcast_cluster_instances{state="live"}`: 2, `kvcast_cluster_instances{state="dead"}`: 0,
		`kvcast_cluster_takeovers_total{reason="unowned"}`: 1, "kvcast_cluster_releases_total": 0, "kvcast_cluster_fenced_total": 0,
	})
	stopIngesting()
	await(t, "the instance has left", func() bool {
		all := memberOf(serving).Instances()
		return len(all) == 1 && all[0].GetId() == other
	})
}

// TestWorkerIsReadAnewWhenItsConfigurationChanges changes an endpoint, as a watched file does, and registers a worker again.
func TestWorkerIsReadAnewWhenItsConfigurationChanges(t *testing.T) {
	t.Parallel()
	s, _ := runWith(t, map[string]string{"journal": natstest.Start(t), "cluster-ttl": "500ms"})
	reads := func(endpoint string) func() bool {
		return func() bool {
			all := s.ingest.Sources()
			return len(all) == 1 && all[0].Endpoint == endpoint
		}
	}
	await(t, "serving", func() bool { return isClosed(s.Serving()) })
	await(t, "the worker is read", reads("tcp://127.0.0.1:1"))
	m := memberOf(s)
	changed := ingestconfig.Worker{Name: "w", Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: "tcp://127.0.0.1:2", DPSize: 1}}}
	if err := errors.Join(m.RemoveWorker(t.Context(), "w", feed.RemovedDiscovery), m.AddWorker(t.Context(), changed)); err != nil {
		t.Fatal(err)
	}
	if err := m.AddWorker(t.Context(), changed); !errors.Is(err, ingestconfig.ErrWorkerExists) {
		t.Errorf("add again: got %v, want ErrWorkerExists", err)
	}
	await(t, "the worker is read at its new endpoint", reads("tcp://127.0.0.1:2"))
	if o := m.Owners()["w"]; o.GetInstanceId() != m.ID() {
		t.Errorf("owner: got %v, want this instance", o)
	}
}

// TestServersWithTheDocumentedPermissions runs a server that ingests, and one that only serves and may write nothing.
func TestServersWithTheDocumentedPermissions(t *testing.T) {
	t.Parallel()
	url, account := startWithAccount(t)
	ingesting, _ := runWith(t, map[string]string{
		"journal": url, "journal-credentials": natsCredentials(t, account, ingestingUser), "cluster-ttl": "1s",
	})
	await(t, "serving", func() bool { return isClosed(ingesting.Serving()) })
	serving, _ := runWith(t, map[string]string{
		"journal": url, "journal-credentials": natsCredentials(t, account, servingUser), "cluster-ttl": "1s", "cluster-ingest": "false",
	})
	await(t, "serving", func() bool { return isClosed(serving.Serving()) })
	await(t, "the instance that ingests is known", func() bool {
		for _, i := range memberOf(serving).Instances() {
			if i.GetId() == memberOf(ingesting).ID() {
				return i.GetLive()
			}
		}
		return false
	})
	await(t, "the owner of w is known", func() bool {
		return memberOf(serving).Owners()["w"].GetInstanceId() == memberOf(ingesting).ID()
	})
	if all := memberOf(ingesting).Instances(); len(all) != 1 {
		t.Errorf("got the instances %v, want that which ingests alone", all)
	}
}

// wantMetrics checks counters and gauges.
func wantMetrics(t *testing.T, s *Service, want map[string]float64) {
	t.Helper()
	families, err := s.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += fmt.Sprintf("{%s=%q}", l.GetName(), l.GetValue())
			}
			if _, ok := want[name]; ok {
				got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
