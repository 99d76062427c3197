package server

import (
	"context"
	"fmt"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Replay implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Replay(req *kvcastv1.ReplayRequest, stream kvcastv1.RouterEventService_ReplayServer) error {
	if err := s.welcome(); err != nil {
		return err
	}
	if !s.replays.enter() {
		return errTooManyReplays(s.cfg.MaxSubscribers, s.journal.Bounds())
	}
	defer s.replays.leave()
	b := s.journal.Bounds()
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return err
	}
	defer filter.release()
	after, until, err := replayRange(req, b)
	if err != nil {
		return err
	}
	c := newCursor(s.Server, stream, b.Epoch, after, filter)
	return c.run(func(ctx context.Context) error {
		mode := kvcastv1.Accepted_MODE_RESUME
		if req.GetAfter() == nil {
			mode = kvcastv1.Accepted_MODE_EARLIEST
		}
		if err := c.accept(mode, b); err != nil {
			return err
		}
		for c.seq < until {
			if err := c.next(ctx, until); err != nil {
				return err
			}
		}
		if c.out.prev == until {
			return nil
		}
		// The filter took nothing of the last entries: tell that they were read.
		return c.out.message(&kvcastv1.SubscribeResponse{}, until)
	})
}

// replayRange finds out after which entry a replay begins, and with which it
// ends.
func replayRange(req *kvcastv1.ReplayRequest, b journal.Bounds) (after, until uint64, err error) {
	after, until = b.Oldest-1, b.Newest
	if p := req.GetAfter(); p != nil {
		if err := checkPosition(p, b); err != nil {
			return 0, 0, err
		}
		after = p.GetSeq()
	}
	p := req.GetUntil()
	if p == nil {
		return after, until, nil
	}
	until = p.GetSeq()
	switch epoch := p.GetEpoch(); {
	case epoch != "" && epoch != b.Epoch:
		return 0, 0, errEpochMismatch(epoch, b)
	case until > b.Newest:
		return 0, 0, errAhead(until, b)
	case until < after && req.GetAfter() == nil:
		return 0, 0, errCompacted(until, b)
	case until < after:
		return 0, 0, errInvalid("until", fmt.Sprintf("%d is not allowed: want %d, which is after, to %d, the newest", until, after, b.Newest), b)
	}
	return after, until, nil
}
