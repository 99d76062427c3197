package ingest

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

// worker passes the batches of its publishers to its lane.
type worker struct {
	shared *shared
	desc   feed.Worker
	// listener is the endpoint of the worker's listener in the configuration; empty if it has none.
	listener string
	log      *slog.Logger
	// snapshots has a slot for each snapshot of the worker that is received.
	snapshots *semaphore.Weighted

	// mu guards the fields below and the publishers. Calls of the lane hold it. It is locked after a
	// listener's mutex, and before the mutexes of sourceList and nameSet.
	mu sync.Mutex
	// lane is nil while the worker is not in the stream.
	lane feed.Lane
	// closed reports whether reading has ended, ending whether it is about to.
	closed, ending bool
	// hasConnected reports whether there was a connection since the worker is in the stream.
	hasConnected bool
	publishers   []*publisher
	// blockSize is shared by the rules of all sources.
	blockSize wire.BlockSize
	// storedBlockSize is the block size that the calls of the lane have stored, and changes the memory of feed.Progress.Learned.
	storedBlockSize wire.BlockSize
	changes         []byte
	// rules are the rules of each source. They number its events.
	rules  []*wire.Rules
	decode decodeSlot
	// ranks are the known dp ranks, at most feed.MaxRanks.
	ranks   map[uint32]struct{}
	budgets workerBudgets
	// bytes is the amount reserved of budgets.workers.
	bytes   int64
	metrics *workerMetrics
	// spawn runs a function in a goroutine, with a context that is done when reading ends.
	spawn func(run func(context.Context)) context.CancelFunc
	// graceTimer removes the worker after the grace time; nil while there is a connection.
	graceTimer *time.Timer
	// leaving is set between the end of the grace time and the ends of the last attempts to connect.
	leaving *leaving
	// onRemoved is called without mu after the grace time has removed the worker; nil if a connection adds it to the stream again.
	onRemoved func()
}

func newWorker(s *shared, w feed.Worker) *worker {
	n := &worker{
		shared:    s,
		desc:      w,
		snapshots: semaphore.NewWeighted(transport.MaxWorkerSnapshots),
		metrics:   s.metrics.workers.add(w.Name),
		log:       w.Logger(s.config.Logger),
		budgets:   s.budgets.parts.open(w.Peer),
	}
	n.reset()
	return n
}

// reset forgets the ranks and the block size that batches have shown.
func (w *worker) reset() {
	w.releaseRanks()
	w.ranks = make(map[uint32]struct{}, len(w.desc.Ranks))
	for _, r := range w.desc.Ranks {
		w.ranks[r] = struct{}{}
	}
	w.blockSize = wire.BlockSize{Tokens: w.desc.BlockSize, Configured: w.desc.BlockSize != 0}
	w.storedBlockSize = w.blockSize
}

// spawnIn makes spawn use goroutines of a group until ctx is done. The group must not be waited for while a goroutine may still call spawn.
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

// inStream reports whether the worker is in the stream and still read.
func (w *worker) inStream() bool { return w.lane != nil && !w.closed }

// enter adds the worker to the stream unless it is there.
func (w *worker) enter() {
	if w.lane != nil {
		return
	}
	resumed := w.shared.recovered.claim(w)
	w.lane = w.shared.sink.AddWorker(w.desc)
	w.shared.entered.Store(w.desc.Name, w)
	if resumed {
		now := time.Now()
		for _, p := range w.publishers {
			p.apply(now, nil) // starts the grace time of the publisher
		}
		w.hasConnected = true
		w.updateConnections()
	}
}

// updateConnections starts the grace time if the worker has no connection, and stops it otherwise. It
// is called when a connection was opened or closed.
func (w *worker) updateConnections() {
	if w.connected() {
		w.hasConnected = true
		w.stopGraceTimer()
		return
	}
	if w.graceTimer != nil || w.leaving != nil || !w.inStream() || !w.hasConnected {
		return
	}
	made := make(chan *time.Timer, 1)
	w.graceTimer = time.AfterFunc(w.shared.config.Grace, func() { w.leave(<-made) })
	made <- w.graceTimer
}

func (w *worker) stopGraceTimer() {
	w.leaving = nil
	if w.graceTimer != nil {
		w.graceTimer.Stop()
		w.graceTimer = nil
	}
}

// connected reports whether any publisher has a connection.
func (w *worker) connected() bool {
	return slices.ContainsFunc(w.publishers, func(p *publisher) bool { return p.machine.Connected() })
}

// leaving is a worker whose grace time has ended. Its engines may have been back since the last attempts to connect, so that each
// must have failed once more.
type leaving struct {
	attempts int // in progress
}

