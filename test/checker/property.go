package checker

import "fmt"

// Property is a guarantee of the stream.
type Property string

// The guarantees.
const (
	// Ordered: the seqs of entries increase.
	Ordered Property = "Ordered"
	// Unique: over all resumed streams, no entry is delivered twice, or after a snapshot that
	// includes it.
	Unique Property = "Unique"
	// GapFree: nothing is missing. Each position chains to the previous one, a stream begins
	// exactly where it was requested, and neither the seqs nor the event_ids of a worker have holes
	// that a filter does not explain.
	GapFree Property = "GapFree"
	// Atomic: an entry is a whole engine batch.
	Atomic Property = "Atomic"
	// Filtered: nothing outside the filter is delivered.
	Filtered Property = "Filtered"
	// Progress: a position covers exactly what has been delivered.
	Progress Property = "Progress"
	// Snapshot: a snapshot and the entries after it result in the later state. A snapshot contains
	// each worker and each of its blocks once, in order, and nothing from after its position.
	Snapshot Property = "Snapshot"
	// Reported: every loss is reported.
	Reported Property = "Reported"
	// Convergent: the view equals the blocks of the engine.
	Convergent Property = "Convergent"
	// True: no answer of MatchPrefix that says EXACT is wrong, and none that says UPPER_BOUND is below the truth. Package truth
	// checks it.
	True Property = "True"
	// Protocol: messages have the form that the contract specifies.
	Protocol Property = "Protocol"
)

// Violation is a violated guarantee.
type Violation struct {
	Property Property
	// Detail describes the violation and where it occurred.
	Detail string
}

// Error returns the property and the detail.
func (v *Violation) Error() string {
	return fmt.Sprintf("check stream: %s: %s", v.Property, v.Detail)
}

func broken(p Property, format string, args ...any) error {
	return &Violation{Property: p, Detail: fmt.Sprintf(format, args...)}
}
