package main_test

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// endTimeout is how long a busy machine may take for what is documented to take 10 s.
const endTimeout = 30 * time.Second

// silentServer returns the address of a server that accepts connections and says nothing until the test ends.
func silentServer(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = conn.Close() })
		}
	}()
	return l.Addr().String()
}

// servingWithNATS starts a server with a NATS server behind a proxy, and an engine that has published.
func servingWithNATS(t *testing.T) (*harness.Process, *harness.Proxy) {
	t.Helper()
	u, err := url.Parse(natstest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	nats := harness.NewProxy(t, u.Host)
	return servingAnEngine(t, "nats://"+nats.Addr()), nats
}

// servingAnEngine starts a server with a journal, and an engine that has published.
func servingAnEngine(t *testing.T, journal string, args ...string) *harness.Process {
	t.Helper()
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	s := launch(t, append(args, "--journal", journal, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())...)
	if err := s.AwaitMetric(harness.Context(t), `kvcast_ingest_events_total{kind="stored",worker="w"} 1`); err != nil {
		t.Fatal(err)
	}
	return s
}

// publishBlocks publishes a number of events, each of which stores a number of other blocks.
func publishBlocks(t *testing.T, p *simulator.Publisher, events, blocks int) {
	t.Helper()
	for i := range events {
		e := wire.Event{Kind: wire.KindStored, BlockSize: 1}
		for n := range blocks {
			e.BlockHashes, e.Tokens = append(e.BlockHashes, uint64(blocks*i+n+1)), append(e.Tokens, uint32(n))
		}
		publish(t, p, e)
	}
}

// launch starts kvcast serve, which may end in any way.
func launch(t *testing.T, args ...string) *harness.Process {
	t.Helper()
	return launchBy(t, nil, args...)
}

func launchBy(t *testing.T, wrapper []string, args ...string) *harness.Process {
	t.Helper()
	p, err := harness.StartProcess(harness.ProcessConfig{Race: testclass.RaceEnabled, Wrapper: wrapper, Args: append(args, "--log-level", "debug")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Kill()
		if t.Failed() {
			t.Logf("the log of kvcast:\n%s", strings.Join(p.Log(), "\n"))
		}
	})
	return p
}

// state is a state of a server. If something hangs, the server may end with an error, which names it.
type state struct {
	reach func(t *testing.T) *harness.Process
	error string // in the log, if the server does not end as planned; empty: it must
	waits string // what the server says that it waits for if it is interrupted again
	hangs bool   // for so long that it is interrupted again
}

var states = map[string]state{
	"waiting for engines": {func(t *testing.T) *harness.Process {
		t.Helper()
		s := launch(t, "--worker", "name=w,model=m,connect=tcp://"+silentServer(t), "--ingest-start-wait", "1h")
		mustLog(t, s, `msg=starting`)
		return s
	}, "", "the engines", false},
	"opening a journal whose servers are away": {func(t *testing.T) *harness.Process {
		t.Helper()
		s := launch(t, "--journal", "nats://127.0.0.1:1")
		mustLog(t, s, `limits of the Go runtime`)
		return s
	}, "open the journal", "the journal", false},
	"opening a journal whose servers say nothing": {func(t *testing.T) *harness.Process {
		t.Helper()
		s := launch(t, "--journal", "nats://"+silentServer(t))
		mustLog(t, s, `limits of the Go runtime`)
		return s
	}, "open the journal", "the journal", false},
	"opening a journal in files that cannot be read to their end": {func(t *testing.T) *harness.Process {
		t.Helper()
		dir := t.TempDir()
		stream := filepath.Join(dir, "jetstream", "$G", "streams", "kvcast")
		if err := errors.Join(os.MkdirAll(stream, 0o700), syscall.Mkfifo(filepath.Join(stream, "meta.inf"), 0o600)); err != nil {
			t.Fatal(err)
		}
		s := launch(t, "--journal", "file:"+dir)
		mustLog(t, s, `limits of the Go runtime`)
		return s
	}, "the journal", "the journal", true},
	"without the NATS servers": {func(t *testing.T) *harness.Process {
		t.Helper()
		s, nats := servingWithNATS(t)
		nats.Partition()
		nats.Cut()
		awaitUnready(t, s)
		return s
	}, "journal", "the journal", true},
	"NATS servers that hang": {func(t *testing.T) *harness.Process {
		t.Helper()
		s, nats := servingWithNATS(t)
		nats.Freeze()
		awaitUnready(t, s)
		return s
	}, "journal", "the journal", true},
	"NATS servers without a majority": {func(t *testing.T) *harness.Process {
		t.Helper()
		nats := natstest.StartCluster(t)
		s := servingAnEngine(t, nats.URLs(), "--journal-replicas", "3")
		stream, err := nats.JetStream().Stream(harness.Context(t), "kvcast")
		if err != nil {
			t.Fatal(err)
		}
		for i := range strings.Split(nats.URLs(), ",") {
			if name := fmt.Sprintf("nats-%d", i); name != stream.CachedInfo().Cluster.Leader {
				nats.Signal(i, syscall.SIGSTOP)
			}
		}
		awaitUnready(t, s)
		return s
	}, "journal", "the journal", true},
	"recovering from NATS servers that hang": {func(t *testing.T) *harness.Process {
		t.Helper()
		u, err := url.Parse(natstest.Start(t))
		if err != nil {
			t.Fatal(err)
		}
		const events = 60 // of more than 64 KiB each
		p := publisherOf(t, simulator.SocketConfig{})
		publishBlocks(t, p, events, 10_000)
		first := launch(t, "--journal", u.String(), "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
		if err := first.AwaitMetric(harness.Context(t), fmt.Sprintf(`kvcast_index_blocks{dp_rank="0",tier="device",worker="w"} %g`, events*10_000.)); err != nil {
			t.Fatal(err)
		}
		if err := first.Kill(); err != nil {
			t.Fatal(err)
		}
		nats := harness.NewProxy(t, u.Host)
		nats.PartitionAfter(events / 2 * 64 << 10)
		s := launch(t, "--journal", "nats://"+nats.Addr())
		harness.WaitFor(t, func() bool { return nats.Stats().Frozen > 0 })
		return s
	}, "journal", "the journal", false},
	"a file of workers that cannot be read to its end": {func(t *testing.T) *harness.Process {
		t.Helper()
		file := filepath.Join(t.TempDir(), "workers.yaml")
		if err := syscall.Mkfifo(file, 0o600); err != nil {
			t.Fatal(err)
		}
		s := launch(t, "--config", configFile(t, "discovery: [{file: "+file+"}]"))
		mustLog(t, s, `msg=starting`)
		return s
	}, "discovery", "discovery", false},
	"a Kubernetes API server that says nothing": {func(t *testing.T) *harness.Process {
		t.Helper()
		kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
		text := `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {}}], clusters: [{name: c, cluster: {server: "http://` + silentServer(t) + `"}}]}`
		if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := launchBy(t, []string{"sh", "-c", `export KUBECONFIG=$0; exec "$@"`, kubeconfig}, "--config", configFile(t, "discovery: [{kubernetes: app=vllm, namespaces: [n]}]"))
		mustLog(t, s, `msg=starting`)
		return s
	}, "discovery", "discovery", false},
	"a subscriber that does not read its snapshot": {func(t *testing.T) *harness.Process {
		t.Helper()
		p := publisherOf(t, simulator.SocketConfig{})
		s := launch(t, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
		addr, err := s.Addr()
		if err != nil {
			t.Fatal(err)
		}
		publishBlocks(t, p, 100, 10_000)
		if err := s.AwaitMetric(harness.Context(t), `kvcast_index_blocks{dp_rank="0",tier="device",worker="w"} 1e+06`); err != nil {
			t.Fatal(err)
		}
		stream, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr)).Snapshot(t.Context(), &kvcastv1.SnapshotRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}, "", "subscribers", true},
}

func mustLog(t *testing.T, s *harness.Process, pattern string) {
	t.Helper()
	harness.ServerOf(t, s).AwaitLog(pattern)
}

func awaitUnready(t *testing.T, s *harness.Process) {
	t.Helper()
	harness.WaitFor(t, func() bool {
		_, err := s.Get(t.Context(), "/readyz")
		return err != nil && strings.Contains(err.Error(), "503")
	})
}

// TestServersEndInEveryState sends SIGTERM to servers.
func TestServersEndInEveryState(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for name, state := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := state.reach(t)
			began := time.Now()
			// A server that cannot open its journal may have ended by then.
			if err := s.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
			if strings.Contains(strings.Join(s.Log(), "\n"), "msg=serving") {
				harness.WaitFor(t, func() bool {
					_, err := s.Get(t.Context(), "/readyz")
					return err != nil
				})
				t.Logf("not ready after %v", time.Since(began).Round(time.Millisecond))
			}
			select {
			case <-s.Ended():
			case <-time.After(endTimeout):
				t.Fatalf("not ended after %v", endTimeout)
			}
			t.Logf("status %d after %v", s.ExitStatus(), time.Since(began).Round(time.Millisecond))
			wantNamed(t, s, state.error)
		})
	}
}

