package client

import (
	"fmt"
	"strconv"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Position is a point in the stream: everything up to and with the entry Seq has
// been applied. The zero Position is none.
//
// A position is good for the filter that it was got with.
type Position struct {
	// Epoch is the random name of the journal's life; empty means whichever the
	// server has, which does not notice that the journal was lost.
	Epoch string
	// Seq is the number of the last entry applied; 0 is before the first.
	Seq uint64
}

// IsZero tells that the position is none.
func (p Position) IsZero() bool { return p == Position{} }

// String writes the position as ParsePosition reads it, and as kvcast's --after
// takes it: EPOCH:SEQ.
func (p Position) String() string { return p.Epoch + ":" + strconv.FormatUint(p.Seq, 10) }

// ParsePosition reads what String wrote: EPOCH:SEQ, or :SEQ for an empty epoch.
func ParsePosition(text string) (Position, error) {
	// An epoch may hold colons, a seq can not.
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return Position{}, fmt.Errorf("parse position: %q is not allowed: want EPOCH:SEQ, or :SEQ", text)
	}
	seq, err := strconv.ParseUint(text[i+1:], 10, 64)
	if err != nil {
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

// UnmarshalText implements encoding.TextUnmarshaler. Empty text is the zero
// Position.
func (p *Position) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*p = Position{}
		return nil
	}
	parsed, err := ParsePosition(string(text))
	if err != nil {
		return err
	}
	*p = parsed
	return nil
}

// Proto returns the position as the contract has it.
func (p Position) Proto() *kvcastv1.Position {
	return &kvcastv1.Position{Epoch: p.Epoch, Seq: p.Seq}
}
