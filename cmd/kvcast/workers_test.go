package main_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// publisherOf starts a publisher with a replay socket.
func publisherOf(t *testing.T, cfg simulator.SocketConfig) *simulator.Publisher {
	t.Helper()
	if cfg.Replay == "" {
		cfg.Replay = "tcp://127.0.0.1:*"
	}
	p, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: cfg})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close publisher: %v", err)
		}
	})
	return p
}

// storedOf returns a store of a block.
func storedOf(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2}, BlockSize: 2}
}

// portOf returns the port of a tcp endpoint.
func portOf(endpoint string) string { return endpoint[strings.LastIndexByte(endpoint, ':')+1:] }

// eventReader reads and checks a stream from the earliest entry.
type eventReader struct {
	t       *testing.T
	stream  grpc.ServerStreamingClient[kvcastv1.SubscribeResponse]
	checker *checker.Checker
	// pending are the events of each worker that until has read and not returned.
	pending map[string][]string
}

func follow(t *testing.T, s *process) *eventReader {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	t.Cleanup(cancel)
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}, ClientId: "follower"}
	stream, err := s.Client().Subscribe(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	f := &eventReader{t: t, stream: stream, checker: checker.New(checker.Options{}), pending: make(map[string][]string)}
	if err := f.checker.Begin(req); err != nil {
		t.Fatal(err)
	}
	return f
}

// until reads until an event of a worker. It returns the worker's earlier events since the last call.
func (f *eventReader) until(worker, want string) (before []string) {
	f.t.Helper()
	for {
		if i := slices.Index(f.pending[worker], want); i >= 0 {
			before, f.pending[worker] = f.pending[worker][:i], f.pending[worker][i+1:]
			return before
		}
		m, err := f.stream.Recv()
		if err != nil {
			f.t.Fatalf("wait for %s of %s: %v; read %q", want, worker, err, f.pending)
		}
		if err := f.checker.Receive(m); err != nil {
			f.t.Fatal(err)
		}
		for _, e := range m.GetEntries() {
			for _, ev := range e.GetEvents() {
				f.pending[e.GetWorker()] = append(f.pending[e.GetWorker()], describe(ev))
			}
		}
	}
}

// describe returns an event in a few words.
func describe(ev *kvcastv1.RouterEvent) string {
	switch e := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_WorkerAdded:
		return "added " + e.WorkerAdded.GetModel()
	case *kvcastv1.RouterEvent_WorkerRemoved:
		return "removed " + strings.TrimPrefix(e.WorkerRemoved.GetReason().String(), "REASON_")
	case *kvcastv1.RouterEvent_Gap:
		return "gap " + strings.TrimSpace(strings.TrimPrefix(e.Gap.GetReason().String(), "REASON_")+" "+e.Gap.GetDetail())
	case *kvcastv1.RouterEvent_Resolved:
		return "resolved " + strings.TrimPrefix(e.Resolved.GetReasons()[0].String(), "REASON_")
	case *kvcastv1.RouterEvent_Stored:
		return fmt.Sprint("stored ", e.Stored.GetBlockHashes())
	case *kvcastv1.RouterEvent_Removed:
		return fmt.Sprint("gone ", e.Removed.GetBlockHashes(), " ", ev.GetTier())
	case *kvcastv1.RouterEvent_Cleared:
		return "cleared"
	default:
		return "something else"
	}
}

