package ingest

import (
	"log/slog"
	"slices"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// worker is where the batches of one worker's publishers go. The goroutine that
// reads it is the only one to touch it, and to call its lane.
type worker struct {
	name string
	lane Lane
	// blockSize is that of the worker's stores, 0 until the first has told it. The
	// rules of all its sources share it.
	blockSize uint32
	// rules are those of its sources, which number their events.
	rules []*wire.Rules
	// learned tells that blockSize came from a store.
	learned bool
	// ranks are the dp ranks that have been heard of, MaxRanks at most.
	ranks   map[uint32]struct{}
	metrics *workerMetrics
	notices notices
	log     *slog.Logger
}

func newWorker(w Worker, m *metrics, log *slog.Logger) *worker {
	ranks := make(map[uint32]struct{}, len(w.Ranks))
	for _, r := range w.Ranks {
		ranks[r] = struct{}{}
	}
	return &worker{
		name:      w.Name,
		blockSize: w.BlockSize,
		learned:   w.BlockSize == 0,
		ranks:     ranks,
		metrics:   m.of(w.Name),
		log:       log.With("worker", w.Name),
	}
}

// rulesOf returns the rules of a source.
func (w *worker) rulesOf(source int) *wire.Rules {
	for len(w.rules) <= source {
		w.rules = append(w.rules, wire.NewRules(&w.blockSize))
	}
	return w.rules[source]
}

// admitRank tells whether the worker has, or may have, this dp rank.
func (w *worker) admitRank(rank uint32) bool {
	if _, ok := w.ranks[rank]; ok {
		return true
	}
	if len(w.ranks) >= MaxRanks {
		return false
	}
	w.ranks[rank] = struct{}{}
	return true
}

// forgetBlockSize forgets what a store told: an engine that began anew may have
// been configured anew.
func (w *worker) forgetBlockSize() {
	if w.learned {
		w.blockSize = 0
	}
}

// warn logs a line unless one of its kind was logged just before, and tells
// whether it did.
func (w *worker) warn(kind notice, now time.Time, msg string, args ...any) bool {
	held, ok := w.notices.due(kind, now)
	if ok {
		w.log.Warn(msg, append(slices.Clip(args), "held_back", held)...)
	}
	return ok
}

// refuse counts a message that is not taken.
func (w *worker) refuse(why refusal, now time.Time) {
	w.metrics.refuse(why)
	w.warn(noticeOf(why), now, "message refused", "reason", why.String(), "want", why.wanted())
}
