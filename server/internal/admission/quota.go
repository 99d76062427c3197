package admission

import (
	"context"
	"errors"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// Quota bounds how many instances of a resource one client address uses, and all addresses together.
type Quota struct {
	total          *budget.Budget
	shares         *budget.Shares
	perAddress     int
	addressRefused prometheus.Counter // refusals because of perAddress; total counts its own
}

// NewQuota returns the quota of a resource, with its metrics.
func NewQuota(metrics promauto.Factory, resource string, total, perAddress int) *Quota {
	b := budget.New(resource, int64(total))
	return &Quota{
		total: b, shares: budget.NewShares(b, int64(perAddress)), perAddress: perAddress,
		addressRefused: metrics.NewCounter(prometheus.CounterOpts{
			Name:        "address_refused_total",
			Help:        "Requests for a resource that were refused because the quota of the client's address was used up, by resource.",
			ConstLabels: prometheus.Labels{"resource": resource},
		}),
	}
}

// Total returns the budget of all addresses together.
func (q *Quota) Total() *budget.Budget { return q.total }

// acquire acquires one instance for an address. The error is one of package budget.
func (q *Quota) acquire(address netip.Prefix) error {
	err := q.shares.Reserve(address, 1)
	if errors.Is(err, budget.ErrShare) {
		q.addressRefused.Inc()
	}
	return err
}

func (q *Quota) release(address netip.Prefix) { q.shares.Release(address, 1) }

// Stream acquires an instance for a stream of a client, and returns a function that releases it, or the client's error: what there is too
// much of, and what to do.
func (q *Quota) Stream(ctx context.Context, what, hint string) (release func(), err error) {
	address := connectionOf(ctx).peer.prefix
	switch err := q.acquire(address); {
	case errors.Is(err, budget.ErrShare):
		return nil, callerror.New(callerror.TooManyStreams, journal.Bounds{}, "%d %s are open from this address, which is the limit; %s", q.perAddress, what, hint)
	case err != nil:
		return nil, callerror.New(callerror.TooManyStreams, journal.Bounds{}, "%d %s are open, which is the limit; %s", q.total.Limit(), what, hint)
	}
	return func() { q.release(address) }, nil
}
