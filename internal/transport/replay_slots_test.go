package transport

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A transfer that has used its share yields only if others wait.
func TestLongTransferYieldsToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRequests(nil, time.Hour, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
		var all []*exchange
		for range maxTransfers {
			x := &exchange{Requests: r, since: time.Now()}
			if err := x.acquire(t.Context(), r.transfers, 0); err != nil {
				t.Fatal(err)
			}
			all = append(all, x)
		}
		<-time.After(2 * transferShare)
		if all[0].mustYield() {
			t.Error("a transfer yields although no other waits")
		}
		var took time.Duration
		done := make(chan error, 1)
		go func() {
			x := &exchange{Requests: r, Request: Request{Waited: func(d time.Duration) { took = d }}}
			err := x.acquire(t.Context(), r.transfers, time.Hour)
			x.release()
			done <- err
		}()
		synctest.Wait()
		if !all[0].mustYield() {
			t.Error("a long transfer does not yield to a waiting one")
		}
		all[0].since = time.Now()
		if all[0].mustYield() {
			t.Error("a transfer that has just begun yields")
		}
		<-time.After(time.Second)
		all[0].release()
		if err := <-done; err != nil || took != time.Second {
			t.Errorf("acquire: %v after %v, want a slot after 1s", err, took)
		}
	})
}

// Waiting for a slot ends with the request's patience or its context.
func TestWaitingForAReplaySlotIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRequests(nil, time.Hour, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
		acquire := func(ctx context.Context, s *slots, patience time.Duration) error {
			return (&exchange{Requests: r}).acquire(ctx, s, patience)
		}
		for range maxFirstRequests {
			if err := acquire(t.Context(), r.first, 0); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		if err := acquire(t.Context(), r.first, slotPatience); !errors.Is(err, ErrReplayBusy) {
			t.Errorf("acquire without a free slot: %v", err)
		}
		if d := time.Since(began); d != slotPatience {
			t.Errorf("it took %v, want %v", d, slotPatience)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := acquire(ctx, r.first, time.Hour); !errors.Is(err, context.Canceled) {
			t.Errorf("acquire with a context that is done: %v", err)
		}
		if err := acquire(t.Context(), r.transfers, 0); err != nil {
			t.Errorf("acquire of the other kind: %v", err)
		}
	})
}
