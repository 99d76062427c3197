package observe_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
	"github.com/kvcast/kvcast/test/harness/natstest"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

const bindAny = "tcp://127.0.0.1:*"

var listening = regexp.MustCompile(`msg=listening endpoint=tcp://(\S+)`)

// TestMetricsOfIdleServersAreDocumented checks both directions for each kind of journal: what is served is documented, and what is
// documented as served is.
func TestMetricsOfIdleServersAreDocumented(t *testing.T) {
	testclass.Process(t)
	rows := documentedMetrics(t)
	cert, key := harness.NewAuthority(t).Issue("server")
	for name, test := range map[string]struct {
		journal    func(*testing.T) string
		conditions []string
		flags      []string
	}{
		"memory": {func(*testing.T) string { return "memory" }, nil, nil},
		"file":   {func(t *testing.T) string { return "file:" + t.TempDir() }, []string{"durable", "file"}, nil},
		"nats":   {func(t *testing.T) string { return natstest.Start(t) }, []string{"durable", "nats"}, nil},
		"egress": {func(*testing.T) string { return "memory" }, []string{"egress", "smg"}, []string{"--emit-token-ids", "--retain-token-ids", "--egress-zmq-bind", bindAny, "--egress-smg-enabled"}},
		"tls":    {func(*testing.T) string { return "memory" }, []string{"tls"}, []string{"--tls-cert", cert, "--tls-key", key}},
	} {
		t.Run(name, func(t *testing.T) {
			p := fleet.Start(t, append(test.flags, "--bind", bindAny, "--journal", test.journal(t))...)
			fleet.Address(t, p)
			served, text, err := families(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range disagreements(rows, served, test.conditions, true) {
				t.Error(d)
			}
			lint(t, text)
		})
	}
}

// lint reports names that do not follow Prometheus' conventions.
func lint(t *testing.T, text string) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Error(err)
	}
	for _, p := range problems {
		if !strings.HasPrefix(p.Metric, "go_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// awaitAgreement waits until a server's metrics agree with the documentation, and returns the text of the metrics.
func awaitAgreement(t *testing.T, p *harness.Process, conditions ...string) {
	t.Helper()
	rows, text := documentedMetrics(t), ""
	var last []string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the last disagreements:\n%s", strings.Join(last, "\n"))
		}
	})
	harness.WaitFor(t, func() bool {
		served, now, err := families(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		last, text = disagreements(rows, served, conditions, false), now
		return len(last) == 0
	})
	lint(t, text)
}

// sendFaults sends what a server's listener rejects: a peer that speaks another protocol, a message and a batch.
func sendFaults(t *testing.T, p *harness.Process) {
	t.Helper()
	endpoint, err := p.Logged(listening)
	if err != nil {
		t.Fatal(err)
	}
	// A server that shares a journal closes connections of engines while it cannot store what they send, also when they have sent.
	counted := func(metric string) bool {
		m, err := p.Metrics(harness.Context(t))
		return err == nil && m.Sum(metric) > 0
	}
	harness.WaitFor(t, func() bool {
		if counted("kvcast_ingest_peers_rejected_total") {
			return true
		}
		stranger, err := new(net.Dialer).DialContext(t.Context(), "tcp", endpoint)
		if err != nil {
			return false
		}
		t.Cleanup(func() { _ = stranger.Close() })
		_, _ = fmt.Fprint(stranger, "GET / HTTP/1.1\r\nHost: kvcast.example.com\r\nUser-Agent: no ZeroMQ publisher\r\n\r\n")
		return false
	})
	harness.WaitFor(t, func() bool {
		if counted("kvcast_ingest_batches_rejected_total") && counted("kvcast_ingest_messages_refused_total") {
			return true
		}
		faulty, err := rawzmtp.Dial(t.Context(), zmtp.PUB, endpoint, harness.Timeout)
		if err != nil {
			return false
		}
		t.Cleanup(func() { _ = faulty.Close() })
		faulty.Message([]byte("kv@pod@m"), []byte("no seq"), []byte{0xc1})
		faulty.Message([]byte("kv@pod@m"), make([]byte, 8), []byte{0xc1})
		_ = faulty.Flush()
		return false
	})
}

