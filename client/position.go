package client

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Position is a point in the stream: all entries up to and including Seq are applied. It is only valid for a
// subscription with the same filter. The zero Position means that there is no position.
type Position struct {
	// Epoch is the random name of the journal's history. Empty means the server's current epoch; a subscription
	// then cannot detect that the server has lost its journal.
	Epoch string
	// Seq is the number of the last entry applied; 0 is before the first entry.
	Seq uint64
}

// IsZero reports whether the position is the zero Position.
func (p Position) IsZero() bool { return p == Position{} }

// String returns EPOCH:SEQ, the form that ParsePosition and kvcast subscribe --after accept.
func (p Position) String() string { return p.Epoch + ":" + strconv.FormatUint(p.Seq, 10) }

// ParsePosition parses EPOCH:SEQ, or :SEQ for an empty epoch.
func ParsePosition(text string) (Position, error) {
	i := strings.LastIndexByte(text, ':') // an epoch may contain colons
	seq, err := strconv.ParseUint(text[i+1:], 10, 64)
	if i < 0 || err != nil {
		return Position{}, fmt.Errorf("parse position: %q is not allowed: want EPOCH:SEQ, or :SEQ", text)
	}
	return Position{Epoch: text[:i], Seq: seq}, nil
}

// MarshalText implements encoding.TextMarshaler. The zero Position is empty text.
func (p Position) MarshalText() ([]byte, error) {
	if p.IsZero() {
		return nil, nil
	}
	return []byte(p.String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler. Empty text is the zero Position.
func (p *Position) UnmarshalText(text []byte) (err error) {
	var parsed Position
	if len(text) > 0 {
		if parsed, err = ParsePosition(string(text)); err != nil {
			return err
		}
	}
	*p = parsed
	return nil
}

// Proto returns the position as a message of the contract.
func (p Position) Proto() *kvcastv1.Position {
	return &kvcastv1.Position{Epoch: p.Epoch, Seq: p.Seq}
}

// Start is where a subscription starts. The zero Start is FromSnapshot.
type Start struct {
	mode  kvcastv1.Accepted_Mode // 0: MODE_SNAPSHOT
	after Position
}

// FromSnapshot starts with a snapshot of all workers.
func FromSnapshot() Start { return Start{} }

// FromLatest starts with the next entry. The existing state is not sent.
func FromLatest() Start { return Start{mode: kvcastv1.Accepted_MODE_LATEST} }

// FromEarliest starts with the oldest retained entry.
func FromEarliest() Start { return Start{mode: kvcastv1.Accepted_MODE_EARLIEST} }

// After resumes after a position. After(Position{}) is FromSnapshot, for callers that have not stored a position.
func After(p Position) Start {
	if p.IsZero() {
		return FromSnapshot()
	}
	return Start{mode: kvcastv1.Accepted_MODE_RESUME, after: p}
}

// AfterSeq resumes after a seq of the server's current epoch; 0 is before the first entry. Programs should use
// After, which detects another epoch.
func AfterSeq(seq uint64) Start {
	return Start{mode: kvcastv1.Accepted_MODE_RESUME, after: Position{Seq: seq}}
}

// acceptedMode returns the mode in which the server accepts the start.
func (s Start) acceptedMode() kvcastv1.Accepted_Mode {
	return cmp.Or(s.mode, kvcastv1.Accepted_MODE_SNAPSHOT)
}

func (s Start) setOn(req *kvcastv1.SubscribeRequest) {
	switch s.mode {
	case kvcastv1.Accepted_MODE_RESUME:
		req.Start = &kvcastv1.SubscribeRequest_After{After: s.after.Proto()}
	case kvcastv1.Accepted_MODE_LATEST:
		req.Start = &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}
	case kvcastv1.Accepted_MODE_EARLIEST:
		req.Start = &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}
	default:
		req.Start = &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}
	}
}
