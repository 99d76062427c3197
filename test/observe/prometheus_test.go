package observe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

const (
	job = "kvcast"
	// scrapeInterval is Prometheus', which also bounds a scrape, and rateInterval what Grafana would make of it: four times.
	scrapeInterval = 2 * time.Second
	rateInterval   = "8s"
)

// prometheus is a running Prometheus.
type prometheus struct {
	t   *testing.T
	url string
}

// startPrometheus starts a Prometheus that scrapes servers and evaluates the alert rules at an interval. The test stops it.
func startPrometheus(t *testing.T, interval time.Duration, servers ...*harness.Process) *prometheus {
	t.Helper()
	rules, err := filepath.Abs(rulesDir + "/kvcast.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return startPrometheusWith(t, interval, rules, adminAddresses(t, servers...)...)
}

// adminAddresses returns the addresses of servers' metrics, which are the label instance.
func adminAddresses(t *testing.T, servers ...*harness.Process) (addresses []string) {
	t.Helper()
	for _, s := range servers {
		admin, err := s.Admin()
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, admin)
	}
	return addresses
}

// startPrometheusWith is startPrometheus with a file of rules, and addresses that need not serve.
func startPrometheusWith(t *testing.T, interval time.Duration, rules string, addresses ...string) *prometheus {
	t.Helper()
	program := needs(t, "prometheus")
	targets := make([]string, len(addresses))
	for i, a := range addresses {
		targets[i] = strconv.Quote(a)
	}
	dir := t.TempDir()
	config := fmt.Sprintf("global: {scrape_interval: %s, evaluation_interval: %s}\nrule_files: [%q]\nscrape_configs: [{job_name: %s, static_configs: [{targets: [%s]}]}]\n",
		interval, interval, rules, job, strings.Join(targets, ", "))
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
	cmd := exec.Command(program, "--config.file", filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path", filepath.Join(dir, "data"), //nolint:noctx // the test stops it
		"--web.listen-address", address, "--log.level", "warn")
	var log strings.Builder
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("Prometheus' log:\n%s", log.String())
		}
	})
	p := &prometheus{t, "http://" + address}
	harness.WaitFor(t, func() bool {
		select {
		case <-ended:
			t.Fatal("Prometheus has ended")
		default:
		}
		return p.get(t.Context(), "/api/v1/status/buildinfo", nil, &json.RawMessage{}) == nil
	})
	return p
}

// get calls Prometheus' API.
func (p *prometheus) get(ctx context.Context, path string, query url.Values, to any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path+"?"+query.Encode(), http.NoBody)
	if err != nil {
		return err
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	answer := struct {
		Error string
		Data  any
	}{Data: to}
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return nil
}

// isEmpty reports whether a query has no value but NaN. A query that Prometheus refuses fails the test.
func (p *prometheus) isEmpty(query string) bool {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	if err := p.get(p.t.Context(), "/api/v1/query", url.Values{"query": {query}}, &data); err != nil {
		p.t.Fatalf("%s: %v", query, err)
	}
	return !slices.ContainsFunc(data.Result, func(r struct{ Value [2]any }) bool { return r.Value[1] != "NaN" })
}

var labelValues = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)

// values returns what a variable of the dashboard offers.
func (p *prometheus) values(v variable) (names []string) {
	p.t.Helper()
	m := labelValues.FindStringSubmatch(resolve(v.Definition, job, rateInterval))
	if m == nil {
		p.t.Fatalf("variable %s has the query %q, want label_values(METRIC, LABEL)", v.Name, v.Definition)
	}
	if err := p.get(p.t.Context(), "/api/v1/label/"+m[2]+"/values", url.Values{"match[]": {m[1]}}, &names); err != nil {
		p.t.Fatal(err)
	}
	return names
}

