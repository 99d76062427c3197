package checker

import (
	"errors"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// wantMode returns how the server has to start what was asked for.
func wantMode(req *kvcastv1.SubscribeRequest) (kvcastv1.Accepted_Mode, error) {
	switch req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_After:
		return kvcastv1.Accepted_MODE_RESUME, nil
	case *kvcastv1.SubscribeRequest_Latest:
		return kvcastv1.Accepted_MODE_LATEST, nil
	case *kvcastv1.SubscribeRequest_Earliest:
		return kvcastv1.Accepted_MODE_EARLIEST, nil
	default:
		return 0, errors.New("streams that begin with a snapshot are not checked")
	}
}

// accept judges the answer to the start that was asked for.
func (c *Checker) accept(msg *kvcastv1.SubscribeResponse) error {
	acc, pos := msg.GetAccepted(), msg.GetPosition()
	oldest, newest, at := acc.GetOldestSeq(), acc.GetNewestSeq(), pos.GetSeq()
	switch {
	case acc.GetEpoch() == "":
		return broken(Protocol, "Accepted without an epoch")
	case pos.GetEpoch() != acc.GetEpoch():
		return broken(Protocol, "Accepted of epoch %q has a position of epoch %q", acc.GetEpoch(), pos.GetEpoch())
	case c.known && acc.GetEpoch() != c.epoch:
		return broken(Protocol, "resumed in epoch %q, asked in %q", acc.GetEpoch(), c.epoch)
	case oldest == 0 || oldest > newest+1:
		return broken(Protocol, "Accepted with oldest %d and newest %d", oldest, newest)
	case msg.GetPrevSeq() != 0 && msg.GetPrevSeq() != at:
		// Nothing comes before it, so it is the start or nothing.
		return broken(GapFree, "Accepted at %d with prev_seq %d", at, msg.GetPrevSeq())
	}
	if want, _ := wantMode(c.req); acc.GetMode() != want {
		return broken(Protocol, "Accepted with mode %v, asked for %v", acc.GetMode(), want)
	}
	switch acc.GetMode() {
	case kvcastv1.Accepted_MODE_RESUME:
		after := c.req.GetAfter()
		if after.GetEpoch() != "" && after.GetEpoch() != acc.GetEpoch() {
			return broken(Protocol, "resumed in epoch %q, asked in %q", acc.GetEpoch(), after.GetEpoch())
		}
		if at != after.GetSeq() {
			return broken(GapFree, "resumed at %d, asked for %d", at, after.GetSeq())
		}
	case kvcastv1.Accepted_MODE_LATEST:
		if at != newest {
			return broken(GapFree, "latest begins at %d, the newest is %d", at, newest)
		}
	case kvcastv1.Accepted_MODE_EARLIEST:
		if at != oldest-1 {
			return broken(GapFree, "earliest begins at %d, the oldest is %d", at, oldest)
		}
	default:
		// wantMode returns no other.
	}
	if at < oldest-1 || at > newest {
		return broken(Protocol, "accepted at %d, outside of %d to %d", at, oldest, newest)
	}
	if !c.known {
		c.known, c.epoch, c.head, c.fromStart = true, acc.GetEpoch(), at, at == 0
	}
	c.streamAt = at
	c.phase = phaseAccepted
	return nil
}
