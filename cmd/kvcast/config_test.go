package main_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// configFile writes a configuration file and returns its path.
func configFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestServeReadsConfigFile configures a worker, a listener, and a limit that is visible in the stream.
func TestServeReadsConfigFile(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, err := simulator.NewPublisher(simulator.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close publisher: %v", err)
		}
	})
	s := serve(t, "--config", configFile(t, fmt.Sprintf(`
listen: "127.0.0.1:1"   # the flag that every test gives goes over it
journal: {max_bytes: 1MiB}
batch: {max_blocks: 2}
workers:
  - {name: w, model: m, sources: [{connect: %q}]}
listeners:
  - {bind: "tcp://127.0.0.1:*", worker: other}
`, p.Endpoint())))
	s.Endpoint() // waits for the listener
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3}, Tokens: []uint32{1, 2, 3}, BlockSize: 1})
	got := kvcast(t, nil, "subscribe", "--addr", s.Address(), "--after", ":0", "--count", "3")
	for _, says := range []string{`worker added, model "m"`, "2 blocks", "1 block"} {
		if !strings.Contains(got.out, says) {
			t.Errorf("no %q in\n%s%s", says, got.out, got.err)
		}
	}
}

func TestCheckPrintsConfigWithOrigins(t *testing.T) {
	file := configFile(t, "batch: {max_blocks: 64}\nsubscribers: {max: 7}\nlisteners: [{bind: \"tcp://*:5557\"}]\n")
	t.Setenv("KVCAST_SUBSCRIBERS_MAX", "8")
	t.Setenv("KVCAST_CONFIG", file)
	first := kvcast(t, nil, "serve", "--check", "--journal-max-bytes", "1GiB", "--emit-token-ids", "--subscribers-max-connection-age", "60m")
	for _, line := range []string{
		`  max_blocks: 64 # from ` + file + `:1`,
		`  max: 8 # from KVCAST_SUBSCRIBERS_MAX`,
		`  max_bytes: 1GiB # from --journal-max-bytes`,
		`emit_token_ids: true # from --emit-token-ids`,
		`  max_age: 1h`,
		`  max_connection_age: 1h # from --subscribers-max-connection-age`,
		`  # from ` + file + `:3`,
	} {
		if !strings.Contains(first.out, "\n"+line+"\n") {
			t.Errorf("no line %q in:\n%s", line, first.out)
		}
	}
	if first.status != 0 || first.err != "" {
		t.Errorf("got status %d and %q", first.status, first.err)
	}
	// The output is a valid file with the same content.
	again := kvcast(t, nil, "serve", "--check", "--config", configFile(t, first.out))
	comments := regexp.MustCompile(`(?m) *# from .*\n?`)
	if diff := cmp.Diff(comments.ReplaceAllString(first.out, "\n"), comments.ReplaceAllString(again.out, "\n")); diff != "" || again.status != 0 {
		t.Errorf("status %d, %s\n(-first +again):\n%s", again.status, again.err, diff)
	}
}

func TestCheckReportsEveryMistake(t *testing.T) {
	got := kvcast(t, nil, "serve", "--check", "--config", "internal/config/testdata/mistakes.yaml", "--listen", "x")
	if got.status != 2 || got.out != "" || !strings.HasPrefix(got.err, "kvcast: read configuration: 49 mistakes:\n") ||
		!strings.Contains(got.err, "\n  internal/config/testdata/mistakes.yaml:30: discovery[0].file: ") || !strings.Contains(got.err, "\n  --listen: \"x\" is not allowed") {
		t.Errorf("got status %d, %q and\n%s", got.status, got.out, got.err)
	}
}

