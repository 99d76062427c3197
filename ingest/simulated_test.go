package ingest_test

import (
	"errors"
	"net"
	"testing"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

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

// freePort returns a port that was free just now.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return port
}

// publish has a publisher do something with a batch that removes a block.
func publish(t *testing.T, how publishing, hash uint64) {
	t.Helper()
	if _, err := how(remove(hash)); err != nil {
		t.Fatal(err)
	}
}

func store(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: blockSize}
}
