package checker

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// call is the RPC of a stream.
type call int

const (
	callSubscribe call = iota
	callReplay
	callSnapshot
)

// BeginReplay starts a Replay with its request, as Begin does. If the Checker has seen a stream
// before, the replay must begin at its Position.
func (c *Checker) BeginReplay(req *kvcastv1.ReplayRequest) error {
	after, until := req.GetAfter(), req.GetUntil()
	if until != nil && until.GetSeq() < after.GetSeq() {
		return fmt.Errorf("begin replay: it is after %d, and until %d", after.GetSeq(), until.GetSeq())
	}
	sub := &kvcastv1.SubscribeRequest{Filter: req.GetFilter(), GapPolicy: kvcastv1.GapPolicy_GAP_POLICY_FAIL}
	if after != nil {
		sub.Start = &kvcastv1.SubscribeRequest_After{After: after}
	} else {
		sub.Start = &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}
	}
	if err := c.begin(callReplay, sub); err != nil {
		return fmt.Errorf("begin replay: %w", err)
	}
	c.until = proto.CloneOf(until)
	return nil
}

// ReceiveReplay checks the next message of a Replay, as Receive does.
func (c *Checker) ReceiveReplay(msg *kvcastv1.ReplayResponse) error {
	if c.err != nil {
		return c.err
	}
	if c.err = checkKnown(msg); c.err != nil {
		return c.err
	}
	return c.Receive(&kvcastv1.SubscribeResponse{
		Entries: msg.GetEntries(), Position: msg.GetPosition(), PrevSeq: msg.GetPrevSeq(), Accepted: msg.GetAccepted(),
	})
}

// EndReplay is called when a Replay has ended without an error. It returns a violation if the
// replay was not complete.
func (c *Checker) EndReplay() error {
	switch {
	case c.err != nil:
	case c.call != callReplay || c.phase == phaseIdle || c.phase == phaseEnded:
		return errors.New("end replay: no replay is in progress")
	case c.phase == phaseAsked:
		c.err = broken(Protocol, "a replay that ends before its Accepted")
	case c.head != c.last:
		c.err = broken(GapFree, "a replay until %d that ends at %d", c.last, c.head)
	}
	c.phase = phaseEnded
	return c.err
}

// boundReplay derives the end of a replay from its Accepted.
func (c *Checker) boundReplay(acc *kvcastv1.Accepted) error {
	if c.until == nil {
		c.last = acc.GetNewestSeq()
		return nil
	}
	c.last = c.until.GetSeq()
	if e := c.until.GetEpoch(); e != "" && e != acc.GetEpoch() {
		return broken(Protocol, "a replay until a position of epoch %q in epoch %q", e, acc.GetEpoch())
	}
	if c.last < c.head {
		return broken(Protocol, "a replay until %d that begins after %d", c.last, c.head)
	}
	return nil
}

// checkBound finds content beyond the end of a replay.
func (c *Checker) checkBound(msg *kvcastv1.SubscribeResponse) error {
	if c.call != callReplay {
		return nil
	}
	for _, e := range msg.GetEntries() {
		if e.GetSeq() > c.last {
			return broken(Filtered, "entry %d in a replay until %d", e.GetSeq(), c.last)
		}
	}
	if at := msg.GetPosition().GetSeq(); at > c.last {
		return broken(Progress, "position %d in a replay until %d", at, c.last)
	}
	return nil
}

// BeginSnapshot starts a Snapshot with its request, as Begin does.
func (c *Checker) BeginSnapshot(req *kvcastv1.SnapshotRequest) error {
	if err := c.begin(callSnapshot, &kvcastv1.SubscribeRequest{Filter: req.GetFilter()}); err != nil {
		return fmt.Errorf("begin snapshot: %w", err)
	}
	// A Snapshot has no Accepted to wait for.
	c.phase, c.snap = phaseAnnounced, snapshot{}
	return nil
}

// ReceiveSnapshot checks the next message of a Snapshot, as Receive does.
func (c *Checker) ReceiveSnapshot(msg *kvcastv1.SnapshotResponse) error {
	if c.err != nil {
		return c.err
	}
	if c.err = checkKnown(msg); c.err != nil {
		return c.err
	}
	return c.Receive(&kvcastv1.SubscribeResponse{
		Entries: msg.GetEntries(), Position: msg.GetPosition(), PrevSeq: msg.GetPrevSeq(), Progress: msg.GetProgress(),
		SnapshotBegin: msg.GetSnapshotBegin(), SnapshotWorker: msg.GetSnapshotWorker(),
		SnapshotBlocks: msg.GetSnapshotBlocks(), SnapshotEnd: msg.GetSnapshotEnd(),
	})
}

// EndSnapshot is called when a Snapshot has ended without an error. It returns a violation if
// SnapshotEnd was not received.
func (c *Checker) EndSnapshot() error {
	switch {
	case c.err != nil:
	case c.call != callSnapshot:
		return errors.New("end snapshot: no snapshot is in progress")
	case c.phase != phaseEnded:
		c.err = broken(Snapshot, "the stream ends before SnapshotEnd")
	}
	c.phase = phaseEnded
	return c.err
}

// checkKnown finds fields that the contract has only in SubscribeResponse.
func checkKnown(msg proto.Message) error {
	if n := len(msg.ProtoReflect().GetUnknown()); n > 0 {
		return broken(Protocol, "%d bytes of fields that the message does not have", n)
	}
	return nil
}
