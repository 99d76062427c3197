package vllm

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// DisableTimeouts lets a consumer read nothing until the test ends. Nothing may be connected yet.
func DisableTimeouts(t *testing.T) {
	t.Helper()
	timeout := writeTimeout
	writeTimeout = time.Hour
	t.Cleanup(func() { writeTimeout = timeout })
}

// SetHeartbeat changes the time after which silent consumers get a PING, and that of their answer, until the test ends. Nothing
// may be connected yet.
func SetHeartbeat(t *testing.T, d time.Duration) {
	t.Helper()
	before := heartbeat
	heartbeat = d
	t.Cleanup(func() { heartbeat = before })
}

// SetResolveInterval changes the time between two lookups of a name until the test ends. Nothing may be connected yet.
func SetResolveInterval(t *testing.T, d time.Duration) {
	t.Helper()
	before := resolveInterval
	resolveInterval = d
	t.Cleanup(func() { resolveInterval = before })
}

// Topic returns the topic of a rank of a worker with an endpoint and a first rank.
func Topic(pattern, name, endpoint, model string, rank, first uint32) string {
	return topic(pattern, &worker{name: name, address: endpoint, model: model, firstRank: first}, rank)
}

// AddressesOf returns the addresses of consumers behind a name.
var AddressesOf = addressesOf

// Begin publishes the blocks of the index, without Run.
func (e *Egress) Begin(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	_ = e.source().Run(ctx, target{e}, cancel)
}

// Serve serves a subscriber of the first endpoint until the connection ends.
func (e *Egress) Serve(ctx context.Context, c net.Conn) { e.endpoints[0].admit(ctx, c, zmtp.PUB) }

// StateMemory returns the reserved memory of states.
func (e *Egress) StateMemory() int64 { return e.memory.Used() }

// HoldStates lets no state be built until the test ends.
func (e *Egress) HoldStates(t *testing.T) {
	t.Helper()
	for bits := range statesAtATime {
		address := netip.PrefixFrom(netip.IPv6Unspecified(), bits)
		if err := e.states.Acquire(t.Context(), address, 1); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.states.Release(address, 1) })
	}
}

// Held returns the blocks that consumers hold after the batches so far and the pending events, with their tiers: bit n is
// kvcast.v1.Tier n. It must not be modified.
func (s *Stream) Held() map[uint64]uint8 { return s.held }

// Omitted returns how many blocks were omitted since the last call, by reason.
func (s *Stream) Omitted() (all map[string]uint64) {
	all = make(map[string]uint64)
	for reason, n := range s.omitted {
		if n > 0 {
			all[omissionNames[reason]] = n
		}
	}
	clear(s.omitted[:])
	return all
}

// Positions returns the position of the oldest batch, and that after the last one.
func (h *History) Positions() (first, end uint64) { return h.first, h.End() }