// TestCheckShowsTheDefaultListener checks configurations without workers, listeners and discovery.
func TestCheckShowsTheDefaultListener(t *testing.T) {
	testclass.Process(t)
	comments := regexp.MustCompile(`(?m)^ *# from .*\n`)
	want := kvcast(t, nil, "serve", "--check", "--bind", "tcp://*:5557", "--log-level", "debug")
	got := kvcast(t, nil, "serve", "--check", "--log-level", "debug")
	if diff := cmp.Diff(comments.ReplaceAllString(want.out, ""), comments.ReplaceAllString(got.out, "")); diff != "" || got.status != 0 || got.err != "" {
		t.Errorf("status %d, %s\n(-want +got):\n%s", got.status, got.err, diff)
	}
	if line := "\n  # from the default, since no workers, listeners or discovery are configured\n"; !strings.Contains(got.out, line) {
		t.Errorf("no line %q in:\n%s", line, got.out)
	}
}

// TestServeListensByDefault runs while the default port is in use, by this test or by another process.
func TestServeListensByDefault(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	if taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", ":5557"); err == nil {
		defer func() { _ = taken.Close() }()
	}
	got := kvcast(t, nil, "serve", "--listen", "127.0.0.1:0", "--admin", "")
	for _, says := range []string{
		`level=WARN msg="no workers, listeners or discovery configured: listening for engines at the default port" bind=tcp://*:5557`,
		`configure="--worker, --bind, ZMQ_PORT, or a file with --config"`,
		"bind tcp://*:5557: address already in use; choose another endpoint with --bind, ZMQ_PORT, or under listeners in the file of --config\n",
	} {
		if !strings.Contains(got.err, says) {
			t.Errorf("no %q in:\n%s", says, got.err)
		}
	}
	if got.status != 1 || got.out != "" {
		t.Errorf("got status %d and %q", got.status, got.out)
	}
}

func TestCheckReadsWatchedFiles(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	watched := configFile(t, "- {name: w, sources: [{connect: tcp}]}")
	file := configFile(t, fmt.Sprintf("discovery: [{file: %q}, {file: %q}]", watched, watched+".none"))
	got := kvcast(t, nil, "serve", "--check", "--config", file)
	for _, says := range []string{watched + `:1: workers[0].sources[0].connect: "tcp" is not allowed`, watched + ".none: no such file"} {
		if got.status != 2 || got.out != "" || !strings.Contains(got.err, says) {
			t.Errorf("got status %d, %q and %q, want %q", got.status, got.out, got.err, says)
		}
	}
}

// TestSocketsOfAnotherWorkerAreRefused checks that a copied line of a list of workers is noticed, with the names of both workers.
func TestSocketsOfAnotherWorkerAreRefused(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, tt := range []struct {
		args string
		want string // standard error
	}{
		{"--worker name=a,connect=tcp://h:1,replay=tcp://h:2 --worker name=b,connect=tcp://h:3,replay=tcp://h:2",
			`kvcast: --worker name=b,connect=tcp://h:3,replay=tcp://h:2: replay: "tcp://h:2" is not allowed: want a socket of its own: worker "b" would read the replays of rank 0 at tcp://h:2, where worker "a" reads the replays of rank 0` + "\n"},
		{"--worker name=a,connect=tcp://h:5557,replay=tcp://h:5558,dp_size=2",
			`kvcast: --worker name=a,connect=tcp://h:5557,replay=tcp://h:5558,dp_size=2: replay: "tcp://h:5558" is not allowed: want a socket of its own: worker "a" would read the replays of rank 0 at tcp://h:5558, where worker "a" reads the events of rank 1; leave room for the ports of all ranks` + "\n"},
	} {
		for _, check := range []string{"--check", "--listen=127.0.0.1:0"} {
			got := kvcast(t, nil, append([]string{"serve", check}, strings.Fields(tt.args)...)...)
			if got.status != 2 || got.out != "" || got.err != tt.want {
				t.Errorf("serve %s %s: got status %d, %q and %q, want %q", check, tt.args, got.status, got.out, got.err, tt.want)
			}
		}
	}
	watched := configFile(t, "- {name: b, sources: [{connect: \"tcp://h:1\"}]}")
	file := configFile(t, fmt.Sprintf("workers: [{name: a, sources: [{connect: \"tcp://h:1\"}]}]\ndiscovery: [{file: %q}]", watched))
	got := kvcast(t, nil, "serve", "--check", "--config", file)
	want := "kvcast: " + watched + `: worker "b": sources[0].connect: "tcp://h:1" is not allowed: want a socket of its own: worker "b" would read the events of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0` + "\n"
	if got.status != 2 || got.out != "" || got.err != want {
		t.Errorf("discovered: got status %d, %q and %q, want %q", got.status, got.out, got.err, want)
	}
}

