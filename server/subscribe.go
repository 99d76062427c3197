package server

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// responseBytes is about what a response holds when its subscriber is behind:
// larger ones cost less for each event, but the transport takes them no faster.
const responseBytes = 64 << 10

// Subscribe implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	if !s.streams.enter() {
		return errTooManySubscribers(s.cfg.MaxSubscribers, s.journal.Bounds())
	}
	defer s.streams.leave()
	start, err := s.start(req)
	if err != nil {
		return err
	}
	// gRPC holds headers back until the first message, and some clients wait for
	// them before they return the stream.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	c := cursor{server: s.Server, stream: stream, epoch: start.bounds.Epoch, seq: start.after}
	if err = c.accept(start); err == nil {
		err = c.follow(stream.Context())
	}
	if cause := stream.Context().Err(); cause != nil {
		// The client left, whatever the send that it interrupted says.
		return status.FromContextError(cause).Err()
	}
	return err
}

// start is where a stream begins.
type start struct {
	mode   kvcastv1.Accepted_Mode
	after  uint64
	bounds journal.Bounds // at that time
}

// start finds out where the stream that was asked for begins.
func (s routerEvents) start(req *kvcastv1.SubscribeRequest) (start, error) {
	b := s.journal.Bounds()
	if _, ok := kvcastv1.GapPolicy_name[int32(req.GetGapPolicy())]; !ok {
		return start{}, errInvalid("gap_policy", "unknown value; allowed are GAP_POLICY_SNAPSHOT and GAP_POLICY_FAIL", b)
	}
	if req.GetGapPolicy() == kvcastv1.GapPolicy_GAP_POLICY_SNAPSHOT {
		return start{}, errUnimplemented(b, "GAP_POLICY_SNAPSHOT is not built in this version; leave gap_policy out, and start from the earliest entry where a position is refused")
	}
	if f := req.GetFilter(); len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) > 0 {
		return start{}, errUnimplemented(b, "filter is not built in this version; leave it out, and choose among the entries by worker and model")
	}
	if req.GetProgressDigests() {
		return start{}, errUnimplemented(b, "progress_digests is not built in this version; leave it out")
	}
	switch from := req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_After:
		return s.resume(from.After, b)
	case *kvcastv1.SubscribeRequest_Latest:
		return start{kvcastv1.Accepted_MODE_LATEST, b.Newest, b}, nil
	case *kvcastv1.SubscribeRequest_Earliest:
		return start{kvcastv1.Accepted_MODE_EARLIEST, b.Oldest - 1, b}, nil
	}
	return start{}, errUnimplemented(b, `starting from a snapshot, the default, is not built in this version; say where to start: "earliest", "latest", or "after" with a position`)
}

func (s routerEvents) resume(after *kvcastv1.Position, b journal.Bounds) (start, error) {
	seq := after.GetSeq()
	switch epoch := after.GetEpoch(); {
	case epoch != "" && epoch != b.Epoch:
		return start{}, errEpochMismatch(epoch, b)
	case seq > b.Newest:
		return start{}, errAhead(seq, b)
	case seq+1 < b.Oldest:
		return start{}, errCompacted(seq, b)
	}
	return start{kvcastv1.Accepted_MODE_RESUME, seq, b}, nil
}

// cursor is one subscriber: a place in the journal, and nothing queued.
type cursor struct {
	server *Server
	stream grpc.ServerStream
	epoch  string
	seq    uint64 // the last entry sent
	slices [][]byte
}

func (c *cursor) accept(from start) error {
	return c.message(&kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch:     from.bounds.Epoch,
		OldestSeq: from.bounds.Oldest,
		NewestSeq: from.bounds.Newest,
		Mode:      from.mode,
	}})
}

// follow sends what comes after the cursor, until the client leaves or the
// server shuts down and all has been sent.
func (c *cursor) follow(ctx context.Context) error {
	j := c.server.journal
	idle := time.NewTimer(c.progressAfter())
	defer idle.Stop()
	for {
		// Asked before the read, so that when both say yes nothing is left.
		draining := c.server.isDraining()
		sent, err := c.sendNext()
		if err != nil {
			return err
		}
		if sent {
			idle.Reset(c.progressAfter())
			continue
		}
		if draining {
			return errShuttingDown(j.Bounds())
		}
		changed := j.Changed()
		// An entry that came before Changed was asked closes nothing.
		if sent, err := c.sendNext(); err != nil {
			return err
		} else if sent {
			idle.Reset(c.progressAfter())
			continue
		}
		select {
		case <-changed:
		case <-c.server.draining:
		case <-idle.C:
			if err := c.progress(); err != nil {
				return err
			}
			idle.Reset(c.progressAfter())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sendNext sends the entries after the cursor that fit into a response, and
// tells whether there were any.
func (c *cursor) sendNext() (bool, error) {
	chunk, err := c.server.journal.Read(c.seq, responseBytes, c.slices[:0])
	c.slices = chunk.Slices
	if err != nil {
		return false, c.readError(err)
	}
	if chunk.Last == 0 {
		return false, nil
	}
	if err := c.stream.SendMsg(entriesResponse(chunk, c.epoch, c.seq)); err != nil {
		return false, err
	}
	c.seq = chunk.Last
	c.server.metrics.sent(chunk)
	// Let go of the journal's memory while there is nothing to send.
	clear(c.slices)
	return true, nil
}

// readError tells a subscriber that fell off the old end of the journal.
func (c *cursor) readError(err error) error {
	var pe *journal.PositionError
	switch {
	case !errors.As(err, &pe):
		return err
	case errors.Is(err, journal.ErrCompacted):
		return errCompacted(pe.After, pe.Bounds)
	}
	return errAhead(pe.After, pe.Bounds)
}

// progress tells that the stream is alive, and where it stands.
func (c *cursor) progress() error {
	c.server.metrics.progress.Inc()
	return c.message(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}})
}

// message sends a message other than entries, with the position reached.
func (c *cursor) message(m *kvcastv1.SubscribeResponse) error {
	f, err := messageResponse(m, c.epoch, c.seq, c.seq)
	if err != nil {
		return err
	}
	return c.stream.SendMsg(f)
}

// progressAfter is how long to be idle before the next Progress: some jitter
// keeps many subscribers from being told all at once.
func (c *cursor) progressAfter() time.Duration {
	p := c.server.cfg.Progress
	return p - time.Duration(rand.Int64N(int64(p)/5+1))
}
