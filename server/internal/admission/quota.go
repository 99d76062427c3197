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

// Stream acquires an instance for a stream of a client, and returns a function that releases it, or the client's error: that so many streams are open, and what to do.
func (q *Quota) Stream(ctx context.Context, what, hint string) (release func(), err error) {
	return q.Acquire(ctx, callerror.TooManyStreams, journal.Bounds{}, what+" are open", hint)
}

// Acquire acquires an instance for a call, and returns a function that releases it, or the client's error with a reason: that so many are there, and what to do.
func (q *Quota) Acquire(ctx context.Context, reason callerror.Reason, b journal.Bounds, what, hint string) (release func(), err error) {
	address := AddressOf(ctx)
	switch err := q.acquire(address); {
	case errors.Is(err, budget.ErrShare):
		return nil, callerror.New(reason, b, "%d %s from this address, which is the limit; %s", q.perAddress, what, hint)
	case err != nil:
		return nil, callerror.New(reason, b, "%d %s, which is the limit; %s", q.total.Limit(), what, hint)
	}
	return func() { q.release(address) }, nil
}

// Bytes bounds the memory of the requests of a kind in progress: in all, and by address.
type Bytes struct {
	total      *budget.Budget
	shares     *budget.Shares
	perAddress int64
}

// NewBytes returns the limits of a kind of requests, of which one takes up to largest bytes. An address may have a quarter, but always one of them.
func NewBytes(resource string, total, largest int64) *Bytes {
	b, perAddress := budget.New(resource, total), max(total/4, largest)
	return &Bytes{b, budget.NewShares(b, perAddress), perAddress}
}

// Total returns the budget of all addresses together.
func (b *Bytes) Total() *budget.Budget { return b.total }

// Reserve reserves bytes for a request, and returns a function that releases them, or else the limit that they exceed.
func (b *Bytes) Reserve(ctx context.Context, n int64) (release func(), exceeded int64) {
	address := AddressOf(ctx)
	switch err := b.shares.Reserve(address, n); {
	case errors.Is(err, budget.ErrShare):
		return nil, b.perAddress
	case err != nil:
		return nil, b.total.Limit()
	}
	return func() { b.shares.Release(address, n) }, 0
}
