package engineclient_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

// patience bounds each wait of a test.
const patience = 2 * time.Minute

const blockSize = 4

type publishing func(...wire.Event) (uint64, error)

// waitFor waits until a condition is true.
func waitFor(t *testing.T, condition func() bool) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for ctx := patient(t); !condition(); {
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatal("the condition did not become true in time")
		}
	}
}

func newPublisher(t *testing.T, c simulator.PublisherConfig) *simulator.Publisher {
	t.Helper()
	if c.Replay == "" {
		c.Replay = "tcp://127.0.0.1:*"
	}
	p, err := simulator.NewPublisher(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, simulator.ErrClosed) {
			t.Errorf("close publisher: %v", err)
		}
	})
	return p
}

func remove(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hash}}
}

// publish passes a batch that removes a block to a publisher's method.
func publish(t *testing.T, how publishing, hash uint64) {
	t.Helper()
	if _, err := how(remove(hash)); err != nil {
		t.Fatal(err)
	}
}

type logged struct{ bytes.Buffer }

func (l *logged) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// want checks that each of these lines was logged, once.
func (l *logged) want(t *testing.T, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if n := strings.Count("\n"+l.String(), "\n"+line+"\n"); n != 1 {
			t.Errorf("logged %d times: %s\nin:\n%s", n, line, l.String())
		}
	}
}
