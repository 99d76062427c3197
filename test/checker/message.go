package checker

import (
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxMessage is the size in bytes that a message of more than one entry, or of digests of
// more than one worker, keeps to.
const maxMessage = 1 << 20

// checkShape finds what is wrong with a message whatever came before it.
func (c *Checker) checkShape(msg *kvcastv1.SubscribeResponse) error {
	if msg == nil {
		return broken(Protocol, "a nil message")
	}
	parts := 0
	for _, there := range []bool{
		len(msg.GetEntries()) > 0, msg.GetAccepted() != nil, msg.GetProgress() != nil,
		msg.GetSnapshotBegin() != nil, msg.GetSnapshotWorker() != nil,
		len(msg.GetSnapshotBlocks()) > 0, msg.GetSnapshotEnd() != nil,
	} {
		if there {
			parts++
		}
	}
	// A ReplayResponse has no Progress: a position alone stands for it.
	alone := c.call == callReplay && parts == 0 && msg.GetPosition() != nil
	if parts != 1 && !alone {
		return broken(Protocol, "a message with %d parts, not one", parts)
	}
	digests := msg.GetProgress().GetWorkers()
	several := len(digests) > 0 && digests[0].GetWorker() != digests[len(digests)-1].GetWorker()
	if len(msg.GetEntries()) > 1 || len(msg.GetSnapshotBlocks()) > 0 || several {
		if size := proto.Size(msg); size > maxMessage {
			return broken(Protocol, "a message of %d bytes with %d entries, more than %d",
				size, len(msg.GetEntries()), maxMessage)
		}
	}
	return nil
}

// partOfSnapshot tells that a message has its place within a snapshot alone.
func partOfSnapshot(msg *kvcastv1.SubscribeResponse) bool {
	return msg.GetSnapshotWorker() != nil || len(msg.GetSnapshotBlocks()) > 0 || msg.GetSnapshotEnd() != nil
}

// checkLink finds what is wrong between a message's position and the one before.
func (c *Checker) checkLink(msg *kvcastv1.SubscribeResponse) error {
	if msg.GetPosition() == nil {
		return broken(Protocol, "a message without a position")
	}
	if got := msg.GetPosition().GetEpoch(); got != c.epoch {
		return broken(Protocol, "position of epoch %q in a stream of epoch %q", got, c.epoch)
	}
	if got := msg.GetPrevSeq(); got != c.head {
		return broken(GapFree, "prev_seq %d, but the position before was %d", got, c.head)
	}
	return nil
}

// checkUnplaced finds a position in a message that must not carry one.
func checkUnplaced(msg *kvcastv1.SubscribeResponse) error {
	if msg.GetPosition() != nil || msg.GetPrevSeq() != 0 {
		return broken(Protocol, "position %d and prev_seq %d where what is held is not whole",
			msg.GetPosition().GetSeq(), msg.GetPrevSeq())
	}
	return nil
}
