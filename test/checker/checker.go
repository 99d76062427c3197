// Package checker verifies streams of entries against the contract.
//
// Requests and received messages flow in, over any number of resumed streams; the first violation
// flows out, with the Property that it violates. View is the resulting state, to compare with the
// blocks of the engines.
//
// The checker is an oracle: it follows the comments of the contract, uses plain maps, and shares no
// code with the server. It checks streams of Subscribe, Replay and Snapshot, from any start, with
// snapshots anywhere.
package checker

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// phase is the progress of the current stream.
type phase int

const (
	phaseIdle      phase = iota // no stream has begun
	phaseAsked                  // requested, nothing received
	phaseAnnounced              // a snapshot must come next
	phaseSnapshot               // within a snapshot
	phaseAccepted               // complete state, entries follow
	phaseEnded                  // no message may follow
)

// stateKind is how complete the subscriber's state is.
type stateKind int

const (
	stateNone     stateKind = iota // no stream has been accepted
	statePartial                   // a snapshot is in progress
	stateComplete                  // complete up to a position
)

// Options describe the server. The zero value is a server with defaults.
type Options struct {
	// Tails reports whether the server batches over time (batch.timeout above 0), so that
	// the tail of an engine batch may be an entry of its own.
	Tails bool
	// Shared reports whether several servers share the journal, so that entries may have no events: the records of
	// workers' owners.
	Shared bool
}

// Checker checks what one subscriber receives, over any number of streams. It is not safe for
// concurrent use.
//
// The first stream may begin anywhere. Each later stream must resume at Position with the same filter, or start with a
// snapshot. Use another Checker for a stream that begins elsewhere.
type Checker struct {
	opts Options

	// The current stream.
	phase  phase
	call   call
	req    *kvcastv1.SubscribeRequest
	filter filter
	server string             // epoch that the server reported; empty before
	until  *kvcastv1.Position // requested end of a replay
	last   uint64             // seq at which the replay must end
	snap   snapshot

	// State of all streams since the last SnapshotBegin.
	state          stateKind
	stateFilter    *kvcastv1.Filter // filter of the position
	epoch          string           // of all these streams
	fromStart      bool             // the streams begin before seq 1
	allWorkersSeen bool             // the streams announced every worker
	head           uint64           // seq of the last position
	lastSeq        uint64           // seq of the last entry
	streamStartSeq uint64           // seq at which the current stream began
	snapshotSeq    uint64           // seq at which the snapshot ended; 0 if there was none
	seen           map[uint64]struct{}
	workers        map[string]*worker
	view           *View

	// All streams.
	reported map[rankKey]int
	compared int // digests
	err      error
}

// New returns a Checker that has seen no stream.
func New(opts Options) *Checker {
	return &Checker{
		opts:     opts,
		seen:     make(map[uint64]struct{}),
		workers:  make(map[string]*worker),
		reported: make(map[rankKey]int),
		view:     NewView(),
	}
}

// Begin starts a stream with its request. An error is a mistake of the caller, not of the server: a
// start that this Checker cannot follow.
func (c *Checker) Begin(req *kvcastv1.SubscribeRequest) error {
	if err := c.begin(callSubscribe, req); err != nil {
		return fmt.Errorf("begin stream: %w", err)
	}
	return nil
}

func (c *Checker) begin(what call, req *kvcastv1.SubscribeRequest) error {
	if err := c.checkRequest(req); err != nil {
		return err
	}
	c.phase, c.call, c.server = phaseAsked, what, ""
	c.req = proto.CloneOf(req)
	c.filter = newFilter(req.GetFilter())
	return nil
}

func (c *Checker) checkRequest(req *kvcastv1.SubscribeRequest) error {
	if c.state == stateNone || wantMode(req) == kvcastv1.Accepted_MODE_SNAPSHOT {
		return nil
	}
	after := req.GetAfter()
	switch {
	case c.state == statePartial:
		return errors.New("an interrupted snapshot must be followed by another snapshot")
	case after == nil:
		return errors.New("a later stream of the same subscriber must resume or request a snapshot")
	case after.GetSeq() != c.head || (after.GetEpoch() != "" && after.GetEpoch() != c.epoch):
		return fmt.Errorf("resume at %s:%d, but the subscriber is at %s:%d",
			after.GetEpoch(), after.GetSeq(), c.epoch, c.head)
	case !proto.Equal(orEmpty(req.GetFilter()), orEmpty(c.stateFilter)):
		return errors.New("a position is good for the filter it was got with")
	}
	return nil
}

// Receive checks the next message of the stream. The error is a *Violation; after the first one,
// every call returns it.
func (c *Checker) Receive(msg *kvcastv1.SubscribeResponse) error {
	if c.err == nil {
		c.err = c.receive(msg)
	}
	return c.err
}

// Err returns the first violation, or nil.
func (c *Checker) Err() error { return c.err }

// Position returns the position to resume from. It is nil before the first stream has been
// accepted, and while a snapshot is in progress.
func (c *Checker) Position() *kvcastv1.Position {
	if c.state != stateComplete {
		return nil
	}
	return &kvcastv1.Position{Epoch: c.epoch, Seq: c.head}
}

// View returns the state after the received messages. The Checker owns the view, and Receive modifies it.
func (c *Checker) View() *View { return c.view }

func (c *Checker) receive(msg *kvcastv1.SubscribeResponse) error {
	if err := c.checkShape(msg); err != nil {
		return err
	}
	switch {
	case c.phase == phaseIdle:
		return broken(Protocol, "a message before any stream was started")
	case c.phase == phaseEnded:
		return broken(Protocol, "a message after the last one")
	case c.phase == phaseAsked && msg.GetAccepted() == nil:
		return broken(Protocol, "the first message is no Accepted")
	case c.phase == phaseAsked:
		return c.accept(msg)
	case msg.GetAccepted() != nil:
		return broken(Protocol, "a second Accepted")
	case msg.GetSnapshotBegin() != nil:
		return c.snapshotBegin(msg)
	case c.phase == phaseAnnounced && msg.GetProgress() != nil:
		return errors.Join(checkUnplaced(msg), checkAlive(msg))
	case c.phase == phaseAnnounced:
		return broken(Protocol, "no SnapshotBegin where one was expected")
	case c.phase == phaseSnapshot:
		return c.snapshotPart(msg)
	case partOfSnapshot(msg):
		return broken(Protocol, "part of a snapshot without SnapshotBegin")
	case len(msg.GetEntries()) > 0:
		return c.entries(msg)
	default:
		return c.progress(msg)
	}
}
