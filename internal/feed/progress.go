package feed

import (
	"maps"
	"slices"
)

// Progress is the part of ingest's state that a Batch, Gap or Restart has changed. With a durable journal, the pipeline
// stores it beside the worker's next entry, and returns it in Recovered when kvcast starts again. The pipeline does not
// interpret it. Its memory is only valid until the call of the Lane returns. It is zero if the journal is not durable.
type Progress struct {
	// Publisher is the publisher that the call is for.
	Publisher Publisher
	// Cursor is the state of the publisher after the call. It replaces the publisher's earlier cursors. Of several
	// calls that belong together, only the last has a new cursor. Before the first cursor it is empty.
	Cursor []byte
	// Learned is what the call adds to the state of all publishers of the worker; empty for most calls. It adds to
	// what earlier calls have added.
	Learned []byte
}

// Publisher identifies a publisher of a worker.
type Publisher struct {
	// Source is the index of the source in Worker.Sources.
	Source int
	// Rank is the dp rank that the publisher is configured for. Its batches may name another.
	Rank uint32
}

// Recovered is a worker that was in the stream when kvcast ended.
type Recovered struct {
	// Worker is the worker as it was added.
	Worker Worker
	// Checkpoint is ingest's state of the worker at its last checkpoint; nil if there was none.
	Checkpoint []byte
	// Cursors are the cursors of publishers that changed after the checkpoint, and Learned all Progress.Learned since
	// then, in order.
	Cursors map[Publisher][]byte
	Learned [][]byte
}

// Continues reports whether a worker can continue with the state of another: whether routers would see no difference, and
// their sources are the same.
func (w *Worker) Continues(o *Worker) bool {
	return w.Name == o.Name && w.Model == o.Model && w.BlockSize == o.BlockSize && w.Endpoint == o.Endpoint &&
		maps.Equal(w.Labels, o.Labels) && w.Pool == o.Pool && slices.Equal(w.Pools, o.Pools) && slices.Equal(w.Ranks, o.Ranks) &&
		slices.Equal(w.Sources, o.Sources) && w.Consolidate == o.Consolidate
}