// TestCheckAndStartWarnOfProbableMistakes checks workers of the configuration and of a file without replays or a model, and
// engines that have no replays.
func TestCheckAndStartWarnOfProbableMistakes(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	watched := configFile(t, "- {name: c, model: m, sources: [{connect: \"tcp://127.0.0.1:3\"}]}")
	if err := os.Rename(watched, watched+".workers"); err != nil {
		t.Fatal(err)
	}
	watched += ".workers"
	file := configFile(t, fmt.Sprintf(`
workers:
  - {name: a, model: m, sources: [{connect: "tcp://127.0.0.1:1"}]}
  - {name: b, model: m, sources: [{connect: "tcp://127.0.0.1:2", replay: "tcp://127.0.0.1:12"}, {engine: kvbm, connect: "tcp://127.0.0.1:4"}]}
  - {name: d, sources: [{connect: "openengine://127.0.0.1:5"}]}
discovery: [{file: %q}]
`, filepath.Base(watched)))
	if err := os.Rename(watched, filepath.Join(filepath.Dir(file), filepath.Base(watched))); err != nil {
		t.Fatal(err)
	}
	got := kvcast(t, nil, "serve", "--check", "--config", file)
	const text = "no replay socket: lost batches are reported and cannot be repaired; want replay, and replay_endpoint of the engine"
	const noModel = "no model: no request that names a model matches the worker; want model"
	want := "# warning: worker \"a\": " + text + "\n# warning: worker \"d\": " + noModel + "\n# warning: worker \"c\": " + text + "\n"
	if !strings.HasPrefix(got.out, want) || strings.Count(got.out, "# warning") != 3 || got.status != 0 || got.err != "" {
		t.Errorf("got status %d, %q and\n%s\nwant\n%s", got.status, got.err, got.out, want)
	}
	if again := kvcast(t, nil, "serve", "--check", "--config", configFile(t, got.out)); again.status != 0 {
		t.Errorf("the output is not a valid file: %s", again.err)
	}
	s := serve(t, "--config", file, "--ingest-start-wait", "0s")
	for _, worker := range []string{"a", "c"} {
		s.AwaitLog("level=WARN msg=\"" + text + "\" worker=" + worker + " source=0")
	}
	s.AwaitLog("level=WARN msg=\"" + noModel + "\" worker=d$")
	if found := s.AwaitLog(`msg="worker found" discovery=(\S+) worker=c`); found != filepath.Join(filepath.Dir(file), filepath.Base(watched)) {
		t.Errorf("the log names %s", found)
	}
}

func TestZMQPortIsABind(t *testing.T) {
	testclass.Process(t)
	comments := regexp.MustCompile(`(?m)^ *# from .*\n`)
	want := kvcast(t, nil, "serve", "--check", "--bind", "tcp://*:5557")
	t.Setenv("ZMQ_PORT", "5557")
	got := kvcast(t, nil, "serve", "--check")
	if diff := cmp.Diff(comments.ReplaceAllString(want.out, ""), comments.ReplaceAllString(got.out, "")); diff != "" || got.status != 0 {
		t.Errorf("status %d, %s\n(-want +got):\n%s", got.status, got.err, diff)
	}
	t.Setenv("ZMQ_PORT", "5557x")
	if got := kvcast(t, nil, "serve"); got.status != 2 || got.err != "kvcast: ZMQ_PORT: \"5557x\" is not allowed: want a port, 1 to 65535, such as 5557\n" {
		t.Errorf("got status %d and %q", got.status, got.err)
	}
}
