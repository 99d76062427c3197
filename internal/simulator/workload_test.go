package simulator_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

func newWorkload(t *testing.T, cfg simulator.WorkloadConfig, pool simulator.PoolConfig, seed uint64) (*simulator.Workload, *simulator.Pool) {
	t.Helper()
	p := newPool(t, pool)
	w, err := simulator.NewWorkload(cfg, p, seed)
	if err != nil {
		t.Fatal(err)
	}
	return w, p
}

func TestSameSeedSameEvents(t *testing.T) {
	cfg := simulator.WorkloadConfig{ResetEvery: 40}
	a, poolA := newWorkload(t, cfg, simulator.PoolConfig{Capacity: 512, BlockSize: 4}, 7)
	b, _ := newWorkload(t, cfg, simulator.PoolConfig{Capacity: 512, BlockSize: 4}, 7)
	other, _ := newWorkload(t, cfg, simulator.PoolConfig{Capacity: 512, BlockSize: 4}, 8)
	differs := false
	f := newFollower()
	for step := range 200 {
		want := a.Step()
		if diff := cmp.Diff(want, b.Step()); diff != "" {
			t.Fatalf("step %d differs:\n%s", step, diff)
		}
		differs = differs || !cmp.Equal(want, other.Step())
		f.apply(t, want)
		f.equal(t, poolA)
	}
	if !differs {
		t.Error("another seed gives the same events")
	}
}

// The shape is that of batches recorded from vLLM's own publisher and pool.
func TestWorkloadLooksLikeAnEngine(t *testing.T) {
	w, pool := newWorkload(t, simulator.WorkloadConfig{}, simulator.PoolConfig{Capacity: 2048}, 1)
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

func TestWorkloadRefusesWhatNeverFits(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  simulator.WorkloadConfig
		pool simulator.PoolConfig
	}{
		{"a pool of one block", simulator.WorkloadConfig{}, simulator.PoolConfig{Capacity: 1}},
		{"prompts longer than the pool", simulator.WorkloadConfig{MinPrompt: 64, MaxPrompt: 64}, simulator.PoolConfig{Capacity: 64}},
		{"min above max", simulator.WorkloadConfig{MinPrompt: 8, MaxPrompt: 4}, simulator.PoolConfig{}},
		{"a negative number", simulator.WorkloadConfig{Concurrency: -1}, simulator.PoolConfig{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := simulator.NewWorkload(tt.cfg, newPool(t, tt.pool), 1); err == nil {
				t.Error("taken")
			}
		})
	}
	if _, err := simulator.NewPool(simulator.PoolConfig{Capacity: -1}); err == nil {
		t.Error("a pool of -1 blocks was taken")
	}
}

func TestASmallPoolStillWorks(t *testing.T) {
	for _, capacity := range []int{3, 4, 7, 32} {
		w, pool := newWorkload(t, simulator.WorkloadConfig{}, simulator.PoolConfig{Capacity: capacity}, 3)
		f := newFollower()
		for range 200 {
			f.apply(t, w.Step())
			f.equal(t, pool)
		}
	}
}
