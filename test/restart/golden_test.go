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
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/test/fleet"
)

// update makes TestStateOfEarlierVersionsIsRead write the directory of the current format first.
var update = flag.Bool("update", false, "write "+current)

// goldens are journal directories that versions of kvcast have written, one for each format of stored state, and
// digest.json in each is the digest of the blocks of its only worker. When the format has changed, add a directory, and
// leave the others as they are.
var goldens = []string{"testdata/state-v1", current}

// current is the directory of the current format.
const current = "testdata/state-v2"

const goldenBatches = 400

// TestStateOfEarlierVersionsIsRead starts a server with a journal of an earlier version, without its engine.
func TestStateOfEarlierVersionsIsRead(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	for _, golden := range goldens {
		t.Run(golden, func(t *testing.T) { readGolden(t, golden) })
	}
}

func readGolden(t *testing.T, golden string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(golden, "digest.json"))
	if err != nil {
		t.Fatal(err)
	}
	var want client.BlocksDigest
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(golden, "journal"))); err != nil {
		t.Fatal(err)
	}
	p := fleet.Start(t, "--journal", "file:"+dir, "--ingest-start-wait", "0s", "--ingest-grace", "24h",
		"--worker", "name=golden,model="+fleet.Model+",connect=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:1")
	if err := follow(t, fleet.Address(t, p)).Converge(t.Context(), map[string]client.BlocksDigest{"golden": want}); err != nil {
		t.Error(err)
	}
	recovered, err := p.Logged(regexp.MustCompile(`msg=recovered .* (checkpoints=\d+)`))
	if err != nil || recovered != "checkpoints=1" {
		t.Errorf("recovered with %s, error %v, want checkpoints=1", recovered, err)
	}
	if lines := p.LogFaults(); len(lines) > 0 {
		t.Errorf("the server logged: %q", lines)
	}
}

// writeGolden writes the directory of the current version: entries, and a checkpoint.
func writeGolden(t *testing.T) {
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
	p := fleet.Start(t, "--journal", "file:"+dir, "--journal-checkpoint-bytes", "64KiB",
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
	if err := os.RemoveAll(current); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(current, "journal"), os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(current, "digest.json"), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}
