package feed

import "time"

// Observer is notified of what happens to sources. Its methods are called while the worker is locked: they must not block.
type Observer interface {
	// RepairEnded is called when a repair ends that has brought batches, or that was abandoned.
	RepairEnded(RepairEnd)
	// ConnectionChanged is called when a source of a worker has a connection after some time without one, and when it has
	// lost it.
	ConnectionChanged(worker string, rank uint32, up bool, after time.Duration)
}

// RepairEnd is the end of a repair: of a replay of batches that were or might have been missing.
type RepairEnd struct {
	Worker string
	Rank   uint32
	// Cause is why it began: start, gap, reconnect or silence.
	Cause string
	// Batches is the number of batches that the replay has brought.
	Batches uint64
	Took    time.Duration
	// Complete reports whether nothing is missing. Otherwise a gap follows.
	Complete bool
}
