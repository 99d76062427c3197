package client_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// fixture is a server whose workers' batches the test publishes.
type fixture struct {
	*harness.Instance
	t *testing.T
}

// start starts a server with a new journal.
func start(t *testing.T, cfg server.Config, jcfg journal.Config) *fixture {
	t.Helper()
	return &fixture{harness.StartInstance(t, harness.InstanceConfig{Server: cfg, Journal: jcfg}), t}
}

// batch publishes a batch of a worker, which becomes an entry. The first batch of a worker adds the worker.
func (h *fixture) batch(worker string, events ...wire.Event) {
	if h.Lane(worker) == nil {
		h.AddWorker(feed.Worker{Name: worker, Model: "m", BlockSize: 16})
	}
	h.Batch(worker, events...)
}

// storing returns an event that stores a chain of blocks after a parent; 0: no parent.
func storing(parent uint64, blocks ...uint64) wire.Event {
	return wire.Event{
		Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: blocks, TokensHashes: blocks, BlockSize: 16,
		Parent: parent, HasParent: parent != 0,
	}
}

// churn publishes batches with random stores, removes and clears.
func (h *fixture) churn(rng *rand.Rand, batches int) {
	for range batches {
		worker := fmt.Sprintf("w%d", rng.IntN(3))
		block := func() uint64 { return rng.Uint64N(200) + 1 }
		switch n := rng.IntN(40); {
		case n == 0:
			h.batch(worker, wire.Event{Kind: wire.KindCleared})
		case n < 12:
			h.batch(worker, wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{block(), block()}})
		default:
			h.batch(worker, storing(block(), 1000+block(), 2000+block()), storing(0, block()))
		}
	}
}

// follower is a subscription whose updates are checked and applied to a View.
type follower struct {
	t    *testing.T
	view *client.View
	done chan struct{}
	stop context.CancelFunc

	mu  sync.Mutex
	req *kvcastv1.SubscribeRequest // last request
	// awaitsSnapshot reports whether the stream has announced a snapshot that has not begun.
	awaitsSnapshot bool
	checker        *checker.Checker
	entries        map[string]map[uint64]int // number of deliveries, by epoch and seq
	interruptions  []*client.Interruption
	snapshots      int
	err            error
}

// quick returns a config with short timeouts and digests.
func quick() client.Config {
	return client.Config{Digests: true, BackoffMin: 5 * time.Millisecond, BackoffMax: 50 * time.Millisecond}
}

