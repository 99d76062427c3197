package server_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/registration"
)

// recordedWorkers records added and removed workers, or returns an error. It validates workers as ingest does.
type recordedWorkers struct {
	err     error
	added   []config.Worker
	removed []string
}

func (r *recordedWorkers) AddWorker(_ context.Context, c config.Worker) error {
	if err := (config.Config{Workers: []config.Worker{c}}).Validate(); err != nil {
		return err
	}
	r.added = append(r.added, c)
	return errors.Join(nil, r.err)
}

func (r *recordedWorkers) RemoveWorker(_ context.Context, name string, why feed.RemoveReason) error {
	r.removed = append(r.removed, fmt.Sprint(name, " ", why))
	return r.err
}

// spec returns a valid worker.
func spec() *kvcastv1.WorkerSpec {
	return &kvcastv1.WorkerSpec{Name: "v", Sources: []*kvcastv1.SourceSpec{{Connect: "tcp://h:1"}}}
}

func registerFails(err error, spec *kvcastv1.WorkerSpec) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(&recordedWorkers{err: err}, config.Hosts{})}, journal.Config{})
		_, err := kvcastv1.NewWorkerServiceClient(h.conn).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: spec})
		return h, err
	}
}

func deregisterFails(err error, name string) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(&recordedWorkers{err: err}, config.Hosts{})}, journal.Config{})
		h.addWorker()
		_, err := kvcastv1.NewWorkerServiceClient(h.conn).DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: name})
		return h, err
	}
}

func TestRegisterAndDeregisterWorker(t *testing.T) {
	t.Parallel()
	r := &recordedWorkers{}
	h := startingOverTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(r, config.Hosts{})}) // a starting server registers workers
	client := kvcastv1.NewWorkerServiceClient(h.conn)
	if _, err := client.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
		Name: "v", Model: "m", BlockSize: 16, Endpoint: "h:8000", Labels: map[string]string{"zone": "a"}, Consolidate: kvcastv1.Consolidate_CONSOLIDATE_DEDUP,
		Sources: []*kvcastv1.SourceSpec{{Engine: "sglang", Connect: "tcp://h:1", Replay: "tcp://h:9", FirstRank: 4, DpSize: 2, Topic: "kv", Copies: kvcastv1.Copies_COPIES_COUNTED}},
	}}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	want := &recordedWorkers{
		added: []config.Worker{{
			Name: "v", Model: "m", BlockSize: 16, Endpoint: "h:8000", Labels: map[string]string{"zone": "a"},
			Sources:     []config.Source{{Engine: feed.EngineSGLang, Connect: "tcp://h:1", Replay: "tcp://h:9", FirstRank: 4, DPSize: 2, Topic: "kv", Copies: config.CopiesCounted}},
			Consolidate: feed.ConsolidateDedup,
		}},
		removed: []string{fmt.Sprint("v ", feed.RemovedDeregistered)},
	}
	if diff := cmp.Diff(want, r, cmp.AllowUnexported(recordedWorkers{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestRegisteredEndpointsAreRestricted registers endpoints that are not TCP, or whose hosts are not allowed.
func TestRegisteredEndpointsAreRestricted(t *testing.T) {
	t.Parallel()
	hosts, err := config.ParseHosts([]string{"10.0.0.0/8", "*.pods"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		hosts           config.Hosts
		connect, replay string
		want            []string // refused fields
	}{
		{connect: "tcp://192.0.2.1:1", replay: "tcp://h:2"},
		{connect: "ipc:///run/docker.sock", want: []string{"worker.sources[0].connect"}},
		{connect: "tcp://h:1", replay: "ipc:///run/docker.sock", want: []string{"worker.sources[0].replay"}},
		{connect: "smg://h:1"},
		{hosts: hosts, connect: "openengine://vllm-0.pods:2"},
		{hosts: hosts, connect: "smg://192.0.2.1:1", want: []string{"worker.sources[0].connect"}},
		{hosts: hosts, connect: "workers://disk"},
		{hosts: hosts, connect: "lmcache-coordinator://10.1.2.3:1"},
		{hosts: hosts, connect: "lmcache-coordinator://192.0.2.1:1", want: []string{"worker.sources[0].connect"}},
		{hosts: hosts, connect: "tcp://10.1.2.3:1", replay: "tcp://vllm-0.pods:2"},
		{hosts: hosts, connect: "tcp://169.254.169.254:80", want: []string{"worker.sources[0].connect"}},
		{hosts: hosts, connect: "tcp://10.1.2.3:1", replay: "tcp://localhost:2", want: []string{"worker.sources[0].replay"}},
	} {
		r := &recordedWorkers{}
		client := kvcastv1.NewWorkerServiceClient(overTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(r, tt.hosts)}, journal.Config{}).conn)
		_, err := client.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name: "v", Model: "m", Sources: []*kvcastv1.SourceSpec{{Connect: tt.connect, Replay: tt.replay}},
		}})
		var got []string
		for _, d := range status.Convert(err).Details() {
			if bad, ok := d.(*errdetails.BadRequest); ok {
				for _, v := range bad.GetFieldViolations() {
					got = append(got, v.GetField())
				}
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || (err == nil) != (len(r.added) == 1) {
			t.Errorf("%s, %s: %v, added %v (-want +got):\n%s", tt.connect, tt.replay, err, r.added, diff)
		}
	}
}

func TestRegisterWorkerWithSeveralSources(t *testing.T) {
	t.Parallel()
	r := &recordedWorkers{}
	client := kvcastv1.NewWorkerServiceClient(overTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(r, config.Hosts{})}, journal.Config{}).conn)
	for c, want := range map[kvcastv1.Consolidate]feed.Consolidate{
		kvcastv1.Consolidate_CONSOLIDATE_UNSPECIFIED: feed.ConsolidateDedup,
		kvcastv1.Consolidate_CONSOLIDATE_DEDUP:       feed.ConsolidateDedup,
		kvcastv1.Consolidate_CONSOLIDATE_PASSTHROUGH: feed.ConsolidatePassthrough,
	} {
		r.added = nil
		if _, err := client.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name: "v", Consolidate: c, Sources: []*kvcastv1.SourceSpec{{Engine: "GPU", Connect: "tcp://h:1"}, {Engine: "KVBM", Connect: "tcp://h:2"}},
		}}); err != nil {
			t.Error(err)
			continue
		}
		if diff := cmp.Diff([]config.Worker{{Name: "v", Consolidate: want, Sources: []config.Source{
			{Engine: feed.EngineVLLM, Connect: "tcp://h:1"}, {Engine: feed.EngineKVBM, Connect: "tcp://h:2"},
		}}}, r.added); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c, diff)
		}
	}
}