func TestRegisterAndDeregisterWorkers(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serve(t, "--config", configFile(t, "ingest: {max_workers: 2}")) // without workers and listeners
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1)) // before kvcast connects
	f, operator := follow(t, s), s.Operator()
	spec := &kvcastv1.WorkerSpec{Name: "w", Model: "m", Sources: []*kvcastv1.SourceSpec{{Connect: p.Endpoint(), Replay: p.ReplayEndpoint()}}}
	register := func() error {
		_, err := operator.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: spec})
		return err
	}
	deregister := func(name string) error {
		_, err := operator.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: name})
		return err
	}
	for range 2 {
		if err := register(); err != nil {
			t.Fatal(err)
		}
		f.until("w", "added m")
		f.until("w", "stored [1]")
		if err := register(); status.Code(err) != codes.AlreadyExists {
			t.Errorf("registered twice: got %v, want ALREADY_EXISTS", err)
		}
		if err := deregister("w"); err != nil {
			t.Fatal(err)
		}
		f.until("w", "removed DEREGISTERED")
		if err := deregister("w"); status.Code(err) != codes.NotFound {
			t.Errorf("deregistered twice: got %v, want NOT_FOUND", err)
		}
	}
	spec.Sources[0].Connect = "tcp://h"
	if err := register(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "worker.sources[0].connect: ") {
		t.Errorf("a bad endpoint: got %v", err)
	}
	for i, name := range []string{"a", "b", "c"} {
		spec.Name, spec.Sources[0] = name, &kvcastv1.SourceSpec{Connect: fmt.Sprintf("tcp://127.0.0.1:%d", i+1), Replay: "tcp://127.0.0.1:1"}
		if err := register(); name == "b" && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), `worker.sources[0].replay: "tcp://127.0.0.1:1" is not allowed: want a socket of its own: `) ||
			!strings.Contains(err.Error(), `where worker "a" reads the events of rank 0`)) {
			t.Errorf("register %s with the socket of another worker: got %v", name, err)
		}
		spec.Sources[0].Replay = ""
		if got, want := status.Code(register()), map[string]codes.Code{"c": codes.ResourceExhausted}[name]; got != want {
			t.Errorf("register %s with a limit of two workers: got %v, want %v", name, got, want)
		}
	}
}

func TestDeregisterConfiguredAndConnectingWorkers(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, s := engine(t, "--bind", "tcp://127.0.0.1:*")
	publish(t, p, storedOf(1))
	f, operator := follow(t, s), s.Operator()
	f.until("w", "stored [1]")
	if _, err := operator.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	f.until("w", "removed DEREGISTERED")
	if got := kvcast(t, nil, "workers", "--addr", s.Address()); got.out != "no workers\n" {
		t.Errorf("got %q %q", got.out, got.err)
	}

	several := "127.0.0.1:1," + s.Address()
	if got := kvcast(t, nil, "workers", "--addr", several); got.out != "no workers\n" {
		t.Errorf("several addresses: got %q %q", got.out, got.err)
	}
	if got := kvcast(t, nil, "subscribe", "--addr", several, "--from", "earliest", "--count", "1"); !strings.Contains(got.out, "added") {
		t.Errorf("several addresses: got %q %q", got.out, got.err)
	}

	bound := publisherOf(t, simulator.SocketConfig{Endpoint: s.Endpoint(), Mode: simulator.ModeConnect, Topic: "kv@pod-0@m"})
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := bound.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	publish(t, bound, storedOf(2))
	f.until("pod-0", "added m")
	_, err := operator.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "pod-0"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("a bound worker: got %v", err)
	}
}

func TestDiscoveryByFile(t *testing.T) {
	t.Parallel()
	p := map[string]*simulator.Publisher{"a": publisherOf(t, simulator.SocketConfig{}), "b": publisherOf(t, simulator.SocketConfig{})}
	publishAll := func(block uint64) {
		for _, of := range p {
			publish(t, of, storedOf(block))
		}
	}
	publishAll(1)
	file := filepath.Join(t.TempDir(), "workers.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	item := func(name, model string) string {
		return fmt.Sprintf("- {name: %s, model: %s, sources: [{connect: %q, replay: %q}]}\n", name, model, p[name].Endpoint(), p[name].ReplayEndpoint())
	}
	// The file does not exist yet.
	s := serve(t, "--config", configFile(t, fmt.Sprintf("discovery: [{file: %q, interval: 100ms}]", file)))
	s.AwaitLog(`discovery failed; the workers found before stay.*no such file`)
	if log := strings.Join(s.Log(), "\n"); strings.Contains(log, "msg=serving") {
		t.Errorf("it serves before discovery has worked:\n%s", log)
	}
	write(item("a", "m"))
	f := follow(t, s)
	f.until("a", "stored [1]")
	write("workers:\n" + item("a", "m") + item("b", "m"))
	f.until("b", "stored [1]")
	write(item("a", "n") + item("b", "m"))
	f.until("a", "removed DISCOVERY")
	f.until("a", "added n")
	f.until("a", "stored [1]")

	write(item("a", "n") + "- {name: b, modell: m}\n")
	s.AwaitLog(`the workers found before stay.*workers.yaml:2: workers\[1\]: unknown key .*modell.*, did you mean model`)
	publishAll(2)
	f.until("b", "stored [2]")
	write(item("a", "n"))
	f.until("b", "removed DISCOVERY")
	for _, before := range f.until("a", "stored [2]") {
		if strings.HasPrefix(before, "added") || strings.HasPrefix(before, "removed") {
			t.Errorf("worker a: got %q though it has not changed", before)
		}
	}
}

