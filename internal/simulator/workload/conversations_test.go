package workload_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/blockpool/pooltest"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/wire"
)

func newConversations(t *testing.T, cfg workload.Config, pool blockpool.Config, seed uint64) (*workload.Conversations, *blockpool.Pool) {
	t.Helper()
	p := newPool(t, pool)
	w, err := workload.NewConversations(cfg, p, seed, 0)
	if err != nil {
		t.Fatal(err)
	}
	return w, p
}

func TestSameSeedSameEvents(t *testing.T) {
	testclass.WithoutRace(t)
	cfg := workload.Config{ResetEvery: 40}
	a, poolA := newConversations(t, cfg, blockpool.Config{Capacity: 512, BlockSize: 4}, 7)
	b, _ := newConversations(t, cfg, blockpool.Config{Capacity: 512, BlockSize: 4}, 7)
	other, _ := newConversations(t, cfg, blockpool.Config{Capacity: 512, BlockSize: 4}, 8)
	differs := false
	f := pooltest.NewReplica()
	for step := range 200 {
		want := a.Step()
		if diff := cmp.Diff(want, b.Step()); diff != "" {
			t.Fatalf("step %d differs:\n%s", step, diff)
		}
		differs = differs || !cmp.Equal(want, other.Step())
		f.Apply(t, want)
		f.Check(t, poolA)
	}
	if !differs {
		t.Error("another seed gives the same events")
	}
}

// TestConversationsLookLikeAnEngine expects the shape of batches recorded from vLLM's own publisher and pool.
func TestConversationsLookLikeAnEngine(t *testing.T) {
	w, pool := newConversations(t, workload.Config{}, blockpool.Config{Capacity: 2048}, 1)
	for pool.Copies() < 2048 {
		w.Step()
	}
	const steps = 1000
	events, stores, single, prompts, twice := 0, 0, 0, 0, 0
	for range steps {
		twice = max(twice, pool.Copies()-pool.Len())
		for _, ev := range w.Step() {
			events++
			if ev.Kind != wire.KindStored {
				continue
			}
			stores++
			switch n := len(ev.BlockHashes); {
			case n == 1:
				single++
			case n >= 33:
				prompts++
			}
		}
	}
	if part := float64(single) / float64(stores); part < 0.5 || part > 0.85 {
		t.Errorf("%.2f of the stores carry one block, want about 2/3", part)
	}
	if part := float64(prompts) / float64(stores-single); part < 0.7 {
		t.Errorf("%.2f of the others carry 33 or more, want most", part)
	}
	if mean := float64(events) / steps; mean < 10 || mean > 40 {
		t.Errorf("%.1f events a step, want about 25", mean)
	}
	if twice == 0 {
		t.Error("no hash ever has two copies")
	}
	t.Logf("%.1f events a step, %.2f single, %.2f prompts, up to %d second copies",
		float64(events)/steps, float64(single)/float64(stores), float64(prompts)/float64(stores-single), twice)
}

func TestNewConversationsRejectsPromptsThatNeverFit(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  workload.Config
		pool blockpool.Config
	}{
		{"a pool of one block", workload.Config{}, blockpool.Config{Capacity: 1}},
		{"prompts longer than the pool", workload.Config{MinPrompt: 64, MaxPrompt: 64}, blockpool.Config{Capacity: 64}},
		{"min above max", workload.Config{MinPrompt: 8, MaxPrompt: 4}, blockpool.Config{}},
		{"a negative number", workload.Config{Concurrency: -1}, blockpool.Config{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := workload.NewConversations(tt.cfg, newPool(t, tt.pool), 1, 0); err == nil {
				t.Error("taken")
			}
		})
	}
	if _, err := blockpool.New(blockpool.Config{Capacity: -1}); err == nil {
		t.Error("a pool of -1 blocks was taken")
	}
}

func TestSmallPoolWorks(t *testing.T) {
	for _, capacity := range []int{3, 4, 7, 32} {
		w, pool := newConversations(t, workload.Config{}, blockpool.Config{Capacity: capacity}, 3)
		f := pooltest.NewReplica()
		for range 200 {
			f.Apply(t, w.Step())
			f.Check(t, pool)
		}
	}
}

func newPool(t rapid.TB, cfg blockpool.Config) *blockpool.Pool {
	t.Helper()
	p, err := blockpool.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
