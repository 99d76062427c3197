package restart_test

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// update makes TestStateOfEarlierVersionsIsRead write the journals of the current formats first.
var update = flag.Bool("update", false, "write the current golden journals")

// golden is a journal that a version of kvcast has written. digest.json beside it is the digest of the blocks of its only worker.
type golden struct {
	dir string
	// shared reports whether the journal is the store of a nats-server, and not a directory of kvcast.
	shared bool
}

// goldens are there for each format of stored state, see kvcast.format in docs/nats.md. When a format has changed, add a
// golden to these and to currentGoldens, and leave the others as they are.
var goldens = append([]golden{{dir: "testdata/state-v1"}}, currentGoldens...)

// currentGoldens are those of the current formats.
var currentGoldens = []golden{{dir: "testdata/state-v2"}, {dir: "testdata/state-v3", shared: true}}

func (g golden) journal() string { return filepath.Join(g.dir, "journal") }

func (g golden) digest() string { return filepath.Join(g.dir, "digest.json") }

// open returns the value of --journal for files in dir. After stop, nothing writes to them.
func (g golden) open(t *testing.T, dir string) (journal string, stop func()) {
	t.Helper()
	if g.shared {
		return natstest.StartIn(t, dir)
	}
	return "file:" + dir, func() {}
}

const goldenBatches = 400

// TestStateOfEarlierVersionsIsRead starts a server with a journal of an earlier version, without its engine.
func TestStateOfEarlierVersionsIsRead(t *testing.T) {
	testclass.Process(t)
	if *update {
		for _, g := range currentGoldens {
			writeGolden(t, g)
		}
	}
	for _, g := range goldens {
		t.Run(g.dir, func(t *testing.T) { readGolden(t, g) })
	}
}

func readGolden(t *testing.T, g golden) {
	t.Helper()
	text, err := os.ReadFile(g.digest())
	if err != nil {
		t.Fatal(err)
	}
	var want client.BlocksDigest
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(g.journal())); err != nil {
		t.Fatal(err)
	}
	journal, _ := g.open(t, dir)
	p := fleet.Start(t, "--journal", journal, "--ingest-start-wait", "0s", "--ingest-grace", "24h",
		"--worker", "name=golden,model="+fleet.Model+",connect=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:2")
	if err := follow(t, fleet.Address(t, p)).Converge(t.Context(), map[string]client.BlocksDigest{"golden": want}); err != nil {
		t.Error(err)
	}
	recovered, err := p.Logged(regexp.MustCompile(`msg=recovered .* (checkpoints=\d+)`))
	if err != nil || recovered != "checkpoints=1" {
		t.Errorf("recovered with %s, error %v, want checkpoints=1", recovered, err)
	}
	if g.shared {
		if _, err := p.Logged(regexp.MustCompile(`msg="worker taken"`)); err != nil {
			t.Error(err)
		}
	}
	if lines := p.LogFaults(); len(lines) > 0 {
		t.Errorf("the server logged: %q", lines)
	}
}

// writeGolden writes a journal with entries and a checkpoint.
func writeGolden(t *testing.T, g golden) {
	t.Helper()
	e, err := simulator.New(simulator.Config{
		SocketConfig: fleet.Bound(), Pool: blockpool.Config{Capacity: 64, HashSeed: 1}, Seed: 1, Batches: goldenBatches, Subscribers: 1, Linger: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _ = e.Run(ctx) }()
	dir := t.TempDir()
	journal, stop := g.open(t, dir)
	p := fleet.Start(t, "--journal", journal, "--journal-checkpoint-bytes", "64KiB",
		"--worker", "name=golden,model="+fleet.Model+",connect="+e.Endpoint()+",replay="+e.ReplayEndpoint())
	<-e.Finished()
	for want := uint64(e.Summary().Blocks); ; <-time.After(100 * time.Millisecond) {
		m, err := p.Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if uint64(m.Sum("kvcast_index_blocks")) == want && m.Sum("kvcast_checkpoint_bytes_total") > 0 {
			break
		}
	}
	text, err := json.Marshal(client.BlocksDigest{Blocks: uint64(e.Summary().Blocks), XOR: e.Summary().Digest})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := os.RemoveAll(g.dir); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(g.journal(), os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(g.digest(), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}