// dial returns a client without TLS.
func dial(t *testing.T, addr string, options ...grpc.DialOption) *client.Client {
	t.Helper()
	c, err := client.New(addr, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// follow starts a subscription. It ends when the test ends, or before.
func follow(t *testing.T, addr string, cfg client.Config) *follower {
	t.Helper()
	f := &follower{
		t: t, view: client.NewView(), done: make(chan struct{}), checker: checker.New(checker.Options{}),
		entries: make(map[string]map[uint64]int),
	}
	c := dial(t, addr, grpc.WithStreamInterceptor(f.intercept))
	var ctx context.Context
	ctx, f.stop = context.WithCancel(context.Background())
	go func() {
		defer close(f.done)
		for u, err := range c.Subscribe(ctx, cfg) {
			if err == nil {
				err = f.update(u)
			}
			if err != nil {
				f.mu.Lock()
				f.err = err
				f.mu.Unlock()
				break
			}
			f.view.Apply(u)
		}
	}()
	t.Cleanup(func() {
		f.stop()
		<-f.done
	})
	return f
}

// intercept records the requests of the client.
func (f *follower) intercept(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := streamer(ctx, desc, cc, method, opts...)
	return &recordedStream{s, f}, err
}

type recordedStream struct {
	grpc.ClientStream
	f *follower
}

func (r *recordedStream) SendMsg(m any) error {
	r.f.mu.Lock()
	r.f.req = proto.CloneOf(m.(*kvcastv1.SubscribeRequest))
	r.f.mu.Unlock()
	return r.ClientStream.SendMsg(m)
}

// update records and checks an update.
func (f *follower) update(u client.Update) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := u.Message
	if m == nil {
		f.interruptions = append(f.interruptions, u.Interruption)
		return nil
	}
	if m.GetAccepted() != nil {
		if err := f.checker.Begin(f.req); err != nil {
			return err
		}
	}
	if m.GetSnapshotEnd() != nil {
		f.snapshots++
	}
	for _, e := range m.GetEntries() {
		if u.Position.IsZero() {
			continue // a snapshot may start again and repeat entries
		}
		seqs := f.entries[u.Position.Epoch]
		if seqs == nil {
			seqs = make(map[uint64]int)
			f.entries[u.Position.Epoch] = seqs
		}
		if seqs[e.GetSeq()]++; seqs[e.GetSeq()] > 1 {
			return fmt.Errorf("entry %d of epoch %s was delivered twice", e.GetSeq(), u.Position.Epoch)
		}
	}
	if err := f.checker.Receive(m); err != nil {
		return err
	}
	at := f.checker.Position()
	if f.awaitsSnapshot = m.GetAccepted().GetMode() == kvcastv1.Accepted_MODE_SNAPSHOT || f.awaitsSnapshot && m.GetSnapshotBegin() == nil; f.awaitsSnapshot {
		at = nil // the state is about to be replaced
	}
	if at.GetEpoch() != u.Position.Epoch || at.GetSeq() != u.Position.Seq {
		return fmt.Errorf("the update's position is %v, want %v", u.Position, at)
	}
	return nil
}

// reach waits until the View is at the newest entry of a server's journal. It compares the View with the server's state
// and with the checker's view.
func (f *follower) reach(h *fixture) {
	f.t.Helper()
	b := h.Journal.Bounds()
	f.await(fmt.Sprintf("position %s:%d", b.Epoch, b.Newest), func() bool {
		at := f.view.Status().Position
		return at.Epoch == b.Epoch && at.Seq >= b.Newest
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	m := newModel()
	m.view = f.checker.View()
	if err := m.difference(f.view); err != nil {
		f.t.Fatalf("the view differs from the checker's view: %v", err)
	}
	workers, _ := h.Follower.Index().Workers(nil)
	for _, want := range workers {
		w, ok := f.view.Worker(want.Name)
		for _, r := range want.Ranks {
			for tier, d := range r.Blocks {
				if got := w.Ranks[r.Rank].Blocks[tier+1]; !ok || got != client.BlocksDigest(d) {
					f.t.Fatalf("worker %s has blocks %+v in the view, %+v in the server", want.Name, got, d)
				}
			}
		}
	}
}

// await waits until a condition is true. It is checked after each change of the View.
func (f *follower) await(what string, holds func() bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), harness.Timeout)
	defer cancel()
	ended := context.AfterFunc(ctx, func() {})
	defer ended()
	go func() {
		select {
		case <-f.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	for range f.view.Changes(ctx) {
		if holds() {
			return
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.t.Fatalf("%s: not reached; %+v, error %v, interruptions %v", what, f.view.Status(), f.err, f.interruptions)
}

// ended waits for the end of the subscription and returns its error.
func (f *follower) ended() error {
	f.t.Helper()
	select {
	case <-f.done:
	case <-time.After(harness.Timeout):
		f.t.Fatal("the subscription has not ended")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// compareDigests waits until the View has been compared with the server's digests. It fails if a digest differed.
func (f *follower) compareDigests() {
	f.t.Helper()
	before := f.view.Status().Compared
	f.await("digests", func() bool { return f.view.Status().Compared > before })
	if s := f.view.Status(); s.Differed > 0 {
		f.t.Fatalf("%d of %d digests differed; interruptions %v", s.Differed, s.Compared, f.interruptions)
	}
}

// interruptedBy reports whether a stream ended with an error.
func (f *follower) interruptedBy(reason error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, i := range f.interruptions {
		if errors.Is(i.Err, reason) {
			return true
		}
	}
	return false
}

// counts returns the numbers of interruptions and of snapshots.
func (f *follower) counts() (interruptions, snapshots int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.interruptions), f.snapshots
}
