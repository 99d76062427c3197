// Package budget bounds how much of one resource all peers of the process use together, and how much of it each address.
//
// A component calls Reserve before it allocates for a peer, and Release when it frees. Reserve
// refuses an amount that exceeds the limit; earlier reservations remain.
package budget

import (
	"math"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Budget is a bounded amount of one resource. The zero value and nil have no limit. A Budget is
// safe for concurrent use.
type Budget struct {
	name  string
	limit int64
	whole *Budget // of which this is the part of an address, see Parts; nil for a budget of its own

	used    atomic.Int64
	refused atomic.Uint64
}

// New returns a budget. Its name is the label of its metrics and contains the unit, such as
// blocks or filter_bytes. A limit of 0 or less means no limit.
func New(name string, limit int64) *Budget { return &Budget{name: name, limit: limit} }

// Reserve reserves n units unless that exceeds the limit, and reports whether it did. n must not
// be negative.
func (b *Budget) Reserve(n int64) bool {
	switch {
	case b == nil:
		return true
	case b.whole == nil:
		return b.reserve(n, b.limit)
	}
	used := b.used.Add(n)
	if !b.whole.reserve(n, b.limitAt(used)) {
		b.used.Add(-n)
		return false
	}
	return true
}

// reserve reserves n units unless a limit is exceeded. A limit of 0 or less means no limit.
func (b *Budget) reserve(n, limit int64) bool {
	for {
		used := b.used.Load()
		if limit > 0 && n > limit-used {
			b.refuse()
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// limitAt returns the limit of the whole budget for a part that uses some of it.
func (b *Budget) limitAt(used int64) int64 {
	if b.whole.limit <= 0 {
		return 0
	}
	return max(1, b.whole.limit-used/leftShare)
}

// refuse counts a refusal.
func (b *Budget) refuse() {
	if b != nil {
		b.refused.Add(1)
	}
}

// Release returns n reserved units.
func (b *Budget) Release(n int64) { b.Adjust(-n) }

// Adjust adds n units, which may be negative, to those reserved, even beyond the limit. It is for
// state that is recovered, whose units were reserved before, and for units that are owed.
func (b *Budget) Adjust(n int64) {
	if b == nil {
		return
	}
	b.used.Add(n)
	if b.whole != nil {
		b.whole.used.Add(n)
	}
}

// MoveTo makes n reserved units those of another part of the same budget.
func (b *Budget) MoveTo(other *Budget, n int64) {
	if b != other {
		b.Adjust(-n)
		other.Adjust(n)
	}
}

// Full reports whether no unit can be reserved.
func (b *Budget) Full() bool { return b.Room() == 0 }

// Room returns how many units can be reserved: at least 0.
func (b *Budget) Room() int64 {
	switch {
	case b == nil || b.Limit() == 0:
		return math.MaxInt64
	case b.whole == nil:
		return max(0, b.limit-b.used.Load())
	default:
		return max(0, b.limitAt(b.used.Load()+1)-b.whole.used.Load())
	}
}

// IsLargePart reports whether a budget is the part of an address that uses an eighth or more of the whole budget.
func (b *Budget) IsLargePart() bool {
	return b != nil && b.whole != nil && b.whole.limit > 0 && b.used.Load() >= b.whole.limit/(leftShare+1)
}

// Excess returns how many units of the whole budget are reserved beyond the limit: see Adjust.
func (b *Budget) Excess() int64 {
	if b != nil && b.whole != nil {
		b = b.whole
	}
	if b == nil || b.limit <= 0 {
		return 0
	}
	return max(0, b.used.Load()-b.limit)
}

// Used returns the number of reserved units.
func (b *Budget) Used() int64 {
	if b == nil {
		return 0
	}
	return b.used.Load()
}

// Limit returns the limit of the whole budget; 0 if there is none.
func (b *Budget) Limit() int64 {
	switch {
	case b == nil:
		return 0
	case b.whole != nil:
		return b.whole.Limit()
	default:
		return max(b.limit, 0)
	}
}

// Collector exports budgets as metrics.
type Collector []*Budget

// Describe implements prometheus.Collector.
func (c Collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector. The resource is a constant label, so that several collectors can
// share a registry.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	for _, b := range c {
		metric := func(name, help string, kind prometheus.ValueType, value float64) {
			desc := prometheus.NewDesc("kvcast_budget_"+name, help, nil, prometheus.Labels{"resource": b.name})
			ch <- prometheus.MustNewConstMetric(desc, kind, value)
		}
		metric("used", "Amount of a bounded resource in use, by resource. Resources whose name ends in bytes are in bytes.",
			prometheus.GaugeValue, float64(b.Used()))
		metric("limit", "Bound of a resource over the whole process, by resource.",
			prometheus.GaugeValue, float64(b.Limit()))
		metric("refused_total", "Requests for a resource that were refused because its bound was reached, by resource.",
			prometheus.CounterValue, float64(b.refused.Load()))
	}
}
