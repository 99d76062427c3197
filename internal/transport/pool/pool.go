// Package pool publishes what a pool holds as an engine would publish it.
//
// In: stores and removes of blocks whose content is known. Out: the messages of a transport.Receiver, whose batches have the tokens hashes of
// blocks in place of their tokens (wire.Rules.ContentInKeys). The batches of a Publisher are in an epoch of its own, so that each begins with
// no blocks.
package pool

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// batchBlocks is how many blocks a batch has at most.
	batchBlocks = 1024
	// medium is the tier of a pool's blocks.
	medium = "EXTERNAL"
)

// Publisher is a Receiver of the blocks of a pool. Connected, Store and Remove are not safe for concurrent use. They wait while there is no
// room, and return false if receiving ends before.
type Publisher struct {
	*transport.Queue
	topic []byte
	seq   uint64
}

// New returns a Publisher that has published nothing. The caller must close it.
func New() *Publisher {
	epoch := strconv.FormatUint(rand.Uint64(), 16)
	return &Publisher{Queue: transport.NewQueue(nil), topic: []byte(wire.TopicWithEpoch("", epoch))}
}

// Connected begins a connection, with the blocks that the pool has now.
func (p *Publisher) Connected(all []feed.Content) bool {
	p.PushEvent(transport.Event{Kind: transport.Connected, Conn: 1})
	if len(all) == 0 { // the epoch is to be known
		return p.push(nil)
	}
	return p.Store(all)
}

// Disconnected ends the connection, or reports that there was none, for a reason. It is the last call.
func (p *Publisher) Disconnected(wasConnected bool, why error) {
	kind := transport.Failed
	if wasConnected {
		kind = transport.Disconnected
	}
	if p.Context().Err() != nil {
		why = transport.ErrInterrupted
	}
	p.PushEvent(transport.Event{Kind: kind, Conn: 1, Err: why})
	p.End(transport.ErrEnded)
}

// Store publishes that the pool holds blocks. If a block follows its parent, both are in one store.
func (p *Publisher) Store(all []feed.Content) bool {
	for some := range slices.Chunk(all, batchBlocks) {
		if !p.push(stores(some)) {
			return false
		}
	}
	return true
}

// Remove publishes that the pool does not hold blocks any more.
func (p *Publisher) Remove(hashes []uint64) bool {
	for some := range slices.Chunk(hashes, batchBlocks) {
		if !p.push([]wire.Event{{Kind: wire.KindRemoved, Medium: medium, BlockHashes: some}}) {
			return false
		}
	}
	return true
}

// stores returns the stores of blocks: of one store, each block is the parent of the next.
func stores(all []feed.Content) (events []wire.Event) {
	var last *feed.Content
	for i := range all {
		c := &all[i]
		if last == nil || !c.HasParent || c.Parent != last.Hash || c.LoRA != last.LoRA || c.Tokens != last.Tokens {
			events = append(events, wire.Event{
				Kind: wire.KindStored, Medium: medium, Parent: c.Parent, HasParent: c.HasParent, BlockSize: c.Tokens, LoRAName: c.LoRA, Raw: new(wire.Raw),
			})
		}
		event := &events[len(events)-1]
		event.BlockHashes, event.TokensHashes = append(event.BlockHashes, c.Hash), append(event.TokensHashes, c.TokensHash)
		last = c
	}
	for i := range events {
		events[i].Raw.ExtraKeys = wire.AppendContents(nil, events[i].TokensHashes)
	}
	return events
}

// push publishes a batch.
func (p *Publisher) push(events []wire.Event) bool {
	p.seq++
	batch := wire.Batch{HasRank: true, Time: float64(time.Now().UnixMicro()) / 1e6, HasTime: true, Events: events}
	encoder := wire.Encoder{EventForm: wire.FormMap}
	return p.Push(&transport.Chunk{Messages: []transport.Message{{
		Conn: 1, Count: 3, Frames: [][]byte{p.topic, binary.BigEndian.AppendUint64(nil, p.seq), encoder.AppendBatch(nil, &batch)},
	}}})
}
