package observe_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

const (
	// outage is how long the server reaches no NATS server: longer than any alert about it waits.
	outage = 2 * time.Minute
	// outageScrapes is the interval of scrapes, and bounds one. A scrape takes milliseconds.
	outageScrapes = 5 * time.Second
)

// TestAlertsFireInAnOutage scrapes a server that reaches no NATS server for two minutes while its engine goes on. Each scrape and each call about its state is
// answered, the alerts fire, and all of it ends with the outage.
func TestAlertsFireInAnOutage(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	nats := strings.TrimPrefix(natstest.Start(t), "nats://")
	proxy := harness.NewProxy(t, nats)
	engines := fleet.New(t, 1)
	engines.Faults = nil
	server := fleet.Start(t, "--journal", "nats://"+proxy.Addr(), "--worker", engines.Add("engine-0", 1, fleet.Bound()).Flag())
	addr := fleet.Address(t, server)
	p := startPrometheus(t, outageScrapes, server)
	client := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr))
	harness.WaitFor(t, func() bool { return isReady(t, server) })

	proxy.Retarget("")
	proxy.Cut()
	ended := time.NewTimer(outage)
	defer ended.Stop()
	poll := time.NewTicker(time.Second)
	defer poll.Stop()
	for waiting := true; waiting; {
		select {
		case <-ended.C:
			waiting = false
		case <-poll.C:
		}
		if _, err := client.GetStatus(harness.Context(t), &kvcastv1.GetStatusRequest{}); err != nil {
			t.Errorf("GetStatus in the outage: %v", err)
		}
		if _, err := client.ListWorkers(harness.Context(t), &kvcastv1.ListWorkersRequest{}); err != nil {
			t.Errorf("ListWorkers in the outage: %v", err)
		}
		if _, err := server.Get(harness.Context(t), "/healthz"); err != nil {
			t.Errorf("healthz in the outage: %v", err)
		}
	}
	if isReady(t, server) {
		t.Error("the server is ready after an outage of two minutes")
	}
	alerts := []string{"KvcastStale", "KvcastJournalDisconnected", "KvcastJournalStalled", "KvcastIsolated"}
	for _, alert := range alerts {
		await(t, func() bool { return !p.isEmpty(fmt.Sprintf(`ALERTS{alertname=%q, alertstate="firing"}`, alert)) })
	}
	scraped := fmt.Sprintf("[%ds]", int(outage.Seconds()))
	if q := "min_over_time(up" + scraped + ") == 1 and count_over_time(up" + scraped + ") >= " + fmt.Sprint(int(outage/outageScrapes/2)); p.isEmpty(q) {
		var series any
		err := p.get(t.Context(), "/api/v1/query", url.Values{"query": {"up" + scraped}}, &series)
		t.Errorf("scrapes failed in the outage: %v, %v", series, err)
	}

	proxy.Retarget(nats)
	harness.WaitFor(t, func() bool { return isReady(t, server) })
	for _, alert := range alerts {
		await(t, func() bool { return p.isEmpty(fmt.Sprintf("ALERTS{alertname=%q}", alert)) })
	}
	router := fleet.Follow(t, addr, fleet.RouterConfig{})
	engines.WantViews(router)
}

// isReady reports whether /readyz says so.
func isReady(t *testing.T, p *harness.Process) bool {
	t.Helper()
	_, err := p.Get(harness.Context(t), "/readyz")
	return err == nil
}