// TestMetricsOfBusyServersAreDocumented makes every event happen that a metric waits for.
func TestMetricsOfBusyServersAreDocumented(t *testing.T) {
	testclass.Process(t)
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	offload := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, `workers:
  - name: w
    consolidate: dedup
    sources:
      - {engine: vllm, connect: %q, replay: %q}
      - {engine: kvbm, connect: %q, replay: %q}
`, engine.Endpoint(), engine.ReplayEndpoint(), offload.Endpoint(), offload.ReplayEndpoint()), 0o600); err != nil {
		t.Fatal(err)
	}
	p := fleet.Start(t, "--config", file, "--bind", bindAny)
	addr := fleet.Address(t, p)
	fleet.Follow(t, addr, fleet.RouterConfig{})
	if _, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr)).ListWorkers(harness.Context(t), nil); err != nil {
		t.Fatal(err)
	}
	for _, source := range []*simulator.Publisher{engine, offload} {
		if err := source.WaitReplays(harness.Context(t), 1); err != nil { // batches from replays have no delay
			t.Fatal(err)
		}
		publish(t, source, enginetest.Stored(1))
	}
	overpredict(t, addr, "w")
	for _, source := range []*simulator.Publisher{engine, offload} {
		publish(t, source, unheardOf)
	}
	sendFaults(t, p)
	awaitAgreement(t, p, "worker", "event", "dedup")
}

// overpredict reports so many outcomes of a worker that its rank is OVERPREDICTED.
func overpredict(t *testing.T, addr, worker string) {
	t.Helper()
	client := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr))
	harness.WaitFor(t, func() bool { // the rank is EXACT
		s, err := client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		o := &kvcastv1.Outcome{Worker: worker, Position: &kvcastv1.Position{Epoch: s.GetEpoch(), Seq: s.GetNewestSeq()}, PredictedTokens: 16, Trust: kvcastv1.Trust_TRUST_EXACT}
		if _, err := client.ReportOutcome(t.Context(), &kvcastv1.ReportOutcomeRequest{Outcomes: slices.Repeat([]*kvcastv1.Outcome{o}, 8)}); err != nil {
			t.Fatal(err)
		}
		list, err := client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: []string{worker}}})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(list.GetWorkers(), func(w *kvcastv1.WorkerStatus) bool {
			return slices.ContainsFunc(w.GetRanks(), func(r *kvcastv1.RankStatus) bool { return r.GetAccuracy().GetDetail() != "" })
		})
	})
}

// unheardOf is an event that is skipped.
var unheardOf = wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{1}, Medium: "unheard of"}

func publish(t *testing.T, engine *simulator.Publisher, e wire.Event) {
	t.Helper()
	if _, err := engine.Publish(e); err != nil {
		t.Fatal(err)
	}
}

