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

	used    atomic.Int64
	refused atomic.Uint64
}

// New returns a budget. Its name is the label of its metrics and contains the unit, such as
// blocks or filter_bytes. A limit of 0 or less means no limit.
func New(name string, limit int64) *Budget { return &Budget{name: name, limit: limit} }

// Reserve reserves n units unless that exceeds the limit, and reports whether it did. n must not
// be negative.
func (b *Budget) Reserve(n int64) bool {
	if b == nil {
		return true
	}
	for {
		used := b.used.Load()
		if b.limit > 0 && n > b.limit-used {
			b.refuse()
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// refuse counts a refusal.
func (b *Budget) refuse() {
	if b != nil {
		b.refused.Add(1)
	}
}

// Release returns n reserved units.
func (b *Budget) Release(n int64) {
	if b != nil {
		b.used.Add(-n)
	}
}

// Adjust adds n units, which may be negative, to those reserved, even beyond the limit. It is for
// state that is recovered, whose units were reserved before, and for units that are owed.
func (b *Budget) Adjust(n int64) {
	if b != nil {
		b.used.Add(n)
	}
}

// Full reports whether the limit is reached.
func (b *Budget) Full() bool { return b != nil && b.limit > 0 && b.used.Load() >= b.limit }

// Room returns how many units can be reserved: at least 0.
func (b *Budget) Room() int64 {
	if b == nil || b.limit <= 0 {
		return math.MaxInt64
	}
	return max(0, b.limit-b.used.Load())
}

// Excess returns how many units are reserved beyond the limit: see Adjust.
func (b *Budget) Excess() int64 {
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

// Limit returns the limit; 0 if there is none.
func (b *Budget) Limit() int64 {
	if b == nil {
		return 0
	}
	return max(b.limit, 0)
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