// TestServerStartsWhileDiscoveryFails starts servers with a file of workers that does not exist.
func TestServerStartsWhileDiscoveryFails(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	folder := t.TempDir()
	file := filepath.Join(folder, "workers.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := configFile(t, fmt.Sprintf("discovery: [{file: %q, interval: 100ms}]", file))

	bounded := serve(t, "--config", config, "--ingest-discovery-wait", "100ms")
	bounded.AwaitLog(`serving without the workers that discovery would find: it has not worked yet" waited=100ms`)
	write("[]")
	bounded.AwaitLog(`msg="discovery works again"`)

	write(fmt.Sprintf("- {name: a, model: m, sources: [{connect: %q, replay: %q}]}\n", p.Endpoint(), p.ReplayEndpoint()))
	durable := []string{"--config", config, "--journal", "file:" + filepath.Join(folder, "journal"), "--ingest-grace", "10ms", "--ingest-start-wait", "1s", "--ingest-discovery-wait", "1h"}
	before := serve(t, durable...)
	follow(t, before).until("a", "stored [1]")
	if got := before.End(); got != 0 {
		t.Fatalf("got exit status %d", got)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	after := serve(t, durable...) // it serves the workers of the journal, after a time that is longer than the grace
	f := follow(t, after)
	all, err := after.Client().ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil || len(all.GetWorkers()) != 1 {
		t.Errorf("got workers %v (%v), want the one of the journal", all.GetWorkers(), err)
	}
	write("[]")
	f.until("a", "removed DISCOVERY")
}

func TestDiscoveryByDNS(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	// The name may have a further address at which nothing listens.
	s := serve(t, "--ingest-start-wait", "100ms", "--config", configFile(t, fmt.Sprintf(
		"discovery: [{dns: localhost, port: %s, replay_port: %s, model: m}]", portOf(p.Endpoint()), portOf(p.ReplayEndpoint()))))
	f := follow(t, s)
	worker := "127.0.0.1:" + portOf(p.Endpoint())
	f.until(worker, "added m")
	f.until(worker, "stored [1]")
}

// TestDisconnectedWorkerIsRemovedAndReturns checks that its event ids continue.
func TestDisconnectedWorkerIsRemovedAndReturns(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	at := "ipc://" + filepath.Join(t.TempDir(), "kvcast")
	engine := simulator.SocketConfig{Endpoint: at, Mode: simulator.ModeConnect, Topic: "kv@127.0.0.1@m"}
	p := publisherOf(t, engine)
	engine.Replay = p.ReplayEndpoint() // the next incarnation uses the same endpoint
	s := serve(t, "--ingest-grace", "100ms", "--bind", at+",replay_port="+portOf(p.ReplayEndpoint()))
	f := follow(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	for life := range uint64(2) {
		publish(t, p, storedOf(10*life+1)) // may be sent before kvcast connects
		if err := p.WaitSubscribed(ctx, 1); err != nil {
			t.Fatal(err)
		}
		publish(t, p, storedOf(10*life+2))
		f.until("127.0.0.1", "added m")
		if before, want := f.until("127.0.0.1", fmt.Sprintf("stored [%d]", 10*life+2)), fmt.Sprintf("stored [%d]", 10*life+1); !slices.Contains(before, want) {
			t.Errorf("before its second block: got %q, want %s", before, want)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		f.until("127.0.0.1", "removed DISCONNECTED")
		if got := f.checker.View().Workers(); len(got) > 0 {
			t.Errorf("remaining workers: %q", got)
		}
		if life == 0 {
			p = publisherOf(t, engine)
		}
	}
}

// TestReplaySocketOfAnotherEngine has a worker whose replay socket belongs to another engine, as a line does that was copied in
// a list of workers. The other engine's blocks are never the worker's without a doubt, and are gone as soon as the engine
// publishes a batch.
func TestReplaySocketOfAnotherEngine(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, other := publisherOf(t, simulator.SocketConfig{}), publisherOf(t, simulator.SocketConfig{})
	for i := range uint64(5) {
		publish(t, other, storedOf(100+i))
	}
	s := serve(t, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+other.ReplayEndpoint())
	f := follow(t, s)
	f.until("w", "added m")
	f.until("w", "gap REPLAY_UNPROVED")
	f.until("w", "stored [104]")
	if !f.checker.View().Unproved("w", 0) {
		t.Error("blocks of another engine are exact")
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	publish(t, p, storedOf(1))
	f.until("w", "gap REPLAY_FOREIGN "+other.ReplayEndpoint())
	f.until("w", "stored [1]")
	if got := f.checker.View().Blocks("w", 0, kvcastv1.Tier_TIER_DEVICE); len(got) != 1 || !f.checker.View().Incomplete("w", 0) {
		t.Errorf("%d blocks, incomplete %v; want that of the engine alone, which may have others", len(got), f.checker.View().Incomplete("w", 0))
	}
	s.AwaitLog(`replay socket belongs to another engine.*replay=` + other.ReplayEndpoint())
	replays := other.Replays()
	for i := range uint64(10) {
		publish(t, p, storedOf(10+i))
		f.until("w", fmt.Sprintf("stored [%d]", 10+i))
	}
	if n := other.Replays(); n != replays {
		t.Errorf("the other engine's socket was asked %d more times at once", n-replays)
	}
}

// TestReplaySocketIsProved has an engine that was running before. Its blocks are in doubt until it publishes a batch.
func TestReplaySocketIsProved(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	s := serve(t, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	f := follow(t, s)
	f.until("w", "stored [1]")
	f.until("w", "gap REPLAY_UNPROVED")
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	publish(t, p, storedOf(2))
	f.until("w", "resolved REPLAY_UNPROVED")
	f.until("w", "stored [2]")
	if f.checker.View().Incomplete("w", 0) || f.checker.View().Unproved("w", 0) {
		t.Error("the rank is incomplete though its replay socket is proved")
	}
}

// TestIdleWorkerStays keeps a worker silent for longer than the grace time while its connection is probed.
func TestIdleWorkerStays(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	s := serve(t, "--ingest-grace", "100ms", "--ingest-silence", "50ms",
		"--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	f := follow(t, s)
	publish(t, p, storedOf(1))
	f.until("w", "added m")
	f.until("w", "stored [1]")
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitReplays(ctx, p.Replays()+5); err != nil {
		t.Fatal(err)
	}
	got := kvcast(t, nil, "workers", "--addr", s.Address())
	if lines := strings.Split(got.out, "\n"); len(lines) != 3 || strings.Join(strings.Fields(lines[1])[:5], " ") != "w m live 0 live" {
		t.Errorf("workers: got %q %q", got.out, got.err)
	}
	publish(t, p, storedOf(2))
	if before := f.until("w", "stored [2]"); len(before) > 0 {
		t.Errorf("the idle worker: got %q, want no events", before)
	}
}

// TestServesOnceEnginesHaveBeenRead starts the engine after the server.
func TestServesOnceEnginesHaveBeenRead(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	dir := t.TempDir()
	at := simulator.SocketConfig{Endpoint: "ipc://" + filepath.Join(dir, "events"), Replay: "ipc://" + filepath.Join(dir, "replay")}
	s := serve(t, "--ingest-start-wait", "1h", "--worker", "name=w,model=m,connect="+at.Endpoint+",replay="+at.Replay)
	addr := s.AwaitLog(`msg=starting grpc=(\S+)`)
	got := kvcast(t, nil, "snapshot", "--addr", addr)
	if got.status != 1 || !strings.Contains(got.err, "UNAVAILABLE: ") {
		t.Errorf("while it starts: got status %d and %q", got.status, got.err)
	}
	got = kvcast(t, nil, "workers", "--addr", addr)
	if lines := strings.Split(got.out, "\n"); len(lines) != 5 || strings.Join(strings.Fields(lines[1])[:5], " ") != "w m connecting 0 connecting" ||
		!strings.Contains(lines[3], ": no connection to "+at.Endpoint) {
		t.Errorf("workers while it starts: got %q %q", got.out, got.err)
	}
	p := publisherOf(t, at)
	for n := range uint64(100) {
		publish(t, p, storedOf(n))
	}
	got = kvcast(t, nil, "snapshot", "--addr", s.Address())
	if !strings.Contains(got.out, "1 worker, 100 blocks") {
		t.Errorf("the first snapshot: got %q %q", got.out, got.err)
	}
}

func TestShutdownDuringStart(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	// stop does not wait for an hour.
	s := serve(t, "--ingest-start-wait", "1h", "--worker", "name=w,connect=ipc://"+filepath.Join(t.TempDir(), "no-engine"))
	s.AwaitLog(`msg=starting grpc=(\S+)`)
	if status := s.End(); status != 0 {
		t.Errorf("exit status: got %d, want 0", status)
	}
}
