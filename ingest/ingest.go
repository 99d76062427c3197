// Package ingest reads engines' KV-cache events from ZeroMQ, and from engines that stream them by gRPC.
//
// Inputs are the endpoints of engines, to connect to or to bind, which may be added at any time. Outputs are calls of each worker's
// feed.Lane: each decoded batch once, in the engine's order. Lost batches are requested from the engine's replay socket. Batches that it no
// longer has, and batches that were published before the first connection, are reported as a feed.Gap, and a restart of an engine as a
// feed.Restart. A worker is removed when it has had no connection for the grace time, and a last attempt to connect has failed; silence
// alone never removes a worker.
//
// Package sequence decides about order and repair, package transport has the sockets, and this package supervises both. One goroutine for
// each transport.Receiver processes its messages and calls the lanes. While a lane blocks, a bounded number of messages waits in the
// Receiver. Then the native transport stops reading, so that TCP stops the engine. With libzmq, messages that do not fit are dropped, and
// requested again when the lane returns.
//
// If Config.Durable is set, each call of a lane carries the state after it, and a later Ingest continues there: as after
// a loss of all connections, it requests the batches after the last stored call from the engines' replay sockets.
//
// The number of sources, ranks and workers, and the size of buffers, are bounded over the whole process;
// see config.Config. A message or worker that would exceed a bound is refused.
//
// Programs that read the events of one engine use package engineclient.
//
// It has more than 15 files: sources, listeners and their workers are locked and closed together. What decides without these locks is in
// internal/sequence.
package ingest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/configured"
)

// ErrStarted is returned by Run after an earlier Run or Close.
var ErrStarted = errors.New("ingest was started or closed before")

// Ingest reads the engines of a Config into a Sink.
type Ingest struct {
	shared    *shared
	workers   []*connectedWorker // configured
	listeners []*listener
	used      atomic.Bool // reports whether Run or Close was called
	// registerer has the metrics registered until the Ingest ends; nil if they are not registered.
	registerer prometheus.Registerer

	// changes add and remove workers. Run executes them.
	changes chan func(context.Context, *running)
	ended   chan struct{} // closed when Run executes no more changes
}

// running is the state of Run.
type running struct {
	group   sync.WaitGroup
	workers map[string]*connectedWorker
}

// connectedWorker is a worker whose engines are connected to.
type connectedWorker struct {
	*worker
	links []*link
	stop  context.CancelFunc
	done  chan struct{} // closed when reading has ended
}

// New validates the config and binds the listeners. Messages are read by Run. The caller must call Run or Close.
func New(c config.Config, sink feed.Sink) (*Ingest, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("check config: %w", err)
	}
	c = c.WithDefaults()
	c.Silence, c.Grace, c.ReplayPatience = max(c.Silence, 0), max(c.Grace, 0), max(c.ReplayPatience, 0)
	in := &Ingest{
		shared: &shared{
			config:    c,
			sink:      sink,
			names:     &nameSet{max: c.MaxWorkers, names: make(map[string]bool)},
			budgets:   newBudgets(c),
			addresses: budget.NewShares(nil, int64(c.MaxSourcesPerAddress)),
		},
		changes: make(chan func(context.Context, *running)),
		ended:   make(chan struct{}),
	}
	in.shared.recovered.load(in.shared)
	in.shared.config.Recovered = nil // it may be large
	in.shared.metrics = newMetrics(&in.shared.sources)
	in.shared.metrics.registry.MustRegister(in.shared.budgets.all())
	var err error
	if in.shared.transports, err = configured.Open(c, in.shared.budgets.received, in.shared.delay.Recent, in.shared.reject); err != nil {
		return nil, err
	}
	in.shared.replays = transport.NewRequests(in.shared.transports.Connecting, c.ReplayTimeout, in.shared.metrics.listeners.onDrop, in.shared.metrics.replaysInProgress)
	in.shared.replays.Frames, in.shared.replays.Peers = in.shared.transports.Snapshots, in.shared.transports.Replaying
	in.shared.replays.Delay = in.shared.delay.Recent
	if err := in.open(); err != nil {
		return nil, errors.Join(err, in.closeListeners(), in.release())
	}
	return in, nil
}