// TestViolationsUseContractNames registers values that ingest refuses, and values that the contract does not have.
func TestViolationsUseContractNames(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{OpenRegistration: true, Workers: registration.New(&recordedWorkers{}, config.Hosts{})}, journal.Config{})
	client := kvcastv1.NewWorkerServiceClient(h.conn)
	source := func(change func(*kvcastv1.SourceSpec)) func(*kvcastv1.WorkerSpec) {
		return func(w *kvcastv1.WorkerSpec) { change(w.GetSources()[0]) }
	}
	for _, tt := range []struct {
		change func(*kvcastv1.WorkerSpec)
		want   []string // prefixes of the violations
	}{
		{func(w *kvcastv1.WorkerSpec) { w.Name = "" }, []string{`worker.name: "" is not allowed: want 1 to 253 bytes`}},
		{func(w *kvcastv1.WorkerSpec) { w.Name, w.Model = "a\tb", "\n" }, []string{`worker.name: "a\tb" is not allowed: want`, `worker.model: "\n" is not allowed: want`}},
		{func(w *kvcastv1.WorkerSpec) { w.Model = strings.Repeat("m", 1<<16) }, []string{`worker.model: "` + strings.Repeat("m", 64) + `" is not allowed: want at most 1024`}},
		{func(w *kvcastv1.WorkerSpec) { w.BlockSize = 65_537 }, []string{`worker.block_size: 65537 is not allowed: want at most 65536`}},
		{func(w *kvcastv1.WorkerSpec) { w.Endpoint = "\x1b[2J" }, []string{`worker.endpoint: "\x1b[2J" is not allowed: want at most 1024 bytes of UTF-8 without`}},
		{func(w *kvcastv1.WorkerSpec) { w.Labels = map[string]string{"a": "\x00"} }, []string{`worker.labels["a"]: "\x00" is not allowed: want at most 1024 bytes of UTF-8 without`}},
		{func(w *kvcastv1.WorkerSpec) { w.Labels = map[string]string{strings.Repeat("K", 1<<16): "a"} }, []string{`worker.labels["` + strings.Repeat("K", 96-len(`worker.labels["`)) + `: "` + strings.Repeat("K", 64) + `" is not allowed: want a key of 1 to 253`}},
		{func(w *kvcastv1.WorkerSpec) { w.Sources = nil }, []string{`worker.sources: 0 is not allowed: want one source at least`}},
		{func(w *kvcastv1.WorkerSpec) {
			for range feed.MaxSources {
				w.Sources = append(w.Sources, w.Sources[0])
			}
		}, []string{`worker.sources: 129 is not allowed: want at most 128`}},
		{func(w *kvcastv1.WorkerSpec) { w.Consolidate = 7 }, []string{`worker.consolidate: 7 is not allowed: want CONSOLIDATE_DEDUP or CONSOLIDATE_PASSTHROUGH`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Copies = 9 }), []string{`worker.sources[0].copies: 9 is not allowed: want COPIES_AUTO, COPIES_COUNTED or COPIES_ANNOUNCED_LAST`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Engine = "gpu" }), []string{`worker.sources[0].engine: "gpu" is not allowed: want vllm,`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Engine = "llama" }), []string{`worker.sources[0].engine: "llama" is not allowed: want vllm,`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Connect, s.Replay = "", "h" }), []string{`worker.sources[0].connect: "" is not allowed: want tcp://HOST:PORT`, `worker.sources[0].replay: "h" is not allowed: want tcp://`}},
		{source(func(s *kvcastv1.SourceSpec) { s.DpSize = 1<<32 - 1 }), []string{`worker.sources[0].dp_size: 4294967295 is not allowed: want 1 to 1024`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Connect, s.DpSize = "ipc://x", 2 }), []string{`worker.sources[0].connect: "ipc://x" is not allowed: want tcp://HOST:PORT`}},
		{source(func(s *kvcastv1.SourceSpec) { s.Topic = "\n" }), []string{`worker.sources[0].topic: "\n" is not allowed: want at most 1024 bytes of UTF-8 without`}},
	} {
		spec := spec()
		tt.change(spec)
		_, err := client.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: spec})
		wantStatus(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
		var got []string
		for _, d := range status.Convert(err).Details() {
			if bad, ok := d.(*errdetails.BadRequest); ok {
				for _, v := range bad.GetFieldViolations() {
					got = append(got, v.GetField()+": "+v.GetDescription())
				}
			}
		}
		if len(got) != len(tt.want) || status.Convert(err).Message() != strings.Join(got, "; ") {
			t.Errorf("got %q and message %q, want %q", got, status.Convert(err).Message(), tt.want)
			continue
		}
		for i := range got {
			if !strings.HasPrefix(got[i], tt.want[i]) {
				t.Errorf("got  %s\nwant %s", got[i], tt.want[i])
			}
		}
	}
}

