package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/truth"
)

// behavior is the behavior of a subscriber.
type behavior struct {
	name string
	// workers is the filter of the subscription; nil means no filter.
	workers []string
	// maxStream is the maximum duration of a stream; 0 means no limit.
	maxStream time.Duration
	// delay is the delay after each message.
	delay time.Duration
}

// received counts what a router has received.
type received struct {
	entries, gaps, restarts, removed, resumes, snapshots, stalls uint64
}

// router is a subscriber whose streams the checker verifies.
type router struct {
	behavior
	conn   *grpc.ClientConn
	client kvcastv1.RouterEventServiceClient
	rng    *rand.Rand
	truth  *truth.Checker // that its entries go to; nil: none
	// uninterrupted, while true, suspends maxStream and delay.
	uninterrupted atomic.Bool

	mu      sync.Mutex
	checker *checker.Checker // guarded by mu
	view    *client.View     // guarded by mu; has applied the same messages as checker
	counts  received         // guarded by mu
	changed chan struct{}    // guarded by mu; closed at the next message
}

func newRouter(addr string, t behavior, seed uint64) (*router, error) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return &router{
		behavior: t, conn: conn, client: kvcastv1.NewRouterEventServiceClient(conn), rng: rand.New(rand.NewPCG(seed, 2)),
		checker: checker.New(checker.Options{}), view: client.NewView(), changed: make(chan struct{}),
	}, nil
}

func (r *router) filter() *kvcastv1.Filter {
	if r.workers == nil {
		return nil
	}
	return &kvcastv1.Filter{Workers: r.workers}
}

func (r *router) includes(worker string) bool {
	return r.workers == nil || slices.Contains(r.workers, worker)
}

// run follows the stream until the context ends. It returns an error if a guarantee is violated.
func (r *router) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := r.follow(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("subscriber %s: %w", r.name, err)
		}
	}
	return nil
}

// follow receives one stream, for at most maxStream.
func (r *router) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var until time.Time
	if r.maxStream > 0 {
		until = time.Now().Add(time.Duration(r.rng.Int64N(int64(r.maxStream))))
	}
	req, err := r.begin()
	if err != nil {
		return err
	}
	stream, err := r.client.Subscribe(ctx, req)
	for err == nil {
		var m *kvcastv1.SubscribeResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		if err := r.receive(m); err != nil {
			return err
		}
		if r.uninterrupted.Load() {
			continue
		}
		if r.maxStream > 0 && time.Now().After(until) {
			return nil
		}
		if r.delay > 0 {
			select {
			case <-time.After(r.delay):
			case <-ctx.Done():
			}
		}
	}
	if r.delay > 0 && status.Code(err) == codes.ResourceExhausted {
		// The server ended the stream, because the delay is too long. run resumes.
		r.mu.Lock()
		defer r.mu.Unlock()
		r.counts.stalls++
		return nil
	}
	return fmt.Errorf("the stream ended: %w", err)
}

// begin returns the request of the next stream: after the last position, or from a snapshot.
func (r *router) begin() (*kvcastv1.SubscribeRequest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	req := &kvcastv1.SubscribeRequest{
		Start: &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}, Filter: r.filter(),
	}
	if at := r.checker.Position(); at != nil {
		req.Start = &kvcastv1.SubscribeRequest_After{After: at}
		r.counts.resumes++
	}
	return req, r.checker.Begin(req)
}

func (r *router) receive(m *kvcastv1.SubscribeResponse) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.GetSnapshotEnd() != nil {
		r.counts.snapshots++
	}
	for _, e := range m.GetEntries() {
		r.counts.entries++
		for _, ev := range e.GetEvents() {
			switch {
			case ev.GetGap() != nil:
				r.counts.gaps++
			case ev.GetCleared().GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED:
				r.counts.restarts++
			case ev.GetWorkerRemoved() != nil:
				r.counts.removed++
			}
		}
	}
	close(r.changed)
	r.changed = make(chan struct{})
	if err := r.checker.Receive(m); err != nil {
		return err
	}
	at := r.checker.Position() // nil within a snapshot
	if r.truth != nil {
		for _, e := range m.GetEntries() {
			r.truth.Receive(m.GetPosition().GetEpoch(), e)
		}
	}
	r.view.Apply(client.Update{Message: m, Position: client.Position{Epoch: at.GetEpoch(), Seq: at.GetSeq()}})
	return nil
}