// open binds the listeners and reserves the names of the workers.
func (in *Ingest) open() error {
	c := in.shared.config
	if c.Metrics != nil {
		if err := c.Metrics.Register(in.shared.metrics.registry); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
		in.registerer = c.Metrics
	}
	for _, w := range c.Workers {
		if err := in.shared.sockets.claim(w); err != nil { // of workers whose engines should have been asked
			return fmt.Errorf("check config: %w", err)
		}
		in.shared.names.reserve(w.Name)
		in.shared.budgets.sources.Reserve(int64(w.Publishers())) // Validate has counted them
		in.workers = append(in.workers, in.worker(w))
	}
	for _, lc := range c.Listeners {
		if lc.Worker != "" {
			in.shared.names.reserve(lc.Worker)
		}
		l, err := newListener(in.shared, lc)
		if err != nil {
			return fmt.Errorf("open listener: %w", err)
		}
		in.listeners = append(in.listeners, l)
		c.Logger.Info("listening", "endpoint", l.address)
	}
	return nil
}

// Endpoints returns the addresses of the listeners, in the order of the Config, with the ports that the system chose.
func (in *Ingest) Endpoints() (all []string) {
	for _, l := range in.listeners {
		all = append(all, l.address)
	}
	return all
}

// SuspendListeners closes the connections of engines that have connected to listeners, and each new one, until ResumeListeners is
// called, so that the engines connect to another process. They count as disconnected; what the lanes are doing goes on.
func (in *Ingest) SuspendListeners() {
	in.shared.metrics.suspended.Set(1)
	for _, l := range in.listeners {
		l.receiver.Suspend()
	}
}

// ResumeListeners ends what SuspendListeners has begun, except for listeners of which it returns an error: ZeroMQ could not open a
// socket. It may be called again then.
func (in *Ingest) ResumeListeners() error {
	var errs []error
	for _, l := range in.listeners {
		if err := l.receiver.Resume(); err != nil {
			errs = append(errs, fmt.Errorf("resume listener: %w", err))
		}
	}
	if len(errs) == 0 {
		in.shared.metrics.suspended.Set(0)
	}
	return errors.Join(errs...)
}

// Run reads until ctx is done, and returns nil when everything is closed: no call of the Sink or a Lane is in progress or follows. It waits
// for a call that blocks. It returns an error if ZeroMQ fails, and ErrStarted after an earlier Run or Close.
func (in *Ingest) Run(ctx context.Context) error {
	if !in.used.CompareAndSwap(false, true) {
		return ErrStarted
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	r := &running{workers: make(map[string]*connectedWorker)}
	r.group.Go(func() { in.shared.delay.Run(ctx) })
	for _, w := range in.workers {
		r.start(ctx, w)
	}
	failed := make(chan error, len(in.listeners))
	for _, l := range in.listeners {
		l.start(ctx)
	}
	in.shared.recovered.abandonListeners()
	for _, l := range in.listeners {
		r.group.Go(func() {
			if err := l.run(ctx); err != nil {
				failed <- err
			}
		})
	}
	var errs []error
	for ctx.Err() == nil {
		select {
		case change := <-in.changes:
			change(ctx, r)
		case err := <-failed:
			errs = append(errs, err)
			stop()
		case <-ctx.Done():
		}
	}
	close(in.ended)
	r.group.Wait()
	close(failed)
	for err := range failed {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, in.release())...)
}

// start starts the goroutines of a worker.
func (r *running) start(ctx context.Context, w *connectedWorker) {
	ctx, stop := context.WithCancel(ctx)
	w.stop, w.done = stop, make(chan struct{})
	r.workers[w.desc.Name] = w
	var group sync.WaitGroup
	w.spawnIn(ctx, &group)
	w.mu.Lock()
	w.enter()
	w.mu.Unlock()
	for _, l := range w.links {
		group.Go(func() { l.run(ctx) })
	}
	r.group.Go(func() {
		defer close(w.done)
		<-ctx.Done()
		w.mu.Lock()
		w.ending = true // the publishers' timers start no goroutine while the group is waited for
		w.mu.Unlock()
		group.Wait()
		w.close()
		stop()
	})
}

