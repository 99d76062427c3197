package budget_test

import (
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvcast/kvcast/internal/budget"
)

func TestReserveStopsAtTheLimit(t *testing.T) {
	b := budget.New("things", 10)
	if !b.Reserve(4) || !b.Reserve(6) {
		t.Fatal("Reserve refused 10 of 10")
	}
	if b.Reserve(1) {
		t.Error("Reserve granted 11 of 10")
	}
	if b.Reserve(0); b.Used() != 10 {
		t.Errorf("Used() = %d after a refusal, want 10", b.Used())
	}
	b.Release(6)
	if !b.Reserve(5) {
		t.Error("Reserve refused released units")
	}
}

func TestAdjustExceedsTheLimit(t *testing.T) {
	b := budget.New("things", 10)
	b.Adjust(15)
	if b.Used() != 15 || b.Reserve(1) || !b.Full() {
		t.Errorf("after adding 15 of 10: got %d used, want 15 and no more", b.Used())
	}
	if b.Adjust(-6); b.Used() != 9 || !b.Reserve(1) {
		t.Errorf("after subtracting 6: got %d used, want 9 and one more", b.Used())
	}
}

func TestBudgetWithoutLimitGrantsEverything(t *testing.T) {
	for _, b := range []*budget.Budget{nil, new(budget.Budget), budget.New("things", 0)} {
		if !b.Reserve(1 << 60) {
			t.Errorf("%v: Reserve refused", b)
		}
		b.Release(1 << 60)
		b.Adjust(0)
		if b.Used() != 0 || b.Limit() != 0 {
			t.Errorf("Used() = %d, Limit() = %d, want 0, 0", b.Used(), b.Limit())
		}
	}
}

func TestConcurrentReservationsNeverExceedTheLimit(t *testing.T) {
	const limit = 100
	b := budget.New("things", limit)
	var group sync.WaitGroup
	granted := make([]int64, 8)
	for i := range granted {
		group.Go(func() {
			for range 1000 {
				if b.Reserve(3) {
					granted[i] += 3
				}
			}
		})
	}
	group.Wait()
	var all int64
	for _, n := range granted {
		all += n
	}
	if all > limit || all != b.Used() {
		t.Errorf("granted %d of %d, Used() = %d", all, limit, b.Used())
	}
}

func TestCollectorsShareTheMetricNamesInARegistry(t *testing.T) {
	r := prometheus.NewRegistry()
	blocks, ranks := budget.New("blocks", 5), budget.New("ranks", 2)
	r.MustRegister(budget.Collector{blocks})
	r.MustRegister(budget.Collector{ranks})
	blocks.Reserve(3)
	blocks.Reserve(3)
	want := `
# HELP kvcast_budget_refused_total Requests for a resource that were refused because its bound was reached, by resource.
# TYPE kvcast_budget_refused_total counter
kvcast_budget_refused_total{resource="blocks"} 1
kvcast_budget_refused_total{resource="ranks"} 0
# HELP kvcast_budget_used Amount of a bounded resource in use, by resource. Resources whose name ends in bytes are in bytes.
# TYPE kvcast_budget_used gauge
kvcast_budget_used{resource="blocks"} 3
kvcast_budget_used{resource="ranks"} 0
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want), "kvcast_budget_used", "kvcast_budget_refused_total"); err != nil {
		t.Error(err)
	}
}

func TestRoomAndExcess(t *testing.T) {
	b := budget.New("blocks", 4)
	for _, c := range []struct{ add, room, excess int64 }{{0, 4, 0}, {3, 1, 0}, {1, 0, 0}, {5, 0, 5}, {-6, 1, 0}} {
		if b.Adjust(c.add); b.Room() != c.room || b.Excess() != c.excess {
			t.Errorf("after %+d: room %d and excess %d, want %d and %d", c.add, b.Room(), b.Excess(), c.room, c.excess)
		}
	}
	for _, none := range []*budget.Budget{nil, budget.New("none", 0)} {
		if none.Adjust(9); none.Room() != math.MaxInt64 || none.Excess() != 0 {
			t.Errorf("without a limit: room %d and excess %d", none.Room(), none.Excess())
		}
	}
}
