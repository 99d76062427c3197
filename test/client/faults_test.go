package client_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// frequentProgress returns a config with a short progress interval.
func frequentProgress() server.Config {
	return server.Config{Limits: server.Limits{ProgressInterval: 20 * time.Millisecond}}
}

func TestCutStreamsAreResumed(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(1, 1))
	h.churn(rng, 100)
	f := follow(t, p.Addr(), quick())
	for range 20 {
		h.churn(rng, 50)
		p.Cut()
		h.churn(rng, 50)
		f.reach(h)
		f.compareDigests()
	}
	if cuts, snapshots := f.counts(); cuts == 0 || snapshots != 1 {
		t.Errorf("%d interruptions and %d snapshots, want interruptions and 1 snapshot", cuts, snapshots)
	}
}

// TestCutSnapshotsAreRestarted cuts connections at random times during large snapshots.
func TestCutSnapshotsAreRestarted(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(2, 2))
	for n := range uint64(100) { // some MB
		blocks := make([]uint64, 1000)
		for i := range blocks {
			blocks[i] = n<<20 + uint64(i) + 10_000
		}
		h.batch("large", storing(0, blocks...))
	}
	f := follow(t, p.Addr(), quick())
	for range 30 {
		accepted := p.Stats().Accepted
		f.await("another connection", func() bool { h.churn(rng, 1); return p.Stats().Accepted > accepted || f.view.Status().Live })
		h.churn(rng, 20)
		p.Cut()
	}
	f.reach(h)
	f.compareDigests()
}

func TestNewEpochIsFollowedFromSnapshot(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(3, 3))
	h.churn(rng, 200)
	f := follow(t, p.Addr(), quick())
	f.reach(h)
	for range 3 { // replace the server
		p.Retarget("")
		p.Cut()
		h = start(t, frequentProgress(), journal.Config{})
		h.churn(rng, 100)
		p.Retarget(h.Target)
		f.reach(h)
		f.compareDigests()
	}
	if _, snapshots := f.counts(); snapshots != 4 {
		t.Errorf("%d snapshots, want the first, and one for each new server", snapshots)
	}
}

func TestShutdownIsFollowedToLastEntry(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(4, 4))
	h.churn(rng, 200)
	f := follow(t, p.Addr(), quick())
	f.await("a snapshot", func() bool { return f.view.Status().Ready })
	h.churn(rng, 500)
	p.Retarget("")
	if err := h.Stop(); err != nil {
		t.Fatal(err)
	}
	f.reach(h)
	next := start(t, frequentProgress(), journal.Config{})
	next.churn(rng, 10)
	p.Retarget(next.Target)
	f.reach(next)
}

func TestCompactedEntriesAreReplacedBySnapshot(t *testing.T) {
	t.Parallel()
	small := journal.Config{MaxBytes: 64 << 10}
	h := start(t, frequentProgress(), small)
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(5, 5))
	h.churn(rng, 50)
	f, strict := follow(t, p.Addr(), quick()), quick()
	strict.GapPolicy = client.GapFail
	failing := follow(t, p.Addr(), strict)
	f.reach(h)
	failing.reach(h)
	p.Retarget("")
	p.Cut()
	h.churn(rng, 3000)
	p.Retarget(h.Target)
	f.reach(h)
	if _, snapshots := f.counts(); snapshots != 2 {
		t.Errorf("%d snapshots, want 2", snapshots)
	}
	var e *client.Error
	if err := failing.ended(); !errors.As(err, &e) || e.Code != codes.OutOfRange || e.Reason != client.ReasonPositionCompacted || e.Oldest == 0 {
		t.Errorf("with GapFail: got %v, want POSITION_COMPACTED", err)
	}
}