// bounds returns how old an answer of the server may be: it has what the router has received.
func (r *router) bounds() truth.Bounds {
	r.mu.Lock()
	defer r.mu.Unlock()
	return truth.Bounds{Delivered: r.checker.Position()}
}

func (r *router) totals() received {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts
}

// await waits until the view equals the engines, except at ranks that are reported incomplete.
func (r *router) await(ctx context.Context, states []state) (o outcome, err error) {
	for {
		began := time.Now()
		r.mu.Lock()
		if o, err = compare(r.checker, states, r.includes); err == nil {
			err = compareClientView(r.view, r.checker.View())
		}
		changed := r.changed
		r.mu.Unlock()
		if err == nil {
			return o, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return o, fmt.Errorf("subscriber %s: %w", r.name, err)
		}
		// The stream is not read while a view is compared: most of the time must be left to read it.
		select {
		case <-time.After(10 * time.Since(began)):
		case <-ctx.Done():
		}
	}
}

// outcome is the result of comparing a view with the engines.
type outcome struct {
	equal int
	// incomplete is the number of ranks reported incomplete. differ is the number of incomplete ranks whose blocks differ.
	incomplete, differ int
	// falselyIncomplete lists the incomplete ranks of lossless engines.
	falselyIncomplete []string
}

// compare compares a view that began with a snapshot with the engines. The error names the ranks
// that differ and are not reported incomplete.
func compare(c *checker.Checker, states []state, wants func(string) bool) (o outcome, err error) {
	const tier = kvcastv1.Tier_TIER_DEVICE
	if c.Position() == nil {
		return o, errors.New("no snapshot is complete")
	}
	var errs []error
	for _, s := range states {
		if !wants(s.worker) {
			continue
		}
		d := c.Difference(s.worker, s.rank, tier, s.blocks)
		incomplete := c.View().Incomplete(s.worker, s.rank)
		switch {
		case !incomplete && !d.Empty():
			errs = append(errs, fmt.Errorf("%s: %v, not reported incomplete", s.name(), d))
		case incomplete && !d.Empty():
			o.incomplete++
			o.differ++
		case incomplete:
			o.incomplete++
		default:
			o.equal++
		}
		if incomplete && s.lossless {
			o.falselyIncomplete = append(o.falselyIncomplete, s.name())
		}
	}
	return o, errors.Join(errs...)
}

// compareClientView returns an error unless package client's view equals the checker's.
func compareClientView(v *client.View, want *checker.View) error {
	var names []string
	for _, w := range v.Workers() {
		names = append(names, w.Name)
		for _, r := range w.Ranks {
			for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
				should := client.BlocksDigest{
					Blocks: uint64(want.Count(w.Name, r.Rank, tier)), XOR: want.Digest(w.Name, r.Rank, tier),
				}
				if got := r.Blocks[tier]; got != should || r.Incomplete != (want.Incomplete(w.Name, r.Rank) || want.Unproved(w.Name, r.Rank)) {
					return fmt.Errorf("%s, rank %d, %v: client's view has %+v, incomplete %t, want %+v",
						w.Name, r.Rank, tier, got, r.Incomplete, should)
				}
			}
		}
	}
	if should := want.Workers(); !slices.Equal(names, should) {
		return fmt.Errorf("client's view has workers %v, want %v", names, should)
	}
	return nil
}

// snapshot requests a snapshot, and compares it with the engines.
func (r *router) snapshot(ctx context.Context, states []state) error {
	c, req := checker.New(checker.Options{}), &kvcastv1.SnapshotRequest{}
	if err := c.BeginSnapshot(req); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.client.Snapshot(ctx, req)
	for err == nil {
		var m *kvcastv1.SnapshotResponse
		if m, err = stream.Recv(); err == nil {
			err = c.ReceiveSnapshot(m)
		}
	}
	if errors.Is(err, io.EOF) {
		err = c.EndSnapshot()
	}
	if err == nil {
		_, err = compare(c, states, func(string) bool { return true })
	}
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}
