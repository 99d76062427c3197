package server

import (
	"context"
	"errors"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// Journal is the log that the server reads. Its methods must be safe for concurrent use and must not block.
type Journal interface {
	journal.Reader
	// Bytes returns the size of the retained entries.
	Bytes() int
	// EvictedBytes returns the size of the evicted entries that streams still reference.
	EvictedBytes() int
}

// cursor is a stream's position in the journal. The server queues nothing for a stream.
type cursor struct {
	server       *Server
	out          responses
	bounds       journal.Bounds // when the stream was opened
	seq          uint64         // the last entry read
	filter       *filter        // the caller of openCursor releases it
	sweepKey     string         // of its snapshots, if sharesSweeps
	sharesSweeps bool
	snapshots    bool        // a snapshot may replace entries that are not retained
	digests      bool        // Progress carries digests, in one of digestIntervals intervals
	intervals    int         // for which Progress was sent, or is due, with digests
	subscription *subscriber // nil for Snapshot and Replay
	slices       [][]byte    // reused by next
	// sending is at most the seq of the first entry in the send in progress; 0: none.
	sending atomic.Uint64
}

// openCursor returns a cursor before the first entry.
func (s *Server) openCursor(stream grpc.ServerStream, f *kvcastv1.Filter) (*cursor, error) {
	b := s.journal.Bounds()
	filter, err := parseFilter(stream.Context(), f, b, s.quotas.filterBytes)
	key, shares := sweepKey(f)
	return &cursor{server: s, out: responses{stream: stream, epoch: b.Epoch}, bounds: b, filter: filter, sweepKey: key, sharesSweeps: shares}, err
}

// run sends the messages of a Subscribe, Replay or Snapshot stream; see runStream.
func (c *cursor) run(body func(context.Context) error) error {
	return c.server.runStream(&c.out, streamEnds{referencesEvicted: c.referencesEvicted}, body)
}

// referencesEvicted reports whether the stream must end, since evicted entries use too much memory and this
// stream is sending evicted entries.
func (c *cursor) referencesEvicted() bool {
	sending, j := c.sending.Load(), c.server.journal
	return sending != 0 && c.out.sendExceeds(evictedSendTimeout) &&
		j.EvictedBytes() > c.server.cfg.MaxEvictedBytes && sending < j.Bounds().Oldest
}

// accept sends the first message of a Subscribe or Replay stream.
func (c *cursor) accept(mode kvcastv1.Accepted_Mode) error {
	m := &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch:     c.bounds.Epoch,
		OldestSeq: c.bounds.Oldest,
		NewestSeq: c.bounds.Newest,
		Mode:      mode,

		ProgressIntervalNano: uint64(c.server.cfg.ProgressInterval),
	}}
	if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
		return c.out.sendUnpositioned(m)
	}
	return c.out.sendPositioned(m, c.seq)
}

// next reads entries up to the seq until, or the newest if until is 0, and sends the entries that the filter selects
// in one response. If the next entry is not retained and the client accepts snapshots, next sends a snapshot instead.
func (c *cursor) next(ctx context.Context, until uint64) error {
	chunk, err := c.server.journal.Read(ctx, journal.Query{
		After: c.seq, Until: until, MaxBytes: c.server.cfg.ResponseBytes, Filter: c.filter.journal(), Slices: c.slices[:0],
	})
	defer func() { clear(c.slices) }() // an idle stream must not reference entries
	c.slices = chunk.Slices
	if errors.Is(err, journal.ErrCompacted) {
		c.server.metrics.evicted.Inc()
	}
	switch {
	case errors.Is(err, journal.ErrCompacted) && c.snapshots:
		return c.snapshot(ctx)
	case err != nil:
		return callerror.OfRead(err)
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
	first := chunk.Slices[0]
	if err := c.sendChunk(chunk, before, c.out.sendEntries); err != nil {
		return err
	}
	if c.subscription != nil && before >= c.bounds.Newest { // otherwise the client asked for what was old already
		m.sent(first)
	}
	return nil
}

// sendChunk sends the entries of a chunk, which are after the seq, without the events that the filter excludes.
func (c *cursor) sendChunk(chunk journal.Chunk, after uint64, send func(journal.Chunk) error) error {
	c.sending.Store(after + 1)
	defer c.sending.Store(0)
	if chunk.Partial {
		chunk.Slices = [][]byte{trimEntries(chunk.Slices, c.filter.tiers)}
	}
	return send(chunk)
}
