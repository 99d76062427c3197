package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// roll is the workers that there are, and what was done to them.
type roll struct {
	mu      sync.Mutex // guards done
	done    []string
	refuses map[string]error
	ended   bool
}

// take returns what was done since the last take.
func (r *roll) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	done := r.done
	r.done = nil
	return done
}

func (r *roll) AddWorker(_ context.Context, c config.Worker) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return config.ErrEnded
	}
	if err := r.refuses[c.Name]; err != nil {
		r.done = append(r.done, "refuse "+c.Name)
		return err
	}
	r.done = append(r.done, fmt.Sprintf("add %s %s", c.Name, c.Model))
	return nil
}

func (r *roll) RemoveWorker(_ context.Context, name string, why feed.RemoveReason) error {
	if why != feed.RemovedDiscovery {
		return fmt.Errorf("removed for %d", why)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = append(r.done, "remove "+name)
	if name == "gone" {
		return config.ErrNoWorker
	}
	return nil
}

func TestWatch(t *testing.T) {
	w := func(name, model string) config.Worker { return config.Worker{Name: name, Model: model} }
	broken := errors.New("broken")
	type look struct {
		found []config.Worker
		err   error
		want  []string
	}
	tests := []struct {
		name    string
		grace   time.Duration
		refuses map[string]error
		looks   []look
	}{
		{"come and go", 0, nil, []look{
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"add a m", "add b m"}},
			{found: []config.Worker{w("b", "m"), w("c", "m")}, want: []string{"remove a", "add c m"}},
			{found: []config.Worker{w("a", "m")}, want: []string{"remove b", "remove c", "add a m"}},
		}},
		{"one that changes comes anew", 0, nil, []look{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{found: []config.Worker{w("a", "n")}, want: []string{"remove a", "add a n"}},
			{found: []config.Worker{w("a", "n")}},
		}},
		{"an error costs none", 0, nil, []look{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{err: broken},
			{found: []config.Worker{w("a", "m")}},
		}},
		{"absent for less than the grace time", 2 * time.Second, nil, []look{
			{found: []config.Worker{w("a", "m")}, want: []string{"add a m"}},
			{}, {}, // missing since the first of these
			{found: []config.Worker{w("a", "m")}},
			{}, {},
			{want: []string{"remove a"}},
		}},
		{"removed by somebody else", 0, nil, []look{
			{found: []config.Worker{w("gone", "m")}, want: []string{"add gone m"}},
			{want: []string{"remove gone"}},
			{found: []config.Worker{w("gone", "m")}, want: []string{"add gone m"}},
		}},
		{"refused ones are tried again, the others added", 0, map[string]error{"a": config.ErrWorkerExists}, []look{
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"refuse a", "add b m"}},
			{found: []config.Worker{w("a", "m"), w("b", "m")}, want: []string{"refuse a"}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				r := &roll{refuses: tt.refuses}
				var n, looked atomic.Int32
				watch := discovery.Watch{Interval: time.Second, Grace: tt.grace, Looked: func() { looked.Add(1) }, Find: func(context.Context) ([]config.Worker, error) {
					l := tt.looks[n.Add(1)-1]
					return l.found, l.err
				}}
				done := make(chan error, 1)
				go func() { done <- watch.Run(ctx, r) }()
				<-time.After(time.Second / 2) // between two looks
				for i, l := range tt.looks {
					synctest.Wait()
					if got, told := int(n.Load()), int(looked.Load()); got != i+1 || told != got {
						t.Fatalf("%d looks, %d told of, want %d", got, told, i+1)
					}
					if d := cmp.Diff(l.want, r.take()); d != "" {
						t.Fatalf("look %d (-want +got):\n%s", i, d)
					}
					if i+1 < len(tt.looks) {
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
	if err := watch.Run(t.Context(), &roll{ended: true}); err != nil {
		t.Error(err)
	}
}