// worker returns a worker with the links to its engines.
func (in *Ingest) worker(c config.Worker) *connectedWorker {
	desc := feed.Worker{
		Name: c.Name, Model: c.Model, BlockSize: c.BlockSize, Endpoint: c.Endpoint, Labels: c.Labels, Ranks: ranksOf(c),
		Pool: c.Pool, Pools: c.Pools,
	}
	if len(c.Sources) > 1 {
		desc.Consolidate = c.Consolidate
		for _, s := range c.Sources {
			desc.Sources = append(desc.Sources, s.Engine)
		}
	}
	w := &connectedWorker{worker: newWorker(in.shared, desc)}
	for i, src := range c.Sources {
		ranks := ranksOfSource(src)
		for _, e := range src.Endpoints() {
			status := SourceStatus{Engine: src.Engine, Endpoint: e.Connect, Replay: e.Replay, Snapshot: e.Snapshot, Rank: e.Rank}
			l := &link{worker: w.worker, endpoint: status.Endpoint, replay: status.Replay, snapshot: status.Snapshot, topic: src.Topic, ranks: ranks, due: make(chan struct{}, 1)}
			l.p = newPublisher(w.worker, i, status, l.reconnect)
			l.p.attempt = l.attempt
			l.p.copyRule = src.Copies.Rule(src.Engine)
			l.p.relayed = strings.HasPrefix(e.Connect, config.TransportSMG+"://")
			l.p.unsure = unsure[src.Engine]
			l.p.rules.HasPools = len(c.Pools) > 0
			l.p.rules.ContentInKeys = src.Engine.HasContents()
			l.p.rules.ClearsDevice = src.Clears.Device(src.Engine)
			if l.p.rules.IsVLLM = src.Engine == feed.EngineVLLM; l.p.rules.IsVLLM && len(c.Sources) == 1 {
				l.p.rules.FollowGroups(&c.Attention)
			}
			// A source with a single rank may be any rank of the worker, unless the rank is configured.
			l.p.rankMismatchLogged = src.DPSize == 1 && src.FirstRank == 0
			w.links = append(w.links, l)
		}
		w.log.Info("reading source", "source", i, "connect", src.Connect, "replay", src.Replay, "ranks", src.DPSize, "first_rank", src.FirstRank)
	}
	for _, warning := range c.Warnings() {
		var source []any
		if warning.Source >= 0 {
			source = []any{"source", warning.Source}
		}
		w.log.Warn(warning.Text, source...)
	}
	return w
}

// AddWorker adds a worker. It waits until Run is called, or ctx is done. It returns the error of
// config.Config.Validate or config.SocketSet.Add, config.ErrWorkerExists, config.ErrTooManyWorkers, config.ErrTooManySources,
// config.ErrWorkersTooLarge, config.ErrEnded, or the error of ctx.
func (in *Ingest) AddWorker(ctx context.Context, c config.Worker) error {
	only := config.Config{Workers: []config.Worker{c}}
	if err := only.Validate(); err != nil {
		return err
	}
	c = only.WithDefaults().Workers[0]
	var failed error
	err := in.change(ctx, func(ctx context.Context, r *running) {
		if failed = in.admit(c); failed != nil {
			return
		}
		w := in.worker(c)
		w.bytes = c.Bytes()
		r.start(ctx, w)
	})
	if err != nil {
		return err
	}
	return failed
}

// admit reserves the name, the sockets and the budgets of a worker.
func (in *Ingest) admit(c config.Worker) error {
	switch why, ok := in.shared.names.claim(c.Name, true); {
	case ok:
	case why == refusedWorkers:
		return config.ErrTooManyWorkers
	default:
		return config.ErrWorkerExists
	}
	if err := in.shared.sockets.claim(c); err != nil {
		in.shared.names.release(c.Name)
		return err
	}
	budgets := &in.shared.budgets
	if !budgets.workers.Reserve(c.Bytes()) {
		in.shared.sockets.release(c.Name)
		in.shared.names.release(c.Name)
		return config.ErrWorkersTooLarge
	}
	if !budgets.sources.Reserve(int64(c.Publishers())) {
		budgets.workers.Release(c.Bytes())
		in.shared.sockets.release(c.Name)
		in.shared.names.release(c.Name)
		return config.ErrTooManySources
	}
	return nil
}

