package cluster_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestServerIsObservableWhileItsJournalHangs freezes the connection to the NATS server until as many appends wait as may. Everything that an
// operator looks at must answer, and the server must end when it is told to.
func TestServerIsObservableWhileItsJournalHangs(t *testing.T) {
	testclass.Cluster(t)
	t.Parallel()
	u, err := url.Parse(natstest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	nats := harness.NewProxy(t, u.Host)
	engines := fleet.New(t, *seed)
	engines.Rate, engines.Faults = 500, nil
	args := []string{"--journal", "nats://" + nats.Addr(), "--subscribers-progress", "1s"}
	for i := range 4 {
		args = append(args, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	s := fleet.NewServer(t, args...)
	s.Start(t)
	client := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, s.Proxy.Addr()))
	metrics := func() harness.Metrics {
		t.Helper()
		m, err := s.Process.Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	harness.WaitFor(t, func() bool { // each worker has entries
		list, err := client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, w := range list.GetWorkers() {
			if len(w.GetRanks()) > 0 && len(w.GetRanks()[0].GetBlocks()) > 0 {
				n++
			}
		}
		return n == 4
	})
	nats.Partition() // for good: a new connection would end the outage
	harness.WaitFor(t, func() bool { return metrics().Sum("kvcast_journal_appends_in_flight") >= 512 })

	looks := map[string]func(context.Context) error{
		"ListWorkers": func(ctx context.Context) error {
			_, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
			return err
		},
		"GetStatus": func(ctx context.Context) error {
			_, err := client.GetStatus(ctx, &kvcastv1.GetStatusRequest{})
			return err
		},
	}
	for _, path := range []string{"/metrics", "/healthz", "/readyz"} {
		looks[path] = func(ctx context.Context) error {
			_, err := s.Process.Get(ctx, path)
			if err != nil && path == "/readyz" && strings.Contains(err.Error(), "503") {
				return nil
			}
			return err
		}
	}
	// look looks at everything some times.
	look := func(when string) {
		t.Helper()
		slowest := time.Duration(0)
		for range 10 {
			for name, look := range looks {
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				err := look(ctx)
				cancel()
				if err != nil {
					t.Fatalf("%s does not answer %s: %v", name, when, err)
				}
				slowest = max(slowest, time.Since(began))
			}
		}
		t.Logf("%s the slowest answer took %v", when, slowest)
	}
	look("while appends wait")
	harness.WaitFor(t, func() bool { // no append is acknowledged any more
		_, err := s.Process.Get(t.Context(), "/readyz")
		return err != nil && strings.Contains(err.Error(), "503")
	})
	look("while the journal stalls")
	var workers []*kvcastv1.WorkerStatus
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the last workers: %v", workers)
		}
	})
	harness.WaitFor(t, func() bool {
		list, err := client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		workers = list.GetWorkers()
		return len(workers) == 4 && !slices.ContainsFunc(workers, func(w *kvcastv1.WorkerStatus) bool {
			return w.GetState() != kvcastv1.WorkerState_WORKER_STATE_DEGRADED || !isStale(w.GetRanks()[0])
		})
	})
	began := time.Now()
	if err := s.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Process.Ended():
		t.Logf("ended after %v", time.Since(began))
	case <-harness.Context(t).Done():
		t.Error("the server has not ended")
	}
}