func TestNewEpochEndsSubscriptionWithGapFail(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	h.churn(rand.New(rand.NewPCG(6, 6)), 10)
	cfg := quick()
	cfg.GapPolicy, cfg.Start = client.GapFail, client.After(client.Position{Epoch: "another", Seq: 3})
	var e *client.Error
	if err := follow(t, h.Target, cfg).ended(); !errors.As(err, &e) || e.Reason != client.ReasonEpochMismatch || e.Epoch != h.Journal.Bounds().Epoch {
		t.Errorf("got %v, want EPOCH_MISMATCH", err)
	}
	cfg = quick()
	cfg.Start = client.AfterSeq(1 << 40)
	if err := follow(t, h.Target, cfg).ended(); !errors.As(err, &e) || e.Reason != client.ReasonPositionAhead {
		t.Errorf("got %v, want POSITION_AHEAD", err)
	}
}

// TestDeadConnectionIsReplaced stops forwarding at a proxy without closing the connection.
func TestDeadConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(7, 7))
	h.churn(rng, 100)
	cfg := quick()
	cfg.IdleTimeout = 2 * time.Second
	f := follow(t, p.Addr(), cfg)
	f.reach(h)
	for range 3 {
		p.Freeze()
		h.churn(rng, 100)
		f.reach(h)
	}
	if _, snapshots := f.counts(); snapshots != 1 || !f.interruptedBy(client.ErrIdle) {
		t.Errorf("%d snapshots, want 1; interruptions %v, want ErrIdle in them", snapshots, f.interruptions)
	}
}

// TestStoredPositionIsResumed restarts a router that has stored only the text of its position.
func TestStoredPositionIsResumed(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	rng := rand.New(rand.NewPCG(8, 8))
	h.churn(rng, 50)
	var text string
	seqs := make(map[uint64]int)
	c := dial(t, h.Target)
	for run := range 10 {
		var at client.Position
		if err := at.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		cfg := quick()
		if cfg.Start = client.After(at); run == 0 {
			cfg.Start = client.FromEarliest()
		}
		h.churn(rng, 50)
		for u, err := range c.Subscribe(t.Context(), cfg) {
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range u.Message.GetEntries() {
				seqs[e.GetSeq()]++
			}
			b, err := u.Position.MarshalText()
			if err != nil {
				t.Fatal(err)
			}
			if text = string(b); u.Position.Seq == h.Journal.Bounds().Newest {
				break
			}
		}
	}
	newest := h.Journal.Bounds().Newest
	for seq := uint64(1); seq <= newest; seq++ {
		if seqs[seq] != 1 {
			t.Fatalf("entry %d was delivered %d times", seq, seqs[seq])
		}
	}
	if uint64(len(seqs)) != newest {
		t.Errorf("%d entries, want %d", len(seqs), newest)
	}
}

// TestFromConn resumes over one connection. The subscription ends when the caller closes the connection.
func TestFromConn(t *testing.T) {
	t.Parallel()
	h := start(t, frequentProgress(), journal.Config{})
	p := harness.NewProxy(t, h.Target)
	rng := rand.New(rand.NewPCG(9, 9))
	h.churn(rng, 50)
	conn, err := grpc.NewClient(p.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	last, interruptions := uint64(0), 0
	cfg := quick()
	cfg.Start = client.FromEarliest()
	var end error
	closeConn := sync.OnceValue(conn.Close) // messages that were received before may follow
	for u, err := range client.FromConn(conn).Subscribe(t.Context(), cfg) {
		if err != nil {
			end = err
			break
		}
		if u.Interruption != nil {
			interruptions++
			h.churn(rng, 5)
		}
		for _, e := range u.Message.GetEntries() {
			if e.GetSeq() != last+1 {
				t.Fatalf("entry %d after %d", e.GetSeq(), last)
			}
			last = e.GetSeq()
		}
		if last < h.Journal.Bounds().Newest {
			continue
		}
		if p.Cut(); interruptions == 2 {
			if err := closeConn(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !errors.Is(end, client.ErrConnClosed) || interruptions < 2 {
		t.Errorf("ended after %d interruptions with %v, want ErrConnClosed", interruptions, end)
	}
}
