//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvcast/kvcast/test/bench"
)

const (
	// window is the maximum number of batches that the publisher is ahead of the slowest subscriber.
	// It keeps the server busy, and is far below the number at which ZeroMQ drops messages (10,000)
	// or the journal evicts entries.
	window = 4_000
	// smallJournal is a size of a journal that is soon full, and has several times the entries of a window, some 250 B each.
	smallJournal = "4MiB"
	// stall is the time without progress after which a run fails.
	stall = 2 * time.Minute
)

// rig is a server, its one engine, and its subscribers.
type rig struct {
	publisher   *publisher
	workers     int      // number of workers, which all read the engine
	server      *process // nil in a relayRig
	grpc        string   // address that subscribers connect to
	subscribers []*subscriber
	moved       chan struct{} // has a token when a subscriber has received something
	load        *load
	sent        uint64 // batches
	others      uint64 // entries of workers that read other engines
}

// newRig returns a rig with n subscribers.
func newRig(s shape, subscribers int, args ...string) (*rig, error) {
	return newWrappedRig(nil, s, subscribers, args...)
}

// newWrappedRig starts the server through a wrapper command.
func newWrappedRig(wrapper []string, s shape, subscribers int, args ...string) (*rig, error) {
	return newRigOfWorkers(1, wrapper, s, subscribers, args...)
}

// newRigOfWorkers returns a rig in which several workers read the engine, and so have the same blocks. The first worker is
// workerName.
func newRigOfWorkers(workers int, wrapper []string, s shape, subscribers int, args ...string) (_ *rig, err error) {
	r := &rig{workers: workers, moved: make(chan struct{}, 1), load: newLoad(s)}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.publisher, err = newPublisher(); err != nil {
		return nil, err
	}
	for i := range workers {
		name := workerName
		if i > 0 {
			name = fmt.Sprintf("vllm-%d", i)
		}
		args = append(args, "--worker", fmt.Sprintf("name=%s,model=%s,connect=%s", name, modelName, r.publisher.endpointOf(i)))
	}
	if r.server, err = serve(wrapper, args...); err != nil {
		return nil, err
	}
	r.grpc = r.server.grpc
	if err = r.join(subscribers); err != nil {
		return nil, err
	}
	return r, nil
}

// join waits until all workers read the engine, and adds n subscribers.
func (r *rig) join(subscribers int) error {
	for range r.workers {
		if err := r.publisher.subscribed(); err != nil {
			return err
		}
	}
	for range subscribers {
		if _, err := r.subscribe(nil); err != nil {
			return err
		}
	}
	return nil
}

// subscribe adds a subscriber.
func (r *rig) subscribe(observe func([]byte, time.Time) error) (*subscriber, error) {
	s, err := subscribe(r.grpc, fromLatest(), r.moved, observe)
	if err == nil {
		r.subscribers = append(r.subscribers, s)
	}
	return s, err
}

// newest returns the seq of the last entry to expect: for each worker, one entry per batch, after one
// for WorkerAdded.
func (r *rig) newest() uint64 { return uint64(r.workers)*(1+r.sent) + r.others }

// slowest returns the last seq that all subscribers have received.
func (r *rig) slowest() uint64 {
	seq := r.newest()
	for _, s := range r.subscribers {
		seq = min(seq, s.seq.Load())
	}
	return seq
}

// publish sends n batches as fast as the server accepts them.
func (r *rig) publish(n int) error {
	slowest := r.slowest()
	for range n {
		if r.newest()-slowest >= window {
			// Wait until half of the window is free, instead of once per batch.
			if err := r.until(r.newest() - window/2); err != nil {
				return err
			}
			slowest = r.slowest()
		}
		if err := r.send(); err != nil {
			return err
		}
	}
	return nil
}

// pace sends n batches at pacedRate.
func (r *rig) pace(n int) error { return paced(n, pacedRate, r.send) }

// paced calls send n times, at a rate per second. A call that is overdue is made at once.
func paced(n, rate int, send func() error) (err error) {
	due, err := bench.NewTicks(time.Second / time.Duration(rate))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, due.Close()) }()
	for range n {
		if err := due.Wait(); err != nil {
			return err
		}
		if err := send(); err != nil {
			return err
		}
	}
	return nil
}

func (r *rig) send() error {
	r.sent++
	return r.publisher.send(r.load.next(time.Now()))
}

// arrive waits until every subscriber has received exactly the batches that were sent.
func (r *rig) arrive() error {
	if err := r.until(r.newest()); err != nil {
		return err
	}
	for _, s := range r.subscribers {
		if seq := s.seq.Load(); seq != r.newest() {
			return fmt.Errorf("check subscriber: it is at %d, want %d", seq, r.newest())
		}
	}
	return nil
}

// arriveAtServer waits until the server has all that was sent, which has no subscribers if they are connected to others.
func (r *rig) arriveAtServer() error {
	ctx, cancel := context.WithTimeout(context.Background(), stall)
	defer cancel()
	for {
		m, err := r.server.metrics(ctx)
		if err == nil && m[metricNewest] >= float64(r.newest()) && m[metricBehind] == 0 {
			return nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait for the server: it is at %.0f, want %d: %w", m[metricNewest], r.newest(), errors.Join(err, ctx.Err()))
		}
	}
}

// until waits until every subscriber has received a seq.
func (r *rig) until(seq uint64) error {
	timer := time.NewTimer(stall)
	defer timer.Stop()
	for r.slowest() < seq {
		select {
		case <-r.moved:
			timer.Reset(stall)
		case <-timer.C:
			return fmt.Errorf("wait for entries: a subscriber is at %d for %v, want %d", r.slowest(), stall, seq)
		}
		for _, s := range r.subscribers {
			if err := s.ended(); err != nil {
				return err
			}
		}
	}
	return nil
}

// figures are the resources that a measured section used.
type figures struct {
	cpu     time.Duration // of the server
	grown   metrics
	elapsed time.Duration
}

// measure runs a section, and checks that the server did all of its work without a fault.
func (r *rig) measure(do func() error) (figures, error) {
	ctx := context.Background()
	before, err := r.server.metrics(ctx)
	if err != nil {
		return figures{}, err
	}
	sent, stored, removed := r.load.sent, r.load.stored, r.load.removed
	began, err := r.server.cpu()
	if err != nil {
		return figures{}, err
	}
	start := time.Now()
	if err := do(); err != nil {
		return figures{}, err
	}
	elapsed := time.Since(start)
	ended, err := r.server.cpu()
	if err != nil {
		return figures{}, err
	}
	after, err := r.server.metrics(ctx)
	if err != nil {
		return figures{}, err
	}
	f := figures{cpu: ended - began, grown: after.since(before), elapsed: elapsed}
	return f, errors.Join(
		after.faultless(),
		f.grown.want(metricBatches, r.workers*(r.load.sent-sent)),
		f.grown.want(metricStored, r.workers*(r.load.stored-stored)),
		f.grown.want(metricRemoved, r.workers*(r.load.removed-removed)),
		after.want(metricBlocks, r.workers*r.load.present),
		after.want(metricNewest, int(r.newest())),
	)
}

// Close closes the parts in order of dependency.
func (r *rig) Close() error {
	var closers []io.Closer
	for _, s := range r.subscribers {
		closers = append(closers, s)
	}
	if r.server != nil {
		closers = append(closers, r.server)
	}
	if r.publisher != nil {
		closers = append(closers, r.publisher)
	}
	return closeAll(closers...)
}
