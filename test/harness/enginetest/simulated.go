package enginetest

import (
	"errors"
	"testing"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// BlockSize is the number of tokens in a block that Stored returns.
const BlockSize = 4

// NewSimulated returns a simulated engine, which is closed when the test ends. It has a replay socket
// on a free port unless the config sets another endpoint.
func NewSimulated(t testing.TB, cfg simulator.PublisherConfig) *simulator.Publisher {
	t.Helper()
	if cfg.Replay == "" {
		cfg.Replay = "tcp://127.0.0.1:*"
	}
	p, err := simulator.NewPublisher(cfg)
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

// Method is a method of simulator.Publisher that takes a batch: Publish, Drop, Lose or
// PublishUnbuffered.
type Method func(events ...wire.Event) (seq uint64, err error)

// Remove passes a batch that removes one block to a method of a simulated engine.
func Remove(t testing.TB, method Method, hash uint64) {
	t.Helper()
	if _, err := method(Removed(hash)); err != nil {
		t.Fatal(err)
	}
}

// Removed returns an event that removes one block.
func Removed(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hash}}
}

// Stored returns an event that stores one block of BlockSize tokens.
func Stored(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: BlockSize}
}
