package config_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

func TestRemoveSocketRemovesSocketsOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := config.RemoveSocket(path); err != nil {
		t.Errorf("no file: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := config.RemoveSocket(path); err != nil {
		t.Errorf("socket: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := config.RemoveSocket(path); err == nil || err.Error() != path+" exists, and is not a socket" {
		t.Errorf("file: %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the file is removed: %v", err)
	}
}

// A node of a larger deployment has some of the ranks, and its ports count from its first one.
func TestEndpointsCountFromTheFirstRank(t *testing.T) {
	s := config.Source{Connect: "tcp://h:1000", Replay: "tcp://h:2000", Snapshot: "tcp://h:3000", FirstRank: 4, DPSize: 2}
	want := []config.RankEndpoints{
		{Rank: 4, Connect: "tcp://h:1000", Replay: "tcp://h:2000", Snapshot: "tcp://h:3000"},
		{Rank: 5, Connect: "tcp://h:1001", Replay: "tcp://h:2001", Snapshot: "tcp://h:3001"},
	}
	listed := s
	listed.Ranks = []config.RankEndpoints{{Rank: 4, Connect: "tcp://h:1000", Replay: "tcp://h:2000"}, {Rank: 5, Connect: "tcp://h:1001", Replay: "tcp://h:2001"}}
	for name, s := range map[string]config.Source{"counted": s, "listed": listed} {
		if d := cmp.Diff(want, s.Endpoints()); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	s = config.Source{Connect: "smg://h:1", FirstRank: 2, DPSize: 2}
	want = []config.RankEndpoints{{Rank: 2, Connect: "smg://h:1"}, {Rank: 3, Connect: "smg://h:1"}}
	if d := cmp.Diff(want, s.Endpoints()); d != "" {
		t.Errorf("gRPC (-want +got):\n%s", d)
	}
}

func TestSnapshotsAreAtPortPlusRank(t *testing.T) {
	s := config.Source{Connect: "tcp://h:1000", Snapshot: "tcp://h:3000", DPSize: 3}
	// An engine that tells its ports tells none of snapshots.
	told := s
	told.Ranks = []config.RankEndpoints{{Rank: 0, Connect: "tcp://h:7"}, {Rank: 1, Connect: "tcp://h:8"}, {Rank: 2, Connect: "tcp://h:9"}}
	for _, s := range []config.Source{s, told} {
		for rank, want := range []string{"tcp://h:3000", "tcp://h:3001", "tcp://h:3002"} {
			if got := s.Endpoints()[rank].Snapshot; got != want {
				t.Errorf("rank %d: %s, want %s", rank, got, want)
			}
		}
	}
	if told.Ranks[1].Snapshot != "" {
		t.Error("Endpoints has changed the source")
	}
}

func TestAnnounced(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"workers://disk": 24 * time.Hour, "workers://disk?max_age=90m": 90 * time.Minute, "workers://disk?max_age=1s": time.Second, "workers://disk?max_age=8760h": 8760 * time.Hour,
		"workers://": 0, "workers://device": 0, "workers://disk?": 0, "workers://disk?max_age=": 0, "workers://disk?max_age=24": 0, "workers://disk?max_age=999ms": 0,
		"workers://disk?max_age=8760h1s": 0, "workers://disk?max_age=-1h": 0, "workers://disk?age=1h": 0, "workers://disk?max_age=1h&x=1": 0, "workers://disk/": 0, "workers:/disk": 0,
	} {
		e, ok := config.ParseSource(text)
		tier, maxAge, isAnnounced := e.Announced()
		switch {
		case ok != (want > 0), isAnnounced != ok, maxAge != want, ok && (tier != kvblock.TierDisk || e.String() != text):
			t.Errorf("%s: %+v, %v; tier %d, age %v, %v", text, e, ok, tier, maxAge, isAnnounced)
		}
	}
	e, _ := config.ParseSource("workers://external")
	if tier, _, _ := e.Announced(); tier != kvblock.TierExternal {
		t.Errorf("tier %d", tier)
	}
	e, _ = config.ParseSource("tcp://disk:1")
	if _, _, ok := e.Announced(); ok {
		t.Error("tcp://disk:1 is of workers")
	}
}