// leave removes the worker after the grace time. timer is the timer that calls it; it may have been stopped too late.
func (w *worker) leave(timer *time.Timer) {
	w.mu.Lock()
	if w.graceTimer != timer || w.closed {
		w.mu.Unlock()
		return
	}
	w.graceTimer = nil
	if w.shared.config.Grace > 0 && w.attemptLast() {
		w.mu.Unlock()
		return
	}
	w.leaveNow()
	onRemoved := w.onRemoved
	w.mu.Unlock()
	if onRemoved != nil {
		onRemoved()
	}
}

// attemptLast makes an attempt to connect to each engine, and removes the worker when all have failed. It returns false if the engines
// open the connections.
func (w *worker) attemptLast() bool {
	l := new(leaving)
	w.leaving = l
	for _, p := range w.publishers {
		if p.attempt == nil {
			continue
		}
		l.attempts++
		p.attempt(func() {
			if l.attempts--; l.attempts == 0 && w.leaving == l {
				w.leaveNow()
			}
		})
	}
	if l.attempts == 0 {
		w.leaving = nil
		return false
	}
	return true
}

// leaveNow removes the worker, which has no connection.
func (w *worker) leaveNow() {
	w.leaving = nil
	w.log.Info("worker removed: it has had no connection for the grace time", "grace", w.shared.config.Grace)
	w.remove(feed.RemovedDisconnected)
}

// remove removes the worker from the stream if it is there.
func (w *worker) remove(why feed.RemoveReason) {
	if w.detach() {
		w.shared.sink.RemoveWorker(w.desc.Name, why)
	}
}

// detach ends the calls of the lane. The worker stays in the stream. It reports whether there was a lane.
func (w *worker) detach() bool {
	if w.lane == nil {
		return false
	}
	for _, p := range w.publishers {
		p.reset()
	}
	w.lane, w.hasConnected = nil, false
	w.shared.entered.Delete(w.desc.Name)
	w.reset()
	return true
}

// hasEntered reports whether the worker is in the stream.
func (w *worker) hasEntered() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lane != nil
}

// close stops the reading of the worker. Its blocks stay in the stream.
func (w *worker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.stopGraceTimer()
	for _, p := range w.publishers {
		p.stop()
	}
}

// release releases the name, the budgets and the metrics of a closed worker.
func (w *worker) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.publishers {
		p.release()
	}
	for _, r := range w.rules {
		r.Close()
	}
	w.releaseRanks()
	w.ranks = nil
	w.shared.budgets.parts.close(w.desc.Peer)
	w.shared.budgets.workers.Release(w.bytes)
	w.bytes = 0
	w.shared.metrics.workers.remove(w.desc.Name)
	w.shared.sockets.release(w.desc.Name)
	w.shared.names.release(w.desc.Name)
}

// rulesOf returns the rules of a source.
func (w *worker) rulesOf(source int) *wire.Rules {
	for len(w.rules) <= source {
		rules := wire.NewRules(&w.blockSize)
		rules.SetBudget(w.budgets.rules)
		if w.shared.config.Durable {
			rules.TrackChanges()
		}
		for _, peer := range w.rules {
			peer.AddPeer(rules)
			rules.AddPeer(peer)
		}
		w.rules = append(w.rules, rules)
	}
	return w.rules[source]
}

// releaseRanks releases the budget that admitRank has reserved.
func (w *worker) releaseRanks() {
	if named := len(w.ranks) - len(w.desc.Ranks); named > 0 {
		w.budgets.ranks.Release(int64(named))
	}
}

// admitRank adds a dp rank. It returns false if the worker may not have more ranks.
func (w *worker) admitRank(rank uint32) bool {
	if _, ok := w.ranks[rank]; ok {
		return true
	}
	if len(w.ranks) >= feed.MaxRanks || !w.budgets.ranks.Reserve(1) {
		return false
	}
	w.ranks[rank] = struct{}{}
	return true
}

// restoreRank adds a dp rank that was admitted before.
func (w *worker) restoreRank(rank uint32) {
	if _, ok := w.ranks[rank]; !ok {
		w.budgets.ranks.Adjust(1)
		w.ranks[rank] = struct{}{}
	}
}

// refuse counts and logs a message that is refused.
func (w *worker) refuse(why refusal, args ...any) {
	w.metrics.incLabeled(refusedTotal, why.String())
	w.log.Warn("message refused", append([]any{"reason", why.String(), "want", why.wanted()}, args...)...)
}

// reject counts and logs the malformed batch that the intake has decoded.
func (w *worker) reject(in *intake, args ...any) {
	w.metrics.incLabeled(rejectedTotal, errorName(in.err))
	w.log.Warn("batch rejected", append(args, "error", in.err)...)
}
