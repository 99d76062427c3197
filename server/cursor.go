package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal is the log that the server reads. Its methods must be safe for concurrent use and must not block.
type Journal interface {
	// Bounds returns what is retained.
	Bounds() journal.Bounds
	// Read returns entries; see journal.Journal.
	Read(ctx context.Context, q journal.Query) (journal.Chunk, error)
	// Changed returns a channel that is closed at the next append.
	Changed() <-chan struct{}
	// Bytes returns the size of the retained entries.
	Bytes() int
	// EvictedBytes returns the size of the evicted entries that are still referenced.
	EvictedBytes() int
}

// cursor is a stream's position in the journal. Nothing is queued for a stream.
type cursor struct {
	server       *Server
	out          responses
	seq          uint64 // the last entry read
	filter       *filter
	snapshots    bool        // a snapshot may replace entries that are not retained
	digests      bool        // Progress carries digests
	subscription *subscriber // nil for Snapshot and Replay
	slices       [][]byte    // reused by next
	// sending is at most the seq of the first entry that is being sent; 0: none.
	sending atomic.Uint64
}

func newCursor(s *Server, stream grpc.ServerStream, epoch string, after uint64, f *filter) *cursor {
	return &cursor{server: s, out: responses{stream: stream, epoch: epoch}, seq: after, filter: f}
}

// evictedSendTimeout is how long a send may reference evicted entries while all streams
// reference more than MaxEvictedBytes of them.
const evictedSendTimeout = time.Second

// run sends the headers and runs the body of a stream. It sends the headers first since
// gRPC would delay them until the first message, and some clients wait for them.
//
// It returns when the body has returned or a send has stalled. Only the end of the call
// interrupts a stalled send; the body then returns later, in its own goroutine.
func (c *cursor) run(body func(context.Context) error) error {
	ctx := c.out.stream.Context()
	if err := c.out.stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	s, timeout := c.server, c.server.cfg.StallTimeout
	check := time.NewTicker(min(timeout/4+1, evictedSendTimeout/2))
	defer check.Stop()
	s.openStreams.Add(1)
	defer s.streamEnded()
	ended := make(chan error, 1)
	go func() { ended <- c.recoverPanic(ctx, body) }()
	for {
		select {
		case err := <-ended:
			if cause := ctx.Err(); cause != nil { // the client left, whatever the interrupted send returned
				return status.FromContextError(cause).Err()
			}
			return err
		case <-check.C:
			switch {
			case c.out.timer.exceeds(timeout):
				s.metrics.stalled.Inc()
				return errorf(ReasonSlowSubscriber, s.journal.Bounds(),
					"the client did not read for %v, which is the limit; resume after the last position, and read faster", timeout)
			case c.holdsEvicted():
				s.metrics.stalled.Inc()
				return errorf(ReasonSlowSubscriber, s.journal.Bounds(),
					"the client did not read for %v while slow clients hold too much memory of evicted entries; start from a snapshot, and read faster", evictedSendTimeout)
			}
		}
	}
}

// holdsEvicted reports whether the stream must end because evicted entries that streams
// are sending use too much memory, and this stream is sending some.
func (c *cursor) holdsEvicted() bool {
	sending, j := c.sending.Load(), c.server.journal
	return sending != 0 && c.out.timer.exceeds(evictedSendTimeout) &&
		j.EvictedBytes() > c.server.cfg.MaxEvictedBytes && sending < j.Bounds().Oldest
}

// recoverPanic runs the body. The recovery interceptor does not see panics in this goroutine.
func (c *cursor) recoverPanic(ctx context.Context, body func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.server.recovered(ctx, p)
		}
	}()
	return body(ctx)
}

// accept sends the first message of a Subscribe or Replay stream.
func (c *cursor) accept(mode kvcastv1.Accepted_Mode, b journal.Bounds) error {
	m := &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch:     b.Epoch,
		OldestSeq: b.Oldest,
		NewestSeq: b.Newest,
		Mode:      mode,

		ProgressIntervalNano: uint64(c.server.cfg.ProgressInterval),
	}}
	if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
		return c.out.messageWithin(m)
	}
	return c.out.message(m, c.seq)
}

// next advances the cursor up to a seq, 0 for the newest, by at most one response, and
// sends the entries that the filter selects.
func (c *cursor) next(ctx context.Context, until uint64) error {
	chunk, err := c.server.journal.Read(ctx, journal.Query{
		After: c.seq, Until: until, MaxBytes: c.server.cfg.ResponseBytes, Filter: c.filter.journal(), Slices: c.slices[:0],
	})
	defer func() { clear(c.slices) }() // so that an idle stream does not reference entries
	c.slices = chunk.Slices
	switch {
	case errors.Is(err, journal.ErrCompacted) && c.snapshots:
		return c.snapshot(ctx)
	case err != nil:
		return readError(err)
	}
	before := c.seq
	c.seq = chunk.Last
	if chunk.Entries == 0 {
		return nil
	}
	m := c.server.metrics
	m.responses.Inc()
	m.entries.Add(float64(chunk.Entries))
	m.bytes.Add(float64(chunk.Bytes))
	return c.sendChunk(chunk, before, c.out.entries)
}

// sendChunk sends entries after a seq, without the events that the filter leaves out.
func (c *cursor) sendChunk(chunk journal.Chunk, after uint64, send func(journal.Chunk) error) error {
	c.sending.Store(after + 1)
	defer c.sending.Store(0)
	if chunk.Partial {
		chunk.Slices = [][]byte{trimEntries(chunk.Slices, c.filter.tierSet())}
	}
	return send(chunk)
}
