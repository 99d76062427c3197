package workers_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/pool/pooltest"
	"github.com/kvcast/kvcast/internal/transport/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func read(t *testing.T, limit *budget.Budget, maxAge time.Duration, contents feed.Contents) *pooltest.Reader {
	t.Helper()
	return pooltest.Read(t, workers.Subscribe(workers.Config{
		Pool: "p", Tier: kvblock.TierDisk, MaxAge: maxAge, Contents: contents, Limit: limit, Logger: slog.New(slog.DiscardHandler),
	}))
}

func TestAnnouncedBlocksAreHeld(t *testing.T) {
	t.Parallel()
	steps := make(chan func(feed.Learner))
	limit := budget.New("test", 0)
	r := read(t, limit, time.Hour, func(ctx context.Context, pool string, l feed.Learner) error {
		if pool != "p" || l.Tier != kvblock.TierDisk {
			t.Errorf("pool %q, tier %d", pool, l.Tier)
		}
		all := pooltest.Chain(3000)
		l.Stored(all[:2000], false)
		l.Stored(all[1000:], true) // of a run before
		l.Stored(append(all[10:20:20], feed.Content{Hash: 4000, Tokens: 16, LoRA: pooltest.Adapter}), false)
		l.Removed([]uint64{4000, 4001})
		return pooltest.Contents(nil, func(l feed.Learner) {
			for step := range steps {
				step(l)
			}
		})(ctx, pool, l)
	})
	step := func(do func(feed.Learner)) { steps <- do }
	r.Want(3000)
	if len(r.Events) != 1 || r.Events[0].Kind != transport.Connected {
		t.Errorf("%+v", r.Events)
	}
	step(func(l feed.Learner) { l.Stored(pooltest.Chain(3010), false) })
	r.Want(3010)
	step(func(l feed.Learner) { l.Removed([]uint64{3010, 3009, 5000, 3010}) })
	r.Want(3008)
	// What the pool itself has stored comes late: the blocks may be gone again.
	step(func(l feed.Learner) { l.Stored(pooltest.Chain(3010), true) })
	step(func(l feed.Learner) { l.Stored(pooltest.Chain(3009), false) })
	r.Want(3009)
	// A block of which another content is announced is not held, whatever is announced then.
	for _, tokens := range []uint64{1, 3109} {
		step(func(l feed.Learner) {
			l.Stored([]feed.Content{{Hash: 3009, Parent: 3008, HasParent: true, TokensHash: tokens, Tokens: 16, LoRA: pooltest.Adapter}}, false)
		})
		r.Want(3008)
	}
	step(func(l feed.Learner) { l.Removed([]uint64{3009}) })
	step(func(l feed.Learner) { l.Stored(pooltest.Chain(3009), false) })
	r.Want(3009)
	// All may come anew.
	step(func(l feed.Learner) {
		l.Stored(pooltest.Chain(2000), false)
		l.Stored(pooltest.Chain(3020), true)
		l.Begun()
	})
	step(func(l feed.Learner) { l.Stored(pooltest.Chain(3011), false) })
	r.Want(3011)
	if r.Gone != 3 {
		t.Errorf("%d blocks were removed, want 3", r.Gone)
	}
	close(steps)
	r.Interrupt()
	if err := r.Close(); err != nil || limit.Used() != 0 {
		t.Errorf("%v, %d bytes are not released", err, limit.Used())
	}
}

func TestBlocksAreRemovedWhenTheyAreOld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := read(t, budget.New("test", 0), time.Hour, pooltest.Contents(pooltest.Chain(10), func(l feed.Learner) {
			time.Sleep(30 * time.Minute)
			l.Stored(pooltest.Chain(5), false)
		}))
		began := time.Now()
		r.Want(10)
		if age := time.Since(began); age > 0 {
			t.Errorf("blocks came after %v", age)
		}
		for _, c := range []struct {
			left uint64
			age  time.Duration
		}{{5, time.Hour}, {0, 90 * time.Minute}} {
			r.Want(c.left)
			if age := time.Since(began); age <= c.age || age > c.age+2*time.Minute {
				t.Errorf("%d blocks are left after %v, want after %v", c.left, age, c.age)
			}
		}
	})
}

// TestOldestBlocksMakeRoom has room for 5 blocks, when all are new and when all are there at the beginning.
func TestOldestBlocksMakeRoom(t *testing.T) {
	t.Parallel()
	const blockBytes = 192 + int64(len(pooltest.Adapter))
	all := pooltest.Chain(12)
	newest := slices.Concat(all[7:], all[:7]) // blocks 1 to 5 are announced last
	for name, contents := range map[string]feed.Contents{
		"at the beginning": pooltest.Contents(newest[:10], nil),
		"later":            pooltest.Contents(newest[:3], func(l feed.Learner) { l.Stored(newest[3:10], false) }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limit := budget.New("test", 5*blockBytes+1)
			r := read(t, limit, time.Hour, contents)
			for r.Held[5] == 0 {
				if err := r.Read(); err != nil {
					t.Fatal(err)
				}
			}
			if r.Want(5); limit.Used() != 5*blockBytes {
				t.Errorf("%d bytes are used, want those of 5 blocks", limit.Used())
			}
		})
	}
	r := read(t, budget.New("test", 10), time.Hour, pooltest.Contents(all, nil)) // for none
	for r.Topic == "" {
		if err := r.Read(); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.Held) > 0 {
		t.Errorf("%v are held", r.Held)
	}
}

func TestContentsEnd(t *testing.T) {
	t.Parallel()
	ended := errors.New("the journal has ended")
	for begins, want := range map[bool]transport.EventKind{false: transport.Failed, true: transport.Disconnected} {
		r := read(t, budget.New("test", 0), time.Hour, func(_ context.Context, _ string, l feed.Learner) error {
			l.Stored(pooltest.Chain(1), false)
			if begins {
				l.Begun()
			}
			return ended
		})
		if e := r.Last(); e.Kind != want || !errors.Is(e.Err, ended) {
			t.Errorf("%+v, want %v", e, want)
		}
	}
}
