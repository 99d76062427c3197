package engineclient_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// TestClientLogLevel sets the level while the Client runs. The Logger's own level is
// ignored.
func TestClientLogLevel(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	var log harness.Log
	got := newLines()
	cfg := clientOf(p)
	cfg.LogLevel = slog.LevelError + 1
	cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
	c := connectClient(t, p, cfg, got)
	enginetest.Remove(t, p.Publish, 1)
	got.want(t, "0/0 removed [1]")
	if l := c.LogLevel(); l != slog.LevelError+1 {
		t.Errorf("level %v", l)
	}
	c.SetLogLevel(slog.LevelDebug)
	if l := c.LogLevel(); l != slog.LevelDebug {
		t.Errorf("level %v", l)
	}
	harness.WaitFor(t, func() bool { return c.Stats().State == ingest.SourceLive })
	enginetest.Remove(t, p.Drop, 2)
	enginetest.Remove(t, p.Publish, 3)
	got.want(t, "0/1 removed [2]", "0/2 removed [3]")
	harness.WaitFor(t, func() bool { return c.Stats().ReplaysDone >= 2 })
	stopClient(t, c)
	for _, line := range []string{"level=DEBUG", "level=INFO msg=\"client stopped\" worker=w discarded=0"} {
		if !strings.Contains(log.String(), line) {
			t.Errorf("not logged: %s\nin:\n%s", line, log.String())
		}
	}
	if strings.Contains(log.String(), "reading source") {
		t.Errorf("what came before the level was set is logged:\n%s", log.String())
	}
}
