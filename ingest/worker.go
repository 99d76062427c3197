package ingest

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
)

// worker passes the batches of its publishers to its lane.
type worker struct {
	shared *shared
	desc   feed.Worker
	log    *slog.Logger

	// mu guards all below, and the publishers, which call the lane with it. The locks of
	// sourceList and nameSet come after it, a listener's lock before it.
	mu sync.Mutex
	// lane is nil while the worker is not in the stream.
	lane feed.Lane
	// closed reports whether reading has ended, and reached whether there was a connection
	// since the worker is in the stream.
	closed     bool
	reached    bool
	publishers []*publisher
	// blockSize is shared by the rules of all sources.
	blockSize wire.BlockSize
	// rules are those of the sources. They number the events.
	rules []*wire.Rules
	// ranks are the known dp ranks, feed.MaxRanks at most.
	ranks map[uint32]struct{}
	// bytes is what the worker has reserved of the budget of workers' strings.
	bytes      int64
	metrics    *workerMetrics
	logLimiter logLimiter
	// spawn runs a function in a goroutine of its own, with a context that is done when the
	// reading ends.
	spawn func(run func(context.Context)) context.CancelFunc
	// leaving is the timer of the grace time, which removes the worker; nil while there is a
	// connection.
	leaving *time.Timer
	// left is called without mu when the grace time has removed the worker; nil where it can
	// be added again.
	left func()
}

func newWorker(s *shared, w feed.Worker) *worker {
	n := &worker{
		shared:  s,
		desc:    w,
		metrics: s.metrics.of(w.Name),
		log:     s.log.With("worker", w.Name),
	}
	n.reset()
	return n
}

// reset forgets what was learned from batches.
func (w *worker) reset() {
	w.releaseRanks()
	w.ranks = make(map[uint32]struct{}, len(w.desc.Ranks))
	for _, r := range w.desc.Ranks {
		w.ranks[r] = struct{}{}
	}
	w.blockSize = wire.BlockSize{Tokens: w.desc.BlockSize, Configured: w.desc.BlockSize != 0}
}

// spawnIn has spawn use goroutines of a group until ctx is done. The group must not be
// waited for before all that may spawn are done.
func (w *worker) spawnIn(ctx context.Context, group *sync.WaitGroup) {
	w.spawn = func(run func(context.Context)) context.CancelFunc {
		ctx, cancel := context.WithCancel(ctx)
		group.Go(func() {
			defer cancel()
			run(ctx)
		})
		return cancel
	}
}

// enter adds the worker to the stream unless it is there.
func (w *worker) enter() {
	if w.lane == nil {
		w.lane = w.shared.sink.AddWorker(w.desc)
	}
}

// updateConnections removes the worker after the grace time if it has no connection. It is
// called when one was opened or closed.
func (w *worker) updateConnections() {
	if w.connected() {
		w.reached = true
		if w.leaving != nil {
			w.leaving.Stop()
			w.leaving = nil
		}
		return
	}
	if w.leaving != nil || w.closed || w.lane == nil || !w.reached {
		return
	}
	made := make(chan *time.Timer, 1)
	w.leaving = time.AfterFunc(w.shared.grace, func() { w.leave(<-made) })
	made <- w.leaving
}

// connected reports whether any publisher has a connection.
func (w *worker) connected() bool {
	return slices.ContainsFunc(w.publishers, func(p *publisher) bool { return p.machine.Connected() })
}

// leave removes the worker after the grace time.
func (w *worker) leave(timer *time.Timer) {
	w.mu.Lock()
	if w.leaving != timer || w.closed {
		w.mu.Unlock()
		return
	}
	w.leaving = nil
	w.log.Info("worker removed: all its connections have been closed for the grace time", "grace", w.shared.grace)
	w.remove(feed.RemovedDisconnected)
	left := w.left
	w.mu.Unlock()
	if left != nil {
		left()
	}
}

// remove removes the worker from the stream if it is there.
func (w *worker) remove(why feed.RemoveReason) {
	if w.lane == nil {
		return
	}
	for _, p := range w.publishers {
		p.reset()
	}
	w.lane, w.reached = nil, false
	w.reset()
	w.shared.sink.RemoveWorker(w.desc.Name, why)
}

// close ends the reading of the worker. Its blocks stay in the stream.
func (w *worker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.leaving != nil {
		w.leaving.Stop()
		w.leaving = nil
	}
	for _, p := range w.publishers {
		p.stop()
	}
}

// forget releases what a closed worker has reserved, with its name and metrics.
func (w *worker) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.publishers {
		p.forget()
	}
	for _, r := range w.rules {
		r.Close()
	}
	w.releaseRanks()
	w.ranks = nil
	w.shared.budgets.workers.Release(w.bytes)
	w.bytes = 0
	w.shared.metrics.forget(w.desc.Name)
	w.shared.names.release(w.desc.Name)
}

// rulesOf returns the rules of a source.
func (w *worker) rulesOf(source int) *wire.Rules {
	for len(w.rules) <= source {
		rules := wire.NewRules(&w.blockSize)
		rules.SetBudget(w.shared.budgets.rules)
		w.rules = append(w.rules, rules)
	}
	return w.rules[source]
}

// releaseRanks releases the budget that admitRank has reserved.
func (w *worker) releaseRanks() {
	if named := len(w.ranks) - len(w.desc.Ranks); named > 0 {
		w.shared.budgets.ranks.Release(int64(named))
	}
}

// admitRank adds a dp rank. It reports false where there may be no further one.
func (w *worker) admitRank(rank uint32) bool {
	if _, ok := w.ranks[rank]; ok {
		return true
	}
	if len(w.ranks) >= feed.MaxRanks || !w.shared.budgets.ranks.Take(1) {
		return false
	}
	w.ranks[rank] = struct{}{}
	return true
}

// warn logs a line unless one of its kind was logged less than logInterval ago, and reports
// whether it did.
func (w *worker) warn(kind logKind, now time.Time, msg string, args ...any) bool {
	return w.notice(slog.LevelWarn, kind, now, msg, args...)
}

// inform is warn at the level of information.
func (w *worker) inform(kind logKind, now time.Time, msg string, args ...any) {
	w.notice(slog.LevelInfo, kind, now, msg, args...)
}

func (w *worker) notice(level slog.Level, kind logKind, now time.Time, msg string, args ...any) bool {
	suppressed, ok := w.logLimiter.allow(kind, now)
	if ok {
		w.log.Log(context.Background(), level, msg, append(slices.Clip(args), "suppressed", suppressed)...)
	}
	return ok
}

// refuse counts and logs a message that is refused.
func (w *worker) refuse(why refusal, now time.Time) {
	w.metrics.refuse(why)
	w.warn(logKindOf(why), now, "message refused", "reason", why.String(), "want", why.wanted())
}
