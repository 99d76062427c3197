package client

import (
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Update is a step of a subscription: a message of the server, or an Interruption.
type Update struct {
	// Message is what came, as the contract describes it; nil with an Interruption.
	// It is the caller's to keep, and to read only, since a View may hold parts of it.
	//
	// The first of each stream has an Accepted. From SnapshotBegin, at which all
	// that is held is to be discarded, to SnapshotEnd it is a part of a snapshot.
	Message *kvcastv1.SubscribeResponse
	// Position is where to resume once this, and all before it, has been applied. It
	// is the zero Position while what has been delivered is not whole: before a
	// first position is known, from SnapshotBegin to SnapshotEnd, and with an
	// Interruption after which a snapshot comes, which may be because it is not true.
	Position Position
	// Interruption tells that a stream has ended, and that another will be asked
	// for. Nothing has to be done about it.
	Interruption *Interruption

	subscription *subscription
}

// Interruption is the time between two streams.
type Interruption struct {
	// Err is why the stream ended, or could not begin: an *Error, a *ViolationError,
	// ErrIdle, ErrEnded, or what Resnapshot was called with.
	Err error
	// Snapshot tells that the next stream begins with a snapshot, as what was
	// delivered can not be gone on from.
	Snapshot bool
	// Wait is how long until the next stream is asked for.
	Wait time.Duration
	// Failures is how many streams in a row came to nothing, this one included.
	Failures int
}

// Resnapshot has the subscription begin anew with a snapshot, as a caller may want
// who finds that what was told is not true. It is to be called before the caller asks
// for the next update, which is the Interruption that tells of it; with GapFail the
// cause ends the subscription instead.
func (u Update) Resnapshot(cause error) {
	if u.subscription != nil {
		u.subscription.refused = cause
	}
}
