package engineclient

import (
	"context"
	"fmt"
	"time"

	"github.com/kvcast/kvcast/feed"
)

// queueLane is the feed.Sink and feed.Lane of a Client's worker. It appends events
// to the Client's queue, and blocks while the queue is full.
type queueLane struct {
	*delivery
	stopping <-chan struct{} // closed when the Client is stopped
}

// AddWorker is called once: the worker is never removed.
func (l *queueLane) AddWorker(feed.Worker) feed.Lane { return l }

// RemoveWorker is never called.
func (l *queueLane) RemoveWorker(string, feed.RemoveReason) {}

// Batch queues the events of a batch.
func (l *queueLane) Batch(b *feed.Batch) {
	for i := range b.Events {
		if !l.put(eventOf(l.config, b, i)) {
			l.discarded.Add(uint64(len(b.Events) - i))
			return
		}
	}
}

// Gap queues an EventGap.
func (l *queueLane) Gap(g feed.Gap) { l.putOne(gapEvent(l.config, g)) }

// Restarted queues an EventRestarted.
func (l *queueLane) Restarted(r feed.Restart) { l.putOne(restartEvent(l.config, r)) }

func (l *queueLane) putOne(e *Event) {
	if !l.put(e) {
		l.discarded.Add(1)
	}
}

// put waits for room in the queue. It returns false once the Client is stopped.
func (l *queueLane) put(e *Event) bool {
	select {
	case <-l.stopping:
		return false
	default:
	}
	select {
	case l.queue <- e:
		return true
	case <-l.stopping:
		return false
	}
}

// handlerLane calls a handler with the events of a replay, until that fails or the context
// is done.
type handlerLane struct {
	config  *Config
	ctx     context.Context
	handler Handler
	cancel  context.CancelCauseFunc
}

// Batch calls the handler with the events of a batch.
func (l *handlerLane) Batch(b *feed.Batch) {
	for i := range b.Events {
		l.call(eventOf(l.config, b, i))
	}
}

// Gap calls the handler with an EventGap.
func (l *handlerLane) Gap(g feed.Gap) { l.call(gapEvent(l.config, g)) }

// Restarted calls the handler with an EventRestarted.
func (l *handlerLane) Restarted(r feed.Restart) { l.call(restartEvent(l.config, r)) }

func (l *handlerLane) call(e *Event) {
	if l.ctx.Err() != nil {
		return
	}
	if err := handle(l.ctx, l.handler, e); err != nil {
		l.cancel(fmt.Errorf("handle replayed batch %d: %w", e.Seq, err))
	}
}

func restartEvent(c *Config, r feed.Restart) *Event {
	return &Event{Kind: EventRestarted, Worker: c.Worker, Model: c.Model, Rank: r.Rank, IngestTime: time.Unix(0, r.At)}
}
