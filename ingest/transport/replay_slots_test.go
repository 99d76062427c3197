package transport

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A transfer that lasts long yields once others wait, and not before.
func TestLongTransferYieldsToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRequests(nil, time.Hour, InboxConfig{}, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
		var all []*exchange
		for range maxTransfers {
			slot, err := r.acquire(t.Context(), r.transfers, 0, nil)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, &exchange{Requests: r, slot: slot, since: time.Now()})
		}
		<-time.After(2 * transferShare)
		if all[0].yields() {
			t.Error("a transfer yields though nobody waits")
		}
		var took time.Duration
		done := make(chan error, 1)
		go func() {
			slot, err := r.acquire(t.Context(), r.transfers, time.Hour, func(d time.Duration) { took = d })
			slot.release()
			done <- err
		}()
		synctest.Wait()
		if !all[0].yields() {
			t.Error("a long transfer does not yield to who waits")
		}
		all[0].since = time.Now()
		if all[0].yields() {
			t.Error("a transfer that has just begun yields")
		}
		<-time.After(time.Second)
		all[0].slot.release()
		if err := <-done; err != nil || took != time.Second {
			t.Errorf("acquire: %v after %v, want a slot after 1s", err, took)
		}
	})
}

// Waiting for a slot is bounded by the request's timeout and by its context.
func TestWaitingForAReplaySlotIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRequests(nil, time.Hour, InboxConfig{}, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
		for range maxFirstRequests {
			if _, err := r.acquire(t.Context(), r.first, 0, nil); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		if _, err := r.acquire(t.Context(), r.first, slotPatience, nil); !errors.Is(err, ErrReplayBusy) {
			t.Errorf("acquire without a free slot: %v", err)
		}
		if d := time.Since(began); d != slotPatience {
			t.Errorf("it took %v, want %v", d, slotPatience)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.acquire(ctx, r.first, time.Hour, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("acquire with a context that is done: %v", err)
		}
		if _, err := r.acquire(t.Context(), r.transfers, 0, nil); err != nil {
			t.Errorf("acquire of the other kind: %v", err)
		}
	})
}