// RemoveWorker removes a worker of the Config or of AddWorker from the stream, and returns when it is
// removed. It returns config.ErrNoWorker, config.ErrEnded, or the error of ctx.
func (in *Ingest) RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error {
	return in.end(ctx, name, func(w *connectedWorker) (found bool) {
		return w.end(func() {
			w.remove(why)
			w.log.Info("worker removed", "reason", why.String())
		})
	})
}

// Release ends the reading of a worker of the Config, of AddWorker or of a listener, or drops what Restore was given of it. The worker
// stays in the stream: when Release returns without an error, no call of its lane is in progress or follows, and Sink.RemoveWorker is not
// called. It is forgotten as if it had never been added. The worker of a listener enters the stream again with the next message of its
// engine. Release returns config.ErrNoWorker, config.ErrEnded, or the error of ctx, after which it goes on.
func (in *Ingest) Release(ctx context.Context, name string) error {
	return in.end(ctx, name, func(w *connectedWorker) (found bool) {
		found = in.shared.recovered.drop(in.shared, name)
		if w.end(func() { w.detach() }) {
			w.log.Debug("worker released")
			return true
		}
		for _, l := range in.listeners {
			found = l.release(name) || found
		}
		return found
	})
}

// end removes a worker from those of Run, and calls a function with it in a goroutine; with nil if there is no such worker.
// It waits until the function returns, which reports whether it has found the worker.
func (in *Ingest) end(ctx context.Context, name string, end func(*connectedWorker) (found bool)) error {
	found := make(chan bool, 1)
	err := in.change(ctx, func(_ context.Context, r *running) {
		w := r.workers[name]
		delete(r.workers, name)
		r.group.Go(func() { found <- end(w) })
	})
	if err != nil {
		return err
	}
	select {
	case ok := <-found:
		if !ok {
			return config.ErrNoWorker
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// end stops the reading of a worker, calls last with the worker's mutex held, and forgets the worker. It returns false if w is nil.
func (w *connectedWorker) end(last func()) bool {
	if w == nil {
		return false
	}
	w.stop()
	<-w.done
	w.mu.Lock()
	last()
	w.mu.Unlock()
	w.release()
	return true
}

// change makes Run execute a change, and waits until it is done.
func (in *Ingest) change(ctx context.Context, change func(context.Context, *running)) error {
	done := make(chan struct{})
	select {
	case in.changes <- func(ctx context.Context, r *running) { change(ctx, r); close(done) }:
		<-done
		return nil
	case <-in.ended:
		return config.ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ranksOf returns the dp ranks of a worker's sources.
func ranksOf(c config.Worker) (ranks []uint32) {
	for _, s := range c.Sources {
		ranks = append(ranks, ranksOfSource(s)...)
	}
	slices.Sort(ranks)
	return slices.Compact(ranks)
}

// ranksOfSource returns the dp ranks of a source.
func ranksOfSource(s config.Source) (ranks []uint32) {
	for _, e := range s.Endpoints() {
		ranks = append(ranks, e.Rank)
	}
	return ranks
}

// Close closes an Ingest whose Run was not called. Otherwise it does nothing, because Run closes everything.
func (in *Ingest) Close() error {
	if !in.used.CompareAndSwap(false, true) {
		return nil
	}
	return errors.Join(in.closeListeners(), in.release())
}

func (in *Ingest) closeListeners() error {
	var errs []error
	for _, l := range in.listeners {
		errs = append(errs, l.receiver.Close())
	}
	return errors.Join(errs...)
}

// release closes the transports and unregisters the metrics. All sockets are closed before.
func (in *Ingest) release() error {
	err := in.shared.transports.Close()
	if in.registerer != nil {
		in.registerer.Unregister(in.shared.metrics.registry)
	}
	return err
}
