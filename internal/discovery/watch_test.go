package discovery_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder records what is added and removed.
type recorder struct {
	mu      sync.Mutex // guards done
	done    []string
	rejects map[string]error
	ended   bool
	workers int
	most    int // workers; 0: any number
}

// calls returns what was added and removed since the last call.
func (r *recorder) calls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	done := r.done
	r.done = nil
	return done
}

func (r *recorder) AddWorker(_ context.Context, c config.Worker) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return config.ErrEnded
	}
	if err := r.rejects[c.Name]; err != nil {
		r.done = append(r.done, "reject "+c.Name)
		return err
	}
	if r.most > 0 && r.workers == r.most {
		r.done = append(r.done, "reject "+c.Name)
		return config.ErrTooManyWorkers
	}
	r.workers++
	r.done = append(r.done, fmt.Sprintf("add %s %s", c.Name, c.Model))
	return nil
}

func (r *recorder) RemoveWorker(_ context.Context, name string, why feed.RemoveReason) error {
	if why != feed.RemovedDiscovery {
		return fmt.Errorf("removed for %d", why)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = append(r.done, "remove "+name)
	r.workers--
	if name == "gone" {
		return config.ErrNoWorker
	}
	return nil
}

func TestWatch(t *testing.T) {
	w := func(name, model string) config.Worker { return config.Worker{Name: name, Model: model} }
	broken := errors.New("broken")
	type poll struct {
		found []config.Worker
		err   error
		want  []string
	}
	tests := []struct {
		name    string
		grace   time.Duration
		rejects map[string]error
		polls   []poll
	}{
		{"added and removed", 0, nil, []poll{
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"add a m", "add b m"}},
			{found: []config.Worker{w("b", "m"), w("c", "m")}, want: []string{"remove a", "add c m"}},
			{found: []config.Worker{w("a", "m")}, want: []string{"remove b", "remove c", "add a m"}},
		}},
		{"a changed worker is removed and added", 0, nil, []poll{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{found: []config.Worker{w("a", "n")}, want: []string{"remove a", "add a n"}},
			{found: []config.Worker{w("a", "n")}},
		}},
		{"an error removes none", 0, nil, []poll{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{err: broken},
			{found: []config.Worker{w("a", "m")}},
		}},
		{"missing for less than the grace time", 2 * time.Second, nil, []poll{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{}, {}, // missing since the first of these
			{found: []config.Worker{w("a", "m")}},
			{}, {},
			{want: []string{"remove a"}},
		}},
		{"deregistered meanwhile", 0, nil, []poll{
			{found: []config.Worker{w("gone", "m")}, want: []string{"add gone m"}},
			{want: []string{"remove gone"}},
			{found: []config.Worker{w("gone", "m")}, want: []string{"add gone m"}},
		}},
		{"rejected workers are tried again, others are added", 0, map[string]error{"a": config.ErrWorkerExists}, []poll{
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"reject a", "add b m"}},
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"reject a"}},
		}},
		{"after one more than are allowed no other is tried", 0, map[string]error{"b": config.ErrTooManyWorkers}, []poll{
			{found: []config.Worker{w("a", "m"), w("b", "m"), w("c", "m")}, want: []string{"add a m", "reject b"}},
			{found: []config.Worker{w("a", "m"), w("c", "m")}, want: []string{"add c m"}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				r := &recorder{rejects: tt.rejects}
				var n, polled atomic.Int32
				watch := discovery.Watch{Interval: time.Second, Grace: tt.grace, Polled: func(error) { polled.Add(1) }, Find: func(context.Context) ([]config.Worker, error) {
					l := tt.polls[n.Add(1)-1]
					return l.found, l.err
				}}
				done := make(chan error, 1)
				go func() { done <- watch.Run(ctx, r) }()
				<-time.After(time.Second / 2) // between two polls
				for i, l := range tt.polls {
					synctest.Wait()
					if got, called := int(n.Load()), int(polled.Load()); got != i+1 || called != got {
						t.Fatalf("%d polls, %d calls of Polled, want %d", got, called, i+1)
					}
					if d := cmp.Diff(l.want, r.calls()); d != "" {
						t.Fatalf("poll %d (-want +got):\n%s", i, d)
					}
					if i+1 < len(tt.polls) {
						<-time.After(time.Second)
					}
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestWatchEndsWithIngest(t *testing.T) {
	watch := discovery.Watch{Find: func(context.Context) ([]config.Worker, error) {
		return []config.Worker{{Name: "a"}}, nil
	}}
	if err := watch.Run(t.Context(), &recorder{ended: true}); err != nil {
		t.Error(err)
	}
}

// TestChangesWithoutEndArePolledAtAnInterval has a source that says a thousand times a second that it has changed.
func TestChangesWithoutEndArePolledAtAnInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const seconds = 10
		ctx, cancel := context.WithTimeout(t.Context(), seconds*time.Second)
		defer cancel()
		var polls atomic.Int32
		err := discovery.Watch{
			Find: func(context.Context) ([]config.Worker, error) { polls.Add(1); return nil, nil },
			Follow: func(ctx context.Context, changed func()) {
				for ctx.Err() == nil {
					changed()
					time.Sleep(time.Millisecond) // of the test's own clock
				}
			},
		}.Run(ctx, new(recorder))
		if n := polls.Load(); err != nil || n < 9*seconds || n > 11*seconds {
			t.Errorf("%d polls in %d s, error %v; want 10 a second", n, seconds, err)
		}
	})
}

// TestAnswersOfAnySizeAreBounded has a name with another 10,000 addresses at each poll.
func TestAnswersOfAnySizeAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const addresses, polls = 10_000, 3
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var log bytes.Buffer
		n, r := 0, &recorder{most: config.DefaultMaxWorkers}
		err := discovery.Watch{
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Find: func(context.Context) (found []config.Worker, _ error) {
				for i := range addresses {
					found = append(found, config.Worker{Name: fmt.Sprintf("10.%d.%d.%d:5557", n, i/256, i%256)})
				}
				n++
				return found, nil
			},
			Polled: func(error) {
				if n == polls {
					cancel()
				}
			},
		}.Run(ctx, r)
		if err != nil || len(r.calls()) != polls*(r.most+1)+(polls-1)*r.most || r.workers != r.most {
			t.Errorf("%d workers, error %v; want %d", r.workers, err, r.most)
		}
		if lines := strings.Count(log.String(), "level=WARN"); lines != 1 {
			t.Errorf("%d warnings, want one", lines)
		}
	})
}
