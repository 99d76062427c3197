package engineclient

import (
	"context"
	"slices"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
)

// Handler handles the events of an engine. A Client calls it from one goroutine, one event
// after the other, in the engine's order. An error or a panic is counted and logged, and
// the next event follows. The context is done when the Client is stopped, which waits for
// the call in progress.
type Handler interface {
	HandleEvent(ctx context.Context, e *Event) error
}

// HandlerFunc is a function as an Handler.
type HandlerFunc func(ctx context.Context, e *Event) error

// HandleEvent calls the function.
func (f HandlerFunc) HandleEvent(ctx context.Context, e *Event) error { return f(ctx, e) }

// Event is one event of an engine, or a gap or restart. The handler may keep it.
type Event struct {
	// Event is the engine's event, where Kind is EventStored, EventRemoved or
	// EventCleared. Its own Kind is equivalent.
	wire.Event

	Kind EventKind
	// Worker and Model are those of the Config.
	Worker string
	Model  string
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine's number of the batch that the event is of; of an EventGap
	// that of the last batch missing. 0 for EventRestarted.
	Seq uint64
	// More reports whether the next event is of the same batch.
	More bool
	// EngineTime is the engine's timestamp of the batch; zero where it is unknown.
	// IngestTime is when the batch was read, or the gap or restart noticed.
	EngineTime time.Time
	IngestTime time.Time
	// Gap is set where Kind is EventGap.
	Gap feed.Gap
}

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events, first those that engines publish.
const (
	// EventStored: the engine stored these blocks.
	EventStored EventKind = iota + 1
	// EventRemoved: it evicted these blocks.
	EventRemoved
	// EventCleared: it cleared the cache of the rank.
	EventCleared
	// EventGap: batches are lost. With the reason GapJoinedLate they were published before
	// the first batch of the rank that was read.
	EventGap
	// EventRestarted: the engine restarted; the cache of the rank is empty.
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

// eventOf returns a copy of one of a batch's events.
func eventOf(c *Config, b *feed.Batch, i int) *Event {
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

// cloneEvent returns a deep copy, as the decoder reuses its memory.
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

func gapEvent(c *Config, g feed.Gap) *Event {
	return &Event{
		Kind: EventGap, Worker: c.Worker, Model: c.Model, Rank: g.Rank, Seq: g.LastSeq, IngestTime: time.Unix(0, g.At), Gap: g,
	}
}
