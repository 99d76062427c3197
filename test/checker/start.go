package checker

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// wantMode returns the start mode that the request requires.
func wantMode(req *kvcastv1.SubscribeRequest) kvcastv1.Accepted_Mode {
	switch req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_After:
		return kvcastv1.Accepted_MODE_RESUME
	case *kvcastv1.SubscribeRequest_Latest:
		return kvcastv1.Accepted_MODE_LATEST
	case *kvcastv1.SubscribeRequest_Earliest:
		return kvcastv1.Accepted_MODE_EARLIEST
	default:
		return kvcastv1.Accepted_MODE_SNAPSHOT
	}
}

// accept checks the Accepted that answers a request.
func (c *Checker) accept(msg *kvcastv1.SubscribeResponse) error {
	acc := msg.GetAccepted()
	oldest, newest := acc.GetOldestSeq(), acc.GetNewestSeq()
	switch {
	case acc.GetEpoch() == "":
		return broken(Protocol, "Accepted without an epoch")
	case oldest == 0 || oldest > newest+1:
		return broken(Protocol, "Accepted with oldest %d and newest %d", oldest, newest)
	}
	mode, want := acc.GetMode(), wantMode(c.req)
	instead := mode == kvcastv1.Accepted_MODE_SNAPSHOT && want == kvcastv1.Accepted_MODE_RESUME
	if mode != want && !instead {
		return broken(Protocol, "Accepted with mode %v, requested %v", mode, want)
	}
	c.server = acc.GetEpoch()
	if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
		return c.announce(msg)
	}
	if err := c.checkStart(msg); err != nil {
		return err
	}
	at := msg.GetPosition().GetSeq()
	if c.state == stateNone {
		c.state, c.stateFilter = stateComplete, c.req.GetFilter()
		c.epoch, c.head = acc.GetEpoch(), at
		c.fromStart, c.allWorkersSeen = at == 0, at == 0
	}
	c.streamStartSeq = at
	c.phase = phaseAccepted
	if c.call == callReplay {
		return c.boundReplay(acc)
	}
	return nil
}

// announce checks an Accepted that a snapshot follows.
func (c *Checker) announce(msg *kvcastv1.SubscribeResponse) error {
	if err := checkUnplaced(msg); err != nil {
		return err
	}
	c.snap = snapshot{}
	if after := c.req.GetAfter(); after != nil {
		acc := msg.GetAccepted()
		same := after.GetEpoch() == "" || after.GetEpoch() == acc.GetEpoch()
		switch {
		case c.req.GetGapPolicy() == kvcastv1.GapPolicy_GAP_POLICY_FAIL:
			return broken(Protocol, "a snapshot where the stream had to resume or to fail")
		case same && after.GetSeq()+1 >= acc.GetOldestSeq():
			return broken(Protocol, "a snapshot instead of resuming at %d, with %d the oldest",
				after.GetSeq(), acc.GetOldestSeq())
		case same:
			c.snap.minEndSeq = after.GetSeq()
		}
	}
	c.phase = phaseAnnounced
	return nil
}

// checkStart finds errors in the position of an Accepted.
func (c *Checker) checkStart(msg *kvcastv1.SubscribeResponse) error {
	acc, pos := msg.GetAccepted(), msg.GetPosition()
	oldest, newest, at := acc.GetOldestSeq(), acc.GetNewestSeq(), pos.GetSeq()
	switch {
	case pos == nil:
		return broken(Protocol, "Accepted without a position")
	case pos.GetEpoch() != acc.GetEpoch():
		return broken(Protocol, "Accepted of epoch %q has a position of epoch %q", acc.GetEpoch(), pos.GetEpoch())
	case c.state != stateNone && acc.GetEpoch() != c.epoch:
		return broken(Protocol, "resumed in epoch %q, requested in %q", acc.GetEpoch(), c.epoch)
	case msg.GetPrevSeq() != 0 && msg.GetPrevSeq() != at:
		// Nothing precedes it, so the position is the start or absent.
		return broken(GapFree, "Accepted at %d with prev_seq %d", at, msg.GetPrevSeq())
	}
	switch acc.GetMode() {
	case kvcastv1.Accepted_MODE_RESUME:
		after := c.req.GetAfter()
		if after.GetEpoch() != "" && after.GetEpoch() != acc.GetEpoch() {
			return broken(Protocol, "resumed in epoch %q, requested in %q", acc.GetEpoch(), after.GetEpoch())
		}
		if at != after.GetSeq() {
			return broken(GapFree, "resumed at %d, requested %d", at, after.GetSeq())
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
		// No other start has a position.
	}
	if at < oldest-1 || at > newest {
		return broken(Protocol, "accepted at %d, outside of %d to %d", at, oldest, newest)
	}
	return nil
}
