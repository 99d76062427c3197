package admission

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/journal"
)

// wantLimiter checks the numbers of used slots and of Waiting callers.
func wantLimiter(t *testing.T, l *Limiter, inUse, waiting int) {
	t.Helper()
	if gotInUse, gotWaiting := l.InUse(), l.Waiting(); gotInUse != inUse || gotWaiting != waiting {
		t.Errorf("got %d slots in use and %d waiting, want %d and %d", gotInUse, gotWaiting, inUse, waiting)
	}
}

// TestLimiterIsFIFO queues five callers for two slots. One of the callers is canceled.
func TestLimiterIsFIFO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(2, 2, 5, time.Minute)
		for range 2 {
			if err := l.Acquire(t.Context(), netip.Prefix{}); err != nil {
				t.Fatal(err)
			}
		}
		canceled, cancel := context.WithCancel(t.Context())
		acquired := make(chan int, 5)
		failed := make(chan error, 1)
		for n := range 5 {
			go func() {
				ctx := t.Context()
				if n == 1 {
					ctx = canceled
				}
				if err := l.Acquire(ctx, netip.Prefix{}); err != nil {
					failed <- err
					return
				}
				acquired <- n
			}()
			synctest.Wait()
		}
		wantLimiter(t, l, 2, 5)
		if err := l.Acquire(t.Context(), netip.Prefix{}); !errors.Is(err, budget.ErrWaiting) {
			t.Errorf("with a full queue: got %v, want %v", err, budget.ErrWaiting)
		}
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("canceled: got %v", err)
		}
		for _, want := range []int{0, 2, 3, 4} {
			l.Release(netip.Prefix{})
			synctest.Wait()
			if n := <-acquired; n != want {
				t.Errorf("caller %d acquired a slot, want %d", n, want)
			}
		}
		wantLimiter(t, l, 2, 0)
		l.Release(netip.Prefix{})
		l.Release(netip.Prefix{})
		wantLimiter(t, l, 0, 0)
	})
}

func TestLimiterWaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1, 1, 1, time.Minute)
		if err := l.Acquire(t.Context(), netip.Prefix{}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := l.Acquire(t.Context(), netip.Prefix{}); !errors.Is(err, errWaitTimeout) || time.Since(start) != time.Minute {
			t.Errorf("after %v: got %v, want %v after a minute", time.Since(start), err, errWaitTimeout)
		}
		cause := errors.New("stopped")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if err := l.Acquire(ctx, netip.Prefix{}); !errors.Is(err, cause) {
			t.Errorf("canceled: got %v, want %v", err, cause)
		}
		wantLimiter(t, l, 1, 0)
	})
}

// TestLimiterGrantsFreeSlotAfterSuspension has expired timers, as after a suspension of the process.
func TestLimiterGrantsFreeSlotAfterSuspension(t *testing.T) {
	t.Parallel()
	for range 20 {
		q := NewQueries(promauto.With(nil), "lookup", 1, 1, 64)
		q.maxWait = 1
		release, err := q.Acquire(t.Context(), journal.Bounds{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.Acquire(t.Context(), journal.Bounds{}); err == nil {
			t.Fatal("two queries acquired the same slot")
		}
		release()
		wantLimiter(t, q.Limiter, 0, 0)
	}
}

func TestQuotaLimitsEachAddressAndTotal(t *testing.T) {
	t.Parallel()
	q := NewQuota(promauto.With(nil), "things", 3, 2)
	a, b := netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("192.0.2.2/32")
	for i, step := range []struct {
		address netip.Prefix
		want    error
	}{{a, nil}, {a, nil}, {a, budget.ErrShare}, {b, nil}, {b, budget.ErrTotal}} {
		if err := q.acquire(step.address); !errors.Is(err, step.want) {
			t.Errorf("step %d: got %v, want %v", i, err, step.want)
		}
	}
	q.release(a)
	if err := q.acquire(b); err != nil {
		t.Errorf("after a release: got %v", err)
	}
	if q.Total().Used() != 3 {
		t.Errorf("%d in total, want 3", q.Total().Used())
	}
}
