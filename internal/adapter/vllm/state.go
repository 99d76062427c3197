package vllm

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// errMemory and errStateSize end the connection of a consumer for whose state there is no memory: it may connect again.
var (
	errMemory    = errors.New("the states that are being sent use the memory for that")
	errStateSize = errors.New("the state of the dp rank is larger than the memory for that")
)

// reserve reserves further memory of the state of a stream.
func (n *conn) reserve(s *Stream, have *int64, size int64) error {
	err := n.stateBytes.Reserve(n.address, size)
	if err == nil {
		*have += size
		return nil
	}
	needed, limit := *have+size, n.memory.Limit()
	if needed > limit/2 {
		n.logger.Warn("the blocks of a dp rank do not fit into half of the memory for blocks that are being sent, so no consumer can get them; raise egress.zmq.state_bytes",
			"worker", s.worker, "rank", s.rank, "bytes", needed, "state_bytes", limit)
		return errStateSize
	}
	n.logger.Warn("a consumer was disconnected, because the blocks that are being sent to others use the memory for them, or those to its address half of it; raise egress.zmq.state_bytes, or look for consumers that read slowly",
		"peer.address", n.net.RemoteAddr().String(), "worker", s.worker, "rank", s.rank, "bytes", needed,
		"reason", err, "used_bytes", n.memory.Used(), "state_bytes", limit)
	return errMemory
}

// sendState sends the state of a stream, each batch after some frames. The caller has acquired one of Egress.states.
func (n *conn) sendState(ctx context.Context, s *Stream, state *State, before ...[]byte) error {
	batches, bytes, err := n.buildState(ctx, s, state)
	defer func() { n.stateBytes.Release(n.address, bytes) }()
	if err != nil {
		return err
	}
	n.metrics.states.Inc()
	// The memory of a state is held until the consumer has read it.
	until := time.Now().Add(writeTimeout + time.Duration(bytes)*time.Second/stateRate)
	return n.sendUntil(until, batches, before...)
}

// buildState returns the batches of a state, and their reserved memory, and releases one of Egress.states. It does not
// depend on the consumer, so that a slow one does not delay others.
func (n *conn) buildState(ctx context.Context, s *Stream, state *State) (batches []Batch, bytes int64, err error) {
	defer n.states.Release(n.address, 1)
	at := apply.Now()
	snapshot, ok := n.index.Snapshot(s.worker)
	snapshot.TokenIDs = true
	if ok {
		err = apply.EachBlocks(ctx, &snapshot, s.rank, func(events []*kvcastv1.RouterEvent, size int) error {
			if err := n.reserve(s, &bytes, int64(size)); err != nil { // until the size of the batches is known
				return err
			}
			for _, e := range events {
				batches = state.Apply(e, at, batches)
			}
			return nil
		})
	}
	if err != nil {
		return nil, bytes, err
	}
	batches = state.End(at, batches)
	size := int64(0)
	for i := range batches {
		size += int64(batchBytes + len(batches[i].Payload))
	}
	if size > bytes {
		err = n.reserve(s, &bytes, size-bytes)
		return batches, bytes, err
	}
	n.stateBytes.Release(n.address, bytes-size)
	return batches, size, nil
}
