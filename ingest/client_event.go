package ingest

import (
	"context"
	"slices"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
)

// EventHandler takes what a Client reads.
//
// The calls come from one goroutine, one after the other, in the engine's order.
// An error or a panic is counted and logged, and the next event follows. The
// context ends when the Client is stopped, which waits for the call under way.
type EventHandler interface {
	HandleEvent(ctx context.Context, e *Event) error
}

// EventHandlerFunc is a function as an EventHandler.
type EventHandlerFunc func(ctx context.Context, e *Event) error

// HandleEvent calls the function.
func (f EventHandlerFunc) HandleEvent(ctx context.Context, e *Event) error { return f(ctx, e) }

// Event is one event of an engine, or what happened to the engine or to what it
// said. It is the handler's to keep.
type Event struct {
	// Event is what the engine said, where Kind is EventStored, EventRemoved or
	// EventCleared. Its own Kind says the same.
	wire.Event

	Kind EventKind
	// Worker and Model are those of the ClientConfig.
	Worker string
	Model  string
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine's number of the batch that the event is of; of an EventGap
	// that of the last batch missing. 0 for EventRestarted.
	Seq uint64
	// More tells that the event after this one is of the same batch.
	More bool
	// EngineTime is when the engine made the batch, as it says, and IngestTime when
	// it was read, or when that happened which the event tells. EngineTime is zero
	// where it is unknown.
	EngineTime time.Time
	IngestTime time.Time
	// Gap is what is lost, where Kind is EventGap.
	Gap feed.Gap
}

// EventKind is what an Event tells.
type EventKind uint8

// The kinds of events, first those that engines publish.
const (
	// EventStored: the engine holds these blocks.
	EventStored EventKind = iota + 1
	// EventRemoved: it holds them no longer.
	EventRemoved
	// EventCleared: it holds no blocks any more, in its rank.
	EventCleared
	// EventGap: batches are missing for good. With the reason GapJoinedLate they were
	// published before the first batch that was read of the rank.
	EventGap
	// EventRestarted: the engine began anew, with an empty cache, in this rank.
	EventRestarted
)

var eventKindNames = [...]string{
	EventStored:    "stored",
	EventRemoved:   "removed",
	EventCleared:   "cleared",
	EventGap:       "gap",
	EventRestarted: "restarted",
}

// String returns the kind's name.
func (k EventKind) String() string {
	if k < EventStored || k > EventRestarted {
		return "unknown"
	}
	return eventKindNames[k]
}

// eventKinds are the kinds of what engines publish.
var eventKinds = [...]EventKind{
	wire.KindStored:  EventStored,
	wire.KindRemoved: EventRemoved,
	wire.KindCleared: EventCleared,
}

// eventOf returns one of a batch's events, in memory of its own.
func eventOf(c *ClientConfig, b *feed.Batch, i int) *Event {
	e := &Event{
		Event:      cloneEvent(&b.Events[i]),
		Kind:       eventKinds[b.Events[i].Kind],
		Worker:     c.Worker,
		Model:      c.Model,
		Rank:       b.Rank,
		Seq:        b.Seq,
		More:       i < len(b.Events)-1,
		IngestTime: time.Unix(0, b.IngestTime),
	}
	if b.EngineTime != 0 {
		e.EngineTime = time.Unix(0, b.EngineTime)
	}
	return e
}

// cloneEvent returns an event that shares no memory with the decoder's. Strings
// are nobody's to change.
func cloneEvent(e *wire.Event) wire.Event {
	c := *e
	c.BlockHashes = slices.Clone(e.BlockHashes)
	c.Tokens = slices.Clone(e.Tokens)
	c.TokensHashes = slices.Clone(e.TokensHashes)
	if e.Raw != nil {
		c.Raw = &wire.Raw{
			ExtraKeys:    slices.Clone(e.Raw.ExtraKeys),
			BlockMMInfos: slices.Clone(e.Raw.BlockMMInfos),
			MMKeys:       slices.Clone(e.Raw.MMKeys),
		}
	}
	if e.Rare != nil {
		rare := *e.Rare
		rare.RemainingCopies = slices.Clone(rare.RemainingCopies)
		c.Rare = &rare
	}
	return c
}

// gapEvent returns the event that tells of a gap.
func gapEvent(c *ClientConfig, g feed.Gap) *Event {
	return &Event{
		Kind: EventGap, Worker: c.Worker, Model: c.Model, Rank: g.Rank, Seq: g.LastSeq, IngestTime: time.Unix(0, g.At), Gap: g,
	}
}