// TestDashboardShowsARunningCluster runs every query of the dashboard against two servers that share a journal, while engines
// lose messages, peers send what is refused, and routers subscribe and match.
func TestDashboardShowsARunningCluster(t *testing.T) {
	testclass.Process(t)
	needs(t, "prometheus")
	t.Setenv("GOMEMLIMIT", "4GiB") // the dashboard shows it
	engines := fleet.New(t, 1)
	args := []string{"--journal", natstest.Start(t), "--journal-checkpoint-bytes", "64KiB", "--bind", bindAny, "--config", withDiscovery(t, "[]")}
	for i := range 4 {
		args = append(args, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	skipped := enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Endpoint: "tcp://*:*"}})
	port := skipped.Endpoint()[strings.LastIndexByte(skipped.Endpoint(), ':')+1:]
	args = append(args, "--worker", "name=skipped,connect=tcp://127.0.0.1:"+port+",replay="+skipped.ReplayEndpoint())
	servers := []*harness.Process{fleet.Start(t, args...), fleet.Start(t, args...)}
	addr := fleet.Address(t, servers[0])
	fleet.Address(t, servers[1])
	fleet.Follow(t, addr, fleet.RouterConfig{})
	p := startPrometheus(t, scrapeInterval, servers...)
	sendFaults(t, servers[0])
	conn := harness.Dial(t, addr)
	routers, workers := kvcastv1.NewRouterEventServiceClient(conn), kvcastv1.NewWorkerServiceClient(conn)
	d := readDashboard(t)
	var empty []string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("empty:\n%s", strings.Join(empty, "\n"))
		}
	})
	queries := make(map[string]string)
	for _, panel := range d.Panels {
		for _, q := range panel.Targets {
			queries[panel.Title+" "+q.RefID] = resolve(q.Expr, job, rateInterval)
		}
	}
	late := 0
	await(t, func() bool { // rates need two scrapes, and what happens between them
		late++
		// The worker may move to the other server, which counts from zero.
		if _, err := skipped.Publish(enginetest.Stored(1), wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{1}, Medium: "unheard of"}); err != nil {
			t.Fatal(err)
		}
		if _, err := workers.RegisterWorker(harness.Context(t), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name:    fmt.Sprintf("late-%d", late), // at an address of the loopback interface that no other worker has
			Sources: []*kvcastv1.SourceSpec{{Connect: fmt.Sprintf("tcp://127.1.%d.%d:%s", late/256, late%256, port)}},
		}}); err != nil {
			t.Fatal(err)
		}
		if _, err := routers.MatchPrefix(harness.Context(t), &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{1, 2, 3, 4}}}, Model: "m"}); err != nil {
			t.Fatal(err)
		}
		empty = empty[:0]
		for name, q := range queries {
			if p.isEmpty(q) {
				empty = append(empty, name+": "+q)
			} else {
				delete(queries, name)
			}
		}
		return len(empty) == 0
	})
	for _, v := range d.Templating.List[1:] {
		if names := p.values(v); len(names) == 0 || v.Name == "job" && !slices.Equal(names, []string{job}) || v.Name == "instance" && len(names) != len(servers) {
			t.Errorf("variable %s has the values %q", v.Name, names)
		}
	}
	var rules struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	await(t, func() bool {
		if err := p.get(t.Context(), "/api/v1/rules", nil, &rules); err != nil {
			t.Fatal(err)
		}
		return len(rules.Groups) == 1 && !slices.ContainsFunc(rules.Groups[0].Rules, func(r struct{ Name, Health, LastError string }) bool { return r.Health == "unknown" })
	})
	for _, r := range rules.Groups[0].Rules {
		if r.Health != "ok" {
			t.Errorf("%s: %s", r.Name, r.LastError)
		}
	}
}

// await polls a condition at the interval of scrapes until it is true. The test fails after harness.Timeout.
func await(t *testing.T, condition func() bool) {
	t.Helper()
	poll := time.NewTicker(scrapeInterval)
	defer poll.Stop()
	for ctx := harness.Context(t); !condition(); {
		select {
		case <-poll.C:
		case <-ctx.Done():
			t.Fatal("the condition did not become true in time")
		}
	}
}
