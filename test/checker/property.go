package checker

import "fmt"

// Property is a guarantee of the stream.
type Property string

// The guarantees.
const (
	// Ordered: the seqs of entries grow.
	Ordered Property = "Ordered"
	// Unique: no entry comes twice, over all resumed streams, and none that a
	// snapshot before it holds.
	Unique Property = "Unique"
	// GapFree: nothing is missing. Each position is chained to the one before,
	// a stream begins exactly where it was asked to, seqs have no holes that a
	// filter does not explain, and neither have the event_ids of a worker.
	GapFree Property = "GapFree"
	// Atomic: an entry is a whole engine batch.
	Atomic Property = "Atomic"
	// Filtered: nothing comes that was not asked for.
	Filtered Property = "Filtered"
	// Progress: a position says what has been delivered, neither more nor less.
	Progress Property = "Progress"
	// Snapshot: a snapshot and the entries after it equal the state later. It
	// contains each worker and each of its blocks once, in order, and nothing that
	// its position does not cover.
	Snapshot Property = "Snapshot"
	// Reported: what cannot be known is reported.
	Reported Property = "Reported"
	// Convergent: the view equals what the engine holds.
	Convergent Property = "Convergent"
	// Protocol: messages have the form that the contract gives them.
	Protocol Property = "Protocol"
)

// Violation is a broken guarantee.
type Violation struct {
	Property Property
	// Detail says where and how.
	Detail string
}

// Error returns the property and the detail.
func (v *Violation) Error() string {
	return fmt.Sprintf("check stream: %s: %s", v.Property, v.Detail)
}

func broken(p Property, format string, args ...any) error {
	return &Violation{Property: p, Detail: fmt.Sprintf(format, args...)}
}
