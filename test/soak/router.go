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
)

// temper is how a subscriber behaves.
type temper struct {
	name string
	// workers are those that it wants; nil means all.
	workers []string
	// cut is how long its streams last, at the most; 0 means for ever.
	cut time.Duration
	// slow is how long it takes for each message.
	slow time.Duration
}

// received is what a router has been told.
type received struct {
	entries, gaps, restarts, removed, resumes, snapshots, stalls uint64
}

// router is a subscriber that the checker judges.
type router struct {
	temper
	conn   *grpc.ClientConn
	client kvcastv1.RouterEventServiceClient
	rng    *rand.Rand
	// calm lets it behave well for a while.
	calm atomic.Bool

	mu      sync.Mutex
	checker *checker.Checker // guarded by mu
	view    *client.View     // guarded by mu; of the same messages
	told    received         // guarded by mu
	changed chan struct{}    // guarded by mu; closed at the next message
}

func newRouter(addr string, t temper, seed uint64) (*router, error) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return &router{
		temper: t, conn: conn, client: kvcastv1.NewRouterEventServiceClient(conn), rng: rand.New(rand.NewPCG(seed, 2)),
		checker: checker.New(checker.Options{}), view: client.NewView(), changed: make(chan struct{}),
	}, nil
}

func (r *router) filter() *kvcastv1.Filter {
	if r.workers == nil {
		return nil
	}
	return &kvcastv1.Filter{Workers: r.workers}
}

func (r *router) wants(worker string) bool {
	return r.workers == nil || slices.Contains(r.workers, worker)
}

// run follows the stream until the context ends. An error is a broken promise.
func (r *router) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := r.follow(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("subscriber %s: %w", r.name, err)
		}
	}
	return nil
}

// follow follows one stream until it is cut off.
func (r *router) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var until time.Time
	if r.cut > 0 {
		until = time.Now().Add(time.Duration(r.rng.Int64N(int64(r.cut))))
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
		if r.calm.Load() {
			continue
		}
		if r.cut > 0 && time.Now().After(until) {
			return nil
		}
		if r.slow > 0 {
			select {
			case <-time.After(r.slow):
			case <-ctx.Done():
			}
		}
	}
	if r.slow > 0 && status.Code(err) == codes.ResourceExhausted {
		// It was too slow, as it is told, and resumes.
		r.mu.Lock()
		defer r.mu.Unlock()
		r.told.stalls++
		return nil
	}
	return fmt.Errorf("the stream ends: %w", err)
}

// begin asks to go on where the last stream ended, or from a snapshot.
func (r *router) begin() (*kvcastv1.SubscribeRequest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	req := &kvcastv1.SubscribeRequest{
		Start: &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}, Filter: r.filter(),
	}
	if at := r.checker.Position(); at != nil {
		req.Start = &kvcastv1.SubscribeRequest_After{After: at}
		r.told.resumes++
	}
	return req, r.checker.Begin(req)
}

func (r *router) receive(m *kvcastv1.SubscribeResponse) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.GetSnapshotEnd() != nil {
		r.told.snapshots++
	}
	for _, e := range m.GetEntries() {
		r.told.entries++
		for _, ev := range e.GetEvents() {
			switch {
			case ev.GetGap() != nil:
				r.told.gaps++
			case ev.GetCleared().GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED:
				r.told.restarts++
			case ev.GetWorkerRemoved() != nil:
				r.told.removed++
			}
		}
	}
	close(r.changed)
	r.changed = make(chan struct{})
	if err := r.checker.Receive(m); err != nil {
		return err
	}
	at := r.checker.Position() // nil while what it holds is not whole
	r.view.Apply(client.Update{Message: m, Position: client.Position{Epoch: at.GetEpoch(), Seq: at.GetSeq()}})
	return nil
}

func (r *router) so() received {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.told
}

// await waits until the view is what the engines hold, where it does not say that it
// may be another.
func (r *router) await(ctx context.Context, states []state) (o outcome, err error) {
	for {
		r.mu.Lock()
		if o, err = compare(r.checker, states, r.wants); err == nil {
			err = same(r.view, r.checker.View())
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
	}
}

// outcome is how views and engines compare.
type outcome struct {
	equal int
	// incomplete ranks may be wrong, as was told; differ tells how many are.
	incomplete, differ int
	// needless are those of them whose faults leave all to be fetched.
	needless []string
}

// compare compares a view that began with a snapshot with what the engines hold. The
// error names those that differ and are not told to.
func compare(c *checker.Checker, states []state, wants func(string) bool) (o outcome, err error) {
	const tier = kvcastv1.Tier_TIER_DEVICE
	if c.Position() == nil {
		return o, errors.New("no snapshot has come whole")
	}
	var errs []error
	for _, s := range states {
		if !wants(s.worker) {
			continue
		}
		d := c.Difference(s.worker, s.rank, tier, s.blocks)
		told := c.View().Incomplete(s.worker, s.rank)
		switch {
		case !told && !d.Empty():
			errs = append(errs, fmt.Errorf("%s: %v, and nothing was told", s.name(), d))
		case told && !d.Empty():
			o.incomplete++
			o.differ++
		case told:
			o.incomplete++
		default:
			o.equal++
		}
		if told && s.lossless {
			o.needless = append(o.needless, s.name())
		}
	}
	return o, errors.Join(errs...)
}

// same tells whether package client's view is the checker's.
func same(v *client.View, want *checker.View) error {
	var names []string
	for _, w := range v.Workers() {
		names = append(names, w.Name)
		for _, r := range w.Ranks {
			for tier := kvcastv1.Tier_TIER_DEVICE; tier <= kvcastv1.Tier_TIER_EXTERNAL; tier++ {
				should := client.BlocksDigest{
					Blocks: uint64(want.Count(w.Name, r.Rank, tier)), XOR: want.Digest(w.Name, r.Rank, tier),
				}
				if got := r.Blocks[tier]; got != should || r.Incomplete != want.Incomplete(w.Name, r.Rank) {
					return fmt.Errorf("%s, rank %d, %v: client's view has %+v, incomplete %t, and should have %+v",
						w.Name, r.Rank, tier, got, r.Incomplete, should)
				}
			}
		}
	}
	if should := want.Workers(); !slices.Equal(names, should) {
		return fmt.Errorf("client's view has workers %v, and should have %v", names, should)
	}
	return nil
}

// snapshot compares a new snapshot with what the engines hold.
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