// withDiscovery writes a configuration with a file of workers, and returns its path.
func withDiscovery(t *testing.T, workers string) string {
	t.Helper()
	dir := t.TempDir()
	found, config := filepath.Join(dir, "workers.yaml"), filepath.Join(dir, "kvcast.yaml")
	err := os.WriteFile(found, []byte(workers), 0o600)
	if err == nil {
		err = os.WriteFile(config, fmt.Appendf(nil, "discovery: [{file: %q}]\n", found), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestMetricsOfDiscoveryAreDocumented(t *testing.T) {
	testclass.Process(t)
	p := fleet.Start(t, "--config", withDiscovery(t, "[]"))
	fleet.Address(t, p)
	served, _, err := families(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range disagreements(documentedMetrics(t), served, []string{"discovery"}, true) {
		t.Error(d)
	}
}

func TestMetricsOfClustersAreDocumented(t *testing.T) {
	testclass.Process(t)
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	p := fleet.Start(t, "--journal", natstest.Start(t), "--worker", "name=w,connect="+engine.Endpoint()+",replay="+engine.ReplayEndpoint())
	fleet.Address(t, p)
	if _, err := engine.Publish(enginetest.Stored(1)); err != nil {
		t.Fatal(err)
	}
	if err := p.AwaitMetric(harness.Context(t), `kvcast_cluster_takeovers_total{reason="unowned"} 1`); err != nil {
		t.Fatal(err)
	}
	awaitAgreement(t, p, "worker", "durable", "nats")
}

// withLabel returns the names of the metrics that have a sample with a label's value.
func withLabel(served map[string]*dto.MetricFamily, label, value string) (names []string) {
	for name, f := range served {
		if slices.ContainsFunc(f.GetMetric(), func(m *dto.Metric) bool {
			return slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == label && l.GetValue() == value })
		}) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func TestMetricsOfAWorkerDisappearWithIt(t *testing.T) {
	testclass.Process(t)
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	offload := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	p := fleet.Start(t, "--bind", bindAny)
	addr := fleet.Address(t, p)
	workers := kvcastv1.NewWorkerServiceClient(harness.Dial(t, addr))
	if _, err := workers.RegisterWorker(harness.Context(t), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
		Name: "w", Sources: []*kvcastv1.SourceSpec{
			{Connect: engine.Endpoint(), Replay: engine.ReplayEndpoint()}, {Engine: "kvbm", Connect: offload.Endpoint()},
		},
	}}); err != nil {
		t.Fatal(err)
	}
	if err := engine.WaitReplays(harness.Context(t), 1); err != nil { // batches from replays have no delay
		t.Fatal(err)
	}
	publish(t, engine, enginetest.Stored(1))
	overpredict(t, addr, "w")
	publish(t, engine, unheardOf)
	var want []string
	for name, d := range documentedMetrics(t) {
		if slices.Contains(d.labels, "worker") && d.isServed([]string{"worker", "event", "dedup"}) &&
			name != "kvcast_ingest_batches_rejected_total" && name != "kvcast_ingest_messages_refused_total" {
			want = append(want, name)
		}
	}
	slices.Sort(want)
	diff := ""
	defer func() {
		if t.Failed() {
			t.Logf("the metrics of the worker (-want +got):\n%s", diff)
		}
	}()
	hash := uint64(1)
	harness.WaitFor(t, func() bool {
		hash++ // another replay may have read the batches before
		publish(t, engine, enginetest.Stored(hash))
		served, _, err := families(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		diff = cmp.Diff(want, withLabel(served, "worker", "w"))
		return diff == ""
	})
	if _, err := workers.DeregisterWorker(harness.Context(t), &kvcastv1.DeregisterWorkerRequest{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	served, _, err := families(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if left := withLabel(served, "worker", "w"); left != nil {
		t.Errorf("the worker was removed, and has the metrics %q", left)
	}
}

// TestPeersCannotAddMetricsWithoutBound sends thousands of names and ranks, to listeners and in calls.
func TestPeersCannotAddMetricsWithoutBound(t *testing.T) {
	testclass.Process(t)
	const maxWorkers, maxRanks, messages = 3, 4, 2000
	p := fleet.Start(t, "--bind", bindAny, "--ingest-max-workers", fmt.Sprint(maxWorkers), "--ingest-max-ranks", fmt.Sprint(maxRanks))
	conn := harness.Dial(t, fleet.Address(t, p))
	endpoint, err := p.Logged(listening)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := rawzmtp.Dial(t.Context(), zmtp.PUB, endpoint, harness.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	var enc wire.Encoder
	for i := range uint32(messages) {
		payload := enc.AppendBatch(nil, &wire.Batch{Time: 1, HasTime: true, Rank: i, HasRank: true, Events: []wire.Event{enginetest.Stored(1)}})
		topic := fmt.Sprintf("kv@pod-%d@model-%d", i%7, i)
		if i%2 == 0 {
			topic = fmt.Sprintf("kv@pod-%d@model", i)
		}
		peer.Message([]byte(topic), binary.BigEndian.AppendUint64(nil, uint64(i)), payload)
		_ = conn.Invoke(t.Context(), fmt.Sprintf("/kvcast.v1.Service%d/Method", i), &emptypb.Empty{}, &emptypb.Empty{}) // UNIMPLEMENTED
	}
	if err := peer.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := p.AwaitMetric(harness.Context(t), fmt.Sprintf(`kvcast_ingest_messages_total{worker=""} %d`, messages)); err != nil {
		t.Fatal(err)
	}
	served, _, err := families(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	values, series := make(map[string]map[string]bool), 0
	for _, f := range served {
		series += len(f.GetMetric())
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if values[l.GetName()] == nil {
					values[l.GetName()] = make(map[string]bool)
				}
				values[l.GetName()][l.GetValue()] = true
			}
		}
	}
	for label, most := range map[string]int{"worker": maxWorkers + 1, "dp_rank": maxWorkers + maxRanks, "grpc_method": 0, "grpc_service": 0} {
		if n := len(values[label]); n > most {
			t.Errorf("label %s has %d values, want at most %d", label, n, most)
		}
	}
	if most := 100 + maxWorkers*150; series > most || len(values["worker"]) < maxWorkers {
		t.Errorf("there are %d series and workers %v, want at most %d and %d workers", series, values["worker"], most, maxWorkers)
	}
}