// step returns the last step of a server's end that it has logged; until it serves, that of its start.
func step(s *harness.Process) string {
	log := strings.Join(s.Log(), "\n")
	const next = `msg="next step" waits_for=`
	if strings.Contains(log, "msg=serving") {
		_, log, _ = strings.Cut(log, next+`"the engines, to start"`) // the first of its end
	}
	i := strings.LastIndex(log, next)
	if i < 0 {
		return ""
	}
	return strings.TrimPrefix(log[i+len(next):], `"`)
}

// wantNamed checks that a server that has not ended as planned names what hangs.
func wantNamed(t *testing.T, s *harness.Process, text string) {
	t.Helper()
	if s.ExitStatus() != 0 && (text == "" || !strings.Contains(lastLines(strings.Join(s.Log(), "\n")), text)) {
		t.Errorf("status %d, want 0, or %q in the last lines of the log", s.ExitStatus(), text)
	}
}

// lastLines returns the lines of a log after the signal.
func lastLines(log string) string {
	_, after, _ := strings.Cut(log, `msg="shutting down"`)
	if after == "" {
		return log
	}
	return after
}

// TestServersEndWhenInterruptedAgain interrupts servers again and again. Each names what it waits for, unless it ends before.
func TestServersEndWhenInterruptedAgain(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for name, state := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := state.reach(t)
			_ = s.Signal(os.Interrupt) // it may have ended
			if state.hangs {
				harness.WaitFor(t, func() bool { return strings.HasPrefix(step(s), state.waits) })
			}
			pace := time.NewTicker(100 * time.Millisecond)
			defer pace.Stop()
			for ended := false; !ended; {
				select {
				case <-s.Ended():
					ended = true
				case <-pace.C:
					_ = s.Signal(os.Interrupt)
				}
			}
			log := strings.Join(s.Log(), "\n")
			const again = `level=ERROR msg="kvcast exits before everything is stopped" why="it was interrupted again" waits_for=`
			_, waits, found := strings.Cut(log, again)
			switch {
			case found && s.ExitStatus() != 1:
				t.Errorf("status %d, want 1", s.ExitStatus())
			case found && !state.hangs && len(waits) > 0 && waits[0] != '\n': // it was in any step of its end
			case found && !strings.HasPrefix(strings.TrimPrefix(waits, `"`), state.waits):
				t.Errorf("it waits for %q, want %q", waits, state.waits)
			case !found && state.hangs:
				t.Errorf("it ended with status %d, want %q in its log", s.ExitStatus(), again)
			case !found:
				wantNamed(t, s, state.error)
			}
		})
	}
}
