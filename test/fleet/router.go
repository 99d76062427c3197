package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/truth"
)

// Router follows a server, or one of several, over all their runs. It needs no snapshot, unless its config allows snapshots.
type Router struct {
	config RouterConfig

	mu      sync.Mutex // guards all below
	at      client.Position
	eventID map[string]uint64 // of the last event, by worker
	first   uint64            // seq of the first entry
	backlog uint64            // seq of the newest entry that the server had when the subscription began
	view    *client.View
	gaps    int
	// snapshots is the number of snapshots.
	snapshots int
	pauses    pauses
	truth     *truth.Checker  // gets the entries, unless it is nil
	lost      map[string]bool // workers with gaps
	err       error           // the first violation
	changed   chan struct{}   // closed by the next update
}

// RouterConfig configures a Router.
type RouterConfig struct {
	// Lossless makes a gap a failure, though every batch can be replayed unless the machine is too busy. Otherwise ranks with
	// a gap are not compared with their engines.
	Lossless bool
	// IdleTimeout is that of the subscription; 0: the client's default.
	IdleTimeout time.Duration
	// BackoffMin and BackoffMax are those of the subscription; 0: 10 ms and 100 ms.
	BackoffMin, BackoffMax time.Duration
	// Snapshots allows snapshots, which replace the state, as after a change of the epoch.
	Snapshots bool
}

// Follow follows the entries from the first on, of a server or of several, separated by commas.
func Follow(t *testing.T, addr string, config RouterConfig) *Router {
	t.Helper()
	r := &Router{config: config, view: client.NewView(), eventID: make(map[string]uint64), lost: make(map[string]bool), changed: make(chan struct{})}
	c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		cfg := client.Config{
			Start: client.FromEarliest(), GapPolicy: client.GapFail, IdleTimeout: config.IdleTimeout, Digests: true,
			BackoffMin: cmp.Or(config.BackoffMin, 10*time.Millisecond), BackoffMax: cmp.Or(config.BackoffMax, 100*time.Millisecond),
		}
		if config.Snapshots {
			cfg.GapPolicy = client.GapSnapshot
		}
		for u, err := range c.Subscribe(ctx, cfg) {
			if err == nil {
				err = r.receive(u)
			}
			if err != nil && ctx.Err() == nil {
				r.fail(err)
				return
			}
		}
	}()
	return r
}

// receive checks and applies an update.
func (r *Router) receive(u client.Update) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.Message.GetSnapshotBegin() != nil {
		if !r.config.Snapshots {
			return errors.New("got a snapshot, want to resume")
		}
		r.snapshots++
		r.at = client.Position{}
		clear(r.eventID)
	}
	if w := u.Message.GetSnapshotWorker(); w != nil {
		r.eventID[w.GetWorker()] = w.GetLastEventId()
	}
	if u.Message.GetSnapshotEnd() != nil {
		r.at = u.Position
		r.first = r.at.Seq + 1
	}
	if accepted := u.Message.GetAccepted(); accepted != nil {
		r.backlog = accepted.GetNewestSeq()
		if r.at.Epoch == "" {
			r.at = u.Position // the journal begins after it
			r.first = r.at.Seq + 1
		}
	}
	for _, e := range u.Message.GetEntries() {
		inSnapshot := r.snapshots > 0 && r.at.Epoch == "" // which lacks the entries that its blocks include
		if e.GetSeq() != r.at.Seq+1 && (!inSnapshot || e.GetSeq() <= r.at.Seq) {
			return fmt.Errorf("got entry %d after entry %d", e.GetSeq(), r.at.Seq)
		}
		r.at.Seq = e.GetSeq()
		if len(e.GetEvents()) > 0 {
			r.pauses.entry(e.GetWorker(), time.Now())
		}
		if r.truth != nil {
			r.truth.Receive(r.at.Epoch, e)
		}
		for _, ev := range e.GetEvents() {
			// A worker whose entries were discarded continues with a larger event id.
			if last := r.eventID[e.GetWorker()]; ev.GetEventId() != last+1 && (last > 0 || r.first == 1) {
				return fmt.Errorf("entry %d: got event id %d of %s after %d", e.GetSeq(), ev.GetEventId(), e.GetWorker(), last)
			}
			r.eventID[e.GetWorker()] = ev.GetEventId()
			if g := ev.GetGap(); g != nil && g.GetReason() != kvcastv1.Gap_REASON_REPLAY_UNPROVED { // an unproved socket is no loss
				r.gaps++
				r.lost[e.GetWorker()] = true
				if !r.config.Lossless {
					continue
				}
				return fmt.Errorf("entry %d: %s lost batches that its engine has: %v", e.GetSeq(), e.GetWorker(), g)
			}
		}
	}
	if epoch := u.Position.Epoch; epoch != "" {
		if r.at.Epoch != "" && epoch != r.at.Epoch {
			return fmt.Errorf("got epoch %s after %s", epoch, r.at.Epoch)
		}
		r.at.Epoch = epoch
	}
	r.view.Apply(u)
	close(r.changed)
	r.changed = make(chan struct{})
	return nil
}

