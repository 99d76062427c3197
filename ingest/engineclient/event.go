package engineclient

import (
	"context"
	"slices"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// Handler handles the events of an engine. A Client calls it from one goroutine, in the engine's order. An error or a panic is counted and
// logged, and the next event follows. The context is done when the Client is stopped; Stop waits for the call in progress.
type Handler interface {
	HandleEvent(ctx context.Context, e *Event) error
}

// HandlerFunc is a function that implements Handler.
type HandlerFunc func(ctx context.Context, e *Event) error

// HandleEvent calls the function.
func (f HandlerFunc) HandleEvent(ctx context.Context, e *Event) error { return f(ctx, e) }

// Event is an event of an engine, a gap, or a restart. The handler may keep it.
type Event struct {
	// Event is the engine's event if Kind is EventStored, EventRemoved or EventCleared.
	wire.Event

	Kind EventKind
	// Worker and Model are copied from the Config.
	Worker string
	Model  string
	// Rank is the dp rank.
	Rank uint32
	// Seq is the engine's number of the event's batch; for an EventGap the number of the last missing batch; for an EventRestarted 0.
	Seq uint64
	// More reports whether the next event is of the same batch.
	More bool
	// EngineTime is the engine's timestamp of the batch; zero if it has none. IngestTime is when the
	// batch was read, or the gap or restart was detected.
	EngineTime time.Time
	IngestTime time.Time
	// Gap is set if Kind is EventGap.
	Gap Gap
}

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events. Engines publish the first three.
const (
	// EventStored: the engine stored blocks.
	EventStored = EventKind(wire.KindStored)
	// EventRemoved: the engine evicted blocks.
	EventRemoved = EventKind(wire.KindRemoved)
	// EventCleared: the engine cleared the cache of the rank.
	EventCleared = EventKind(wire.KindCleared)
	// EventGap: batches are lost. If the reason is GapJoinedLate, they were published before the first batch read of the rank.
	EventGap EventKind = 4
	// EventRestarted: the engine restarted; the cache of the rank is empty.
	EventRestarted EventKind = 5
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

// lane passes batches, gaps and restarts to emit, as events. It is the feed.Lane of a Client's worker, and the feed.Sink that returns it.
type lane struct {
	config *Config
	emit   func(*Event)
}

// AddWorker is called once: the worker is never removed.
func (l lane) AddWorker(feed.Worker) feed.Lane { return l }

// RemoveWorker is never called.
func (l lane) RemoveWorker(string, feed.RemoveReason) {}

func (l lane) Batch(b *feed.Batch) {
	for i := range b.Events {
		e := l.event(EventKind(b.Events[i].Kind), b.Rank, b.IngestTime)
		e.Event = cloneEvent(&b.Events[i])
		e.Seq = b.Seq
		e.More = i < len(b.Events)-1
		if b.EngineTime != 0 {
			e.EngineTime = time.Unix(0, b.EngineTime)
		}
		l.emit(e)
	}
}

func (l lane) Gap(g feed.Gap) {
	e := l.event(EventGap, g.Rank, g.At)
	e.Seq, e.Gap = g.LastSeq, g
	l.emit(e)
}

func (l lane) Restarted(r feed.Restart) { l.emit(l.event(EventRestarted, r.Rank, r.At)) }

func (l lane) event(kind EventKind, rank uint32, at int64) *Event {
	return &Event{Kind: kind, Worker: l.config.Worker, Model: l.config.Model, Rank: rank, IngestTime: time.Unix(0, at)}
}

// cloneEvent returns a deep copy, because the decoder reuses the event's memory.
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