// TestWorkerStates derives the state of a worker from the states of its sources.
func TestWorkerStates(t *testing.T) {
	t.Parallel()
	const (
		connecting = kvcastv1.SourceState_SOURCE_STATE_CONNECTING
		catchingUp = kvcastv1.SourceState_SOURCE_STATE_CATCHING_UP
		live       = kvcastv1.SourceState_SOURCE_STATE_LIVE
		repairing  = kvcastv1.SourceState_SOURCE_STATE_REPAIRING
		suspect    = kvcastv1.SourceState_SOURCE_STATE_SUSPECT
	)
	var sources []*kvcastv1.SourceStatus
	h := overTCP(t, server.Config{Sources: func() map[string][]*kvcastv1.SourceStatus {
		return map[string][]*kvcastv1.SourceStatus{"w": sources}
	}}, journal.Config{})
	h.addWorker()
	for _, tt := range []struct {
		states  []kvcastv1.SourceState
		started bool
		want    kvcastv1.WorkerState
	}{
		{nil, false, kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED},
		{[]kvcastv1.SourceState{connecting}, false, kvcastv1.WorkerState_WORKER_STATE_CONNECTING},
		{[]kvcastv1.SourceState{catchingUp, connecting}, false, kvcastv1.WorkerState_WORKER_STATE_CONNECTING},
		{[]kvcastv1.SourceState{live, live}, false, kvcastv1.WorkerState_WORKER_STATE_LIVE},
		{[]kvcastv1.SourceState{live}, true, kvcastv1.WorkerState_WORKER_STATE_LIVE},
		{[]kvcastv1.SourceState{live, connecting}, true, kvcastv1.WorkerState_WORKER_STATE_DEGRADED},
		{[]kvcastv1.SourceState{live, repairing}, true, kvcastv1.WorkerState_WORKER_STATE_DEGRADED},
		{[]kvcastv1.SourceState{suspect}, true, kvcastv1.WorkerState_WORKER_STATE_DEGRADED},
		{[]kvcastv1.SourceState{catchingUp}, true, kvcastv1.WorkerState_WORKER_STATE_DEGRADED},
		{[]kvcastv1.SourceState{connecting, connecting}, true, kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED},
	} {
		sources = nil
		for _, s := range tt.states {
			sources = append(sources, &kvcastv1.SourceStatus{State: s, Started: tt.started})
		}
		list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got := list.GetWorkers()[0].GetState(); got != tt.want {
			t.Errorf("%v, started: %v: got %v, want %v", tt.states, tt.started, got, tt.want)
		}
	}
}