func (r *Router) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
	close(r.changed)
	r.changed = make(chan struct{})
}

// Tell passes the entries that are received from now on to a Checker.
func (r *Router) Tell(c *truth.Checker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.truth = c
}

// Seq returns the seq of the last entry.
func (r *Router) Seq() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at.Seq
}

// Epoch returns the epoch of the last entry.
func (r *Router) Epoch() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at.Epoch
}

// Err returns the first violation.
func (r *Router) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// until waits until a condition returns no error.
func (r *Router) until(ctx context.Context, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, harness.Timeout)
	defer cancel()
	for {
		r.mu.Lock()
		failed, unmet, changed := r.err, condition(), r.changed
		r.mu.Unlock()
		switch {
		case failed != nil:
			return failed
		case unmet == nil:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return unmet
		}
	}
}

// Await waits for an entry.
func (r *Router) Await(ctx context.Context, seq uint64) error {
	return r.until(ctx, func() error {
		if r.at.Seq < seq {
			return fmt.Errorf("entry %d has not arrived: the last is %d", seq, r.at.Seq)
		}
		return nil
	})
}

// maxBacklog is the number of entries that a router may be behind when its server is killed: far less than the journals of tests keep.
const maxBacklog = 5000

// KeepUp waits until the router has all but maxBacklog of the entries that the server had when the subscription began. Without it,
// a router whose servers are killed soon after they start falls behind the entries that are retained, on a busy machine.
func (r *Router) KeepUp(ctx context.Context) error {
	return r.until(ctx, func() error {
		if r.at.Seq+maxBacklog < r.backlog {
			return fmt.Errorf("entry %d has not arrived: the last is %d, and the server has %d", r.backlog-maxBacklog, r.at.Seq, r.backlog)
		}
		return nil
	})
}

// Converge waits until the view equals the engines, except where a gap was reported.
func (r *Router) Converge(ctx context.Context, engines map[string]client.BlocksDigest) error {
	return r.until(ctx, func() error {
		workers := r.view.Workers()
		if len(workers) != len(engines) {
			return fmt.Errorf("there are %d workers, want %d", len(workers), len(engines))
		}
		for _, w := range workers {
			if len(w.Ranks) != 1 {
				return fmt.Errorf("%s has ranks %+v, want one", w.Name, w.Ranks)
			}
			if r.lost[w.Name] && !r.config.Lossless {
				continue
			}
			if got, want := w.Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE], engines[w.Name]; got != want {
				return fmt.Errorf("%s: the view has %+v, the engine %+v", w.Name, got, want)
			}
		}
		return nil
	})
}

// Snapshots returns the number of snapshots.
func (r *Router) Snapshots() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.snapshots
}

// Gaps returns the number of gaps that were reported.
func (r *Router) Gaps() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gaps
}
