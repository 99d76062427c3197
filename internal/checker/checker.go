package checker

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxMessage is the size in bytes that a message with several entries keeps to.
const maxMessage = 1 << 20

// phase is how far the current stream has come.
type phase int

const (
	phaseIdle     phase = iota // no stream has begun
	phaseAsked                 // begun, nothing received
	phaseAccepted              // the server has answered
)

// Options is what a Checker has to know of the server. The zero value is a server
// with its defaults.
type Options struct {
	// Tails tells that the server batches over time (batch.timeout above 0): the
	// tail of an engine batch may then come in an entry of its own.
	Tails bool
}

// Checker follows what one subscriber receives, over as many streams as it takes.
// It is for one goroutine.
//
// A first stream may begin anywhere. Each later one must resume at Position, with
// the same filter: a subscriber that begins elsewhere is another subscriber, and
// gets a Checker of its own.
type Checker struct {
	opts   Options
	filter filter
	phase  phase
	req    *kvcastv1.SubscribeRequest

	// The streams so far, seen as one.
	known     bool   // a stream has been accepted, and what follows is set
	epoch     string // of all of them
	fromStart bool   // they begin before seq 1
	head      uint64 // seq of the last position
	lastSeq   uint64 // seq of the last entry
	streamAt  uint64 // seq at which the current stream began
	seen      map[uint64]struct{}
	workers   map[string]*worker
	told      map[rankKey]int
	view      *View

	err error
}

// New returns a Checker that has seen nothing.
func New(opts Options) *Checker {
	return &Checker{
		opts:    opts,
		seen:    make(map[uint64]struct{}),
		workers: make(map[string]*worker),
		told:    make(map[rankKey]int),
		view:    NewView(),
	}
}

// Begin takes the request of the stream whose messages come next. An error is a
// mistake of the caller, not of the server: a start that this Checker cannot
// follow.
func (c *Checker) Begin(req *kvcastv1.SubscribeRequest) error {
	if _, err := wantMode(req); err != nil {
		return fmt.Errorf("begin stream: %w", err)
	}
	if c.known {
		after := req.GetAfter()
		switch {
		case after == nil:
			return errors.New("begin stream: a later stream of the same subscriber is a resume")
		case after.GetSeq() != c.head || (after.GetEpoch() != "" && after.GetEpoch() != c.epoch):
			return fmt.Errorf("begin stream: resume at %s:%d, but the subscriber is at %s:%d",
				after.GetEpoch(), after.GetSeq(), c.epoch, c.head)
		case !proto.Equal(normal(req.GetFilter()), normal(c.req.GetFilter())):
			return errors.New("begin stream: a position is good for the filter it was got with")
		}
	}
	c.req = proto.CloneOf(req)
	c.filter = newFilter(req.GetFilter())
	c.phase = phaseAsked
	return nil
}

// Receive takes the next message of the stream. The error is a *Violation; once
// there is one, every further call returns it.
func (c *Checker) Receive(msg *kvcastv1.SubscribeResponse) error {
	if c.err == nil {
		c.err = c.receive(msg)
	}
	return c.err
}

// Err returns the first violation that Receive found, or nil.
func (c *Checker) Err() error { return c.err }

// Position returns what has been delivered: where to resume. It is nil before the
// first stream has been accepted.
func (c *Checker) Position() *kvcastv1.Position {
	if !c.known {
		return nil
	}
	return &kvcastv1.Position{Epoch: c.epoch, Seq: c.head}
}

// View returns the state that the streams amount to. It is the Checker's own, and
// changes with Receive.
func (c *Checker) View() *View { return c.view }

func (c *Checker) receive(msg *kvcastv1.SubscribeResponse) error {
	if err := c.checkShape(msg); err != nil {
		return err
	}
	switch {
	case c.phase == phaseIdle:
		return broken(Protocol, "a message, and no stream has begun")
	case c.phase == phaseAsked && msg.GetAccepted() == nil:
		return broken(Protocol, "the first message is no Accepted")
	case c.phase == phaseAsked:
		return c.accept(msg)
	case msg.GetAccepted() != nil:
		return broken(Protocol, "a second Accepted")
	case msg.GetProgress() != nil:
		return c.progress(msg)
	default:
		return c.entries(msg)
	}
}

// checkShape finds what is wrong with a message whatever came before it.
func (c *Checker) checkShape(msg *kvcastv1.SubscribeResponse) error {
	if msg == nil {
		return broken(Protocol, "a nil message")
	}
	if msg.GetSnapshotBegin() != nil || msg.GetSnapshotWorker() != nil ||
		len(msg.GetSnapshotBlocks()) > 0 || msg.GetSnapshotEnd() != nil {
		return broken(Protocol, "part of a snapshot in a stream without one")
	}
	parts := 0
	for _, there := range []bool{msg.GetAccepted() != nil, msg.GetProgress() != nil, len(msg.GetEntries()) > 0} {
		if there {
			parts++
		}
	}
	if parts != 1 {
		return broken(Protocol, "a message with %d of entries, accepted and progress, not one", parts)
	}
	if msg.GetPosition() == nil {
		return broken(Protocol, "a message without a position")
	}
	if n := len(msg.GetEntries()); n > 1 {
		if size := proto.Size(msg); size > maxMessage {
			return broken(Protocol, "a message of %d bytes with %d entries, more than %d", size, n, maxMessage)
		}
	}
	return nil
}

// checkLink finds what is wrong between a message's position and the one before.
func (c *Checker) checkLink(msg *kvcastv1.SubscribeResponse) error {
	if got := msg.GetPosition().GetEpoch(); got != c.epoch {
		return broken(Protocol, "position of epoch %q in a stream of epoch %q", got, c.epoch)
	}
	if got := msg.GetPrevSeq(); got != c.head {
		return broken(GapFree, "prev_seq %d, but the position before was %d", got, c.head)
	}
	return nil
}
