package client

import kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"

// Start is where a subscription begins. The zero Start is FromSnapshot.
type Start struct {
	kind  startKind
	after Position
}

type startKind uint8

const (
	startSnapshot startKind = iota
	startAfter
	startLatest
	startEarliest
)

// FromSnapshot begins with what all workers hold.
func FromSnapshot() Start { return Start{} }

// FromLatest begins with the next entry; what the workers hold already is not told.
func FromLatest() Start { return Start{kind: startLatest} }

// FromEarliest begins with the oldest entry that the server retains.
func FromEarliest() Start { return Start{kind: startEarliest} }

// After resumes after a position. After the zero Position, which is what a caller
// has stored that never ran, it is FromSnapshot.
func After(p Position) Start {
	if p.IsZero() {
		return FromSnapshot()
	}
	return Start{kind: startAfter, after: p}
}

// AfterSeq resumes after a seq of whichever epoch the server has, for a person who
// knows just the number: 0 is before the first entry.
func AfterSeq(seq uint64) Start { return Start{kind: startAfter, after: Position{Seq: seq}} }

// put writes the start into a request.
func (s Start) put(req *kvcastv1.SubscribeRequest) {
	switch s.kind {
	case startAfter:
		req.Start = &kvcastv1.SubscribeRequest_After{After: s.after.Proto()}
	case startLatest:
		req.Start = &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}
	case startEarliest:
		req.Start = &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}
	case startSnapshot:
		req.Start = &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}
	}
}

// mode is how the server accepts the start.
func (s Start) mode() kvcastv1.Accepted_Mode {
	switch s.kind {
	case startAfter:
		return kvcastv1.Accepted_MODE_RESUME
	case startLatest:
		return kvcastv1.Accepted_MODE_LATEST
	case startEarliest:
		return kvcastv1.Accepted_MODE_EARLIEST
	case startSnapshot:
	}
	return kvcastv1.Accepted_MODE_SNAPSHOT
}
