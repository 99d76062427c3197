package transport

import (
	"context"
	"errors"
	"net/netip"
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
			x := &exchange{Requests: r, of: &r.engines, since: time.Now(), bytes: 1 << 30}
			if err := x.acquire(t.Context(), r.engines.transfers, 0); err != nil {
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
			err := x.acquire(t.Context(), r.engines.transfers, time.Hour)
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
			if err := acquire(t.Context(), r.engines.first, 0); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		if err := acquire(t.Context(), r.engines.first, slotPatience); !errors.Is(err, ErrReplayBusy) {
			t.Errorf("acquire without a free slot: %v", err)
		}
		if d := time.Since(began); d != slotPatience {
			t.Errorf("it took %v, want %v", d, slotPatience)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := acquire(ctx, r.engines.first, time.Hour); !errors.Is(err, context.Canceled) {
			t.Errorf("acquire with a context that is done: %v", err)
		}
		if err := acquire(t.Context(), r.engines.transfers, 0); err != nil {
			t.Errorf("acquire of the other kind: %v", err)
		}
	})
}

// Requests to sockets that peers name leave the slots of engines free, and those of one address do not delay those of another.
func TestReplaySlotsAreSharedByAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewRequests(nil, time.Hour, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
		attacker, honest := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32")
		var order []netip.Prefix
		acquire := func(peer netip.Prefix) *exchange {
			x := &exchange{Requests: r, Request: Request{Peer: peer}, of: &r.peers}
			go func() {
				if x.acquire(t.Context(), r.peers.transfers, time.Hour) == nil { // some wait until the end
					x.since = time.Now()
					order = append(order, peer)
				}
			}()
			synctest.Wait()
			return x
		}
		slow := acquire(attacker)
		fast := acquire(attacker)
		for range maxTransfers - 2 + 5 { // 5 wait
			acquire(attacker)
		}
		<-time.After(slowShare)
		fast.bytes = minTransferRate
		if !slow.mustYield() || fast.mustYield() {
			t.Errorf("a slow transfer yields to another of its address: %v, a fast one: %v, want true and false", slow.mustYield(), fast.mustYield())
		}
		last := acquire(honest)
		if len(order) != maxTransfers {
			t.Fatalf("%d requests have slots, want %d", len(order), maxTransfers)
		}
		slow.release()
		synctest.Wait()
		if order[len(order)-1] != honest {
			t.Error("a request waits behind others of an address with more slots")
		}
		if err := (&exchange{Requests: r, of: &r.engines}).acquire(t.Context(), r.engines.transfers, 0); err != nil {
			t.Errorf("an engine that kvcast connects to waits for peers: %v", err)
		}
		last.release()
	})
}
