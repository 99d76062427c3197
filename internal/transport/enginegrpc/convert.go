package enginegrpc

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// maxEvents is how many events a batch may have. The batches of engines have up to some thousand.
	maxEvents = 1 << 17
	// maxKeptBytes is how much memory of each kind a converter keeps from one message to the next.
	maxKeptBytes = 1 << 20
)

// Limits of a batch's blocks, of their tokens, and of their extra keys, each of which takes more memory than in a response.
const (
	maxBlocks = 1 << 20
	maxTokens = 1 << 22
	maxKeys   = 1 << 17
)

var (
	errTooManyEvents = fmt.Errorf("the batch has more than %d events", maxEvents)
	errTooMany       = fmt.Errorf("the batch has more than %d blocks, %d tokens or %d extra keys", maxBlocks, maxTokens, maxKeys)
)

// protocol is how a server encodes the responses of SubscribeKvEvents.
type protocol struct {
	// methods are the full names of the call. A server has one of them.
	methods []string
	// request returns a request for the call's dp rank: from its first seq on, or for the present state if that is 0.
	request func(c *call) []byte
	// how is added to the error of a server that does not answer: which servers do. It may be empty.
	how string
	// open opens a connection in place of call.open, if it is set.
	open func(c *call) (connection, error)
	// beginsAtOne reports whether the first seq is 1, and there is no other present state than what follows it.
	beginsAtOne bool
	// refuses returns why the server cannot resume the call, by its first response; nil if it can.
	refuses func(c *call, response []byte) error
	// read reads a response, which is one batch, without its events.
	read func(response []byte) (header, error)
	// pass passes on a response of several batches. It takes the place of read, if it is set.
	pass func(c *call, response []byte) error
	// alive keeps the call alive until ctx is done, if it is set.
	alive func(ctx context.Context, c *call, conn connection)
	// event appends an event to those of a converter.
	event func(c *converter, event []byte) error
}

// header is what a response says of its batch.
type header struct {
	seq  uint64
	rank uint32
	// time is in seconds since the Unix epoch; 0 if it is unknown.
	time float64
	// events are the encoded events, up to one more than maxEvents.
	events [][]byte
	// begins reports whether the batch is the first of a snapshot, and partial whether the snapshot may lack blocks.
	begins, partial bool
	// ignored reports whether the response has no batch.
	ignored bool
	// ended is the error with which the server ends the call; nil if it does not. cannotResume reports whether it may accept
	// the call from the start.
	ended        error
	cannotResume bool
}

// neverUsed is a byte that MessagePack does not use, with which payloads begin that do not decode.
const neverUsed = 0xc1

// converter makes payloads in vLLM's form of batches, in memory that it reuses. A batch always gives the same payload: what
// came before has no influence, because payloads are compared after a reconnect.
type converter struct {
	protocol *protocol
	batch    wire.Batch
	hashes   []uint64
	tokens   []uint32
	keys     [][]byte // extra keys of blocks, in MessagePack
	keyCount int      // number of the batch's extra keys
}

// convert returns the payload of a batch. If the batch cannot be converted, the payload does not decode, and differs from
// those of other batches.
func (c *converter) convert(h header, response []byte) ([]byte, error) {
	payload, err := c.encode(h)
	if err == nil && len(payload) > transport.MaxPayloadBytes {
		err = fmt.Errorf("the batch has %d bytes in vLLM's form", len(payload))
	}
	c.release()
	if err != nil {
		return append([]byte{neverUsed}, response...)[:min(1+len(response), transport.MaxPayloadBytes)], err
	}
	return payload, nil
}

func (c *converter) encode(h header) ([]byte, error) {
	c.batch = wire.Batch{Time: h.time, HasTime: h.time != 0, Rank: h.rank, HasRank: true, Events: c.batch.Events[:0]}
	if len(h.events) > maxEvents {
		return nil, errTooManyEvents
	}
	for _, event := range h.events {
		if err := c.protocol.event(c, event); err != nil {
			return nil, err
		}
	}
	if h.begins && !c.clears() {
		c.batch.Events = slices.Insert(c.batch.Events, 0, wire.Event{Kind: wire.KindCleared}) // a snapshot takes the place of all blocks
	}
	if math.IsNaN(h.time) || math.IsInf(h.time, 0) || h.time > wire.MaxSeconds {
		return nil, fmt.Errorf("the batch has the time %v", h.time)
	}
	encoder := wire.Encoder{EventForm: wire.FormMap}
	return encoder.AppendBatch(nil, &c.batch), nil
}

// clears reports whether the batch begins with a clear of all blocks. wire.Rules may ignore a clear with rare fields.
func (c *converter) clears() bool {
	return len(c.batch.Events) > 0 && c.batch.Events[0].Kind == wire.KindCleared && c.batch.Events[0].Rare == nil
}

// release makes the memory of a batch available to the next one.
func (c *converter) release() {
	clear(c.batch.Events)
	const eventBytes = 256
	c.batch.Events = kept(c.batch.Events, maxKeptBytes/eventBytes)
	clear(c.keys)
	c.keyCount = 0
	c.hashes, c.tokens, c.keys = kept(c.hashes, maxKeptBytes/8), kept(c.tokens, maxKeptBytes/4), kept(c.keys, maxKeptBytes/24)
}

func kept[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	return s[:0]
}

// addHash appends the hash of a block.
func (c *converter) addHash(hash uint64) error {
	if len(c.hashes) >= maxBlocks {
		return errTooMany
	}
	c.hashes = append(c.hashes, hash)
	return nil
}

// countKeys counts extra keys before they take memory.
func (c *converter) countKeys(n int) error {
	if c.keyCount += n; c.keyCount > maxKeys {
		return errTooMany
	}
	return nil
}

// add appends an event.
func (c *converter) add(e wire.Event) error {
	if len(c.batch.Events) >= maxEvents {
		return errTooManyEvents
	}
	c.batch.Events = append(c.batch.Events, e)
	return nil
}
