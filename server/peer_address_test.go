package server

import (
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestPeersAreToldApartByTheirAddress has an IPv6 address stand for its /64, and one
// that is an IPv4 address in disguise for that.
func TestPeersAreToldApartByTheirAddress(t *testing.T) {
	for _, tt := range []struct{ address, want string }{
		{"10.0.0.7:1", "10.0.0.7/32"},
		{"[::ffff:10.0.0.7]:2", "10.0.0.7/32"},
		{"[2001:db8:1:2:3:4:5:6]:3", "2001:db8:1:2::/64"},
		{"[2001:db8:1:2:ffff::1]:4", "2001:db8:1:2::/64"},
		{"[2001:db8:1:3::1]:5", "2001:db8:1:3::/64"},
		{"[fe80::1%eth0]:6", "fe80::/64"},
		{"[::1]:7", "::/64"},
	} {
		if got := peerPrefix(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(tt.address))); got.String() != tt.want {
			t.Errorf("%s: got %v, want %s", tt.address, got, tt.want)
		}
	}
	for _, a := range []net.Addr{nil, &net.TCPAddr{}, &net.UnixAddr{Name: "s"}} {
		if got := peerPrefix(a); got != (netip.Prefix{}) {
			t.Errorf("%v: got %v, want none", a, got)
		}
	}
}

func TestQuotaBoundsOneAddressAndAll(t *testing.T) {
	q := newQuota("things", 3, 2)
	var a, b atomic.Int64
	for i, step := range []struct {
		of   *atomic.Int64
		want error
	}{{&a, nil}, {&a, nil}, {&a, errAddressShare}, {&b, nil}, {&b, errAllTaken}} {
		if err := q.take(step.of); !errors.Is(err, step.want) {
			t.Errorf("step %d: got %v, want %v", i, err, step.want)
		}
	}
	q.release(&a)
	if err := q.take(&b); err != nil {
		t.Errorf("what was released: got %v", err)
	}
	if a.Load() != 1 || b.Load() != 2 || q.all.Used() != 3 {
		t.Errorf("held: %d and %d, %d in all, want 1, 2, 3", a.Load(), b.Load(), q.all.Used())
	}
}

func TestLogThrottleTellsWhatItHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l logThrottle
		lines := func(n int) (logged, heldBack int) {
			for range n {
				if held, ok := l.line(); ok {
					logged++
					heldBack += held
				}
			}
			return logged, heldBack
		}
		if logged, held := lines(throttleLines + 5); logged != throttleLines || held != 0 {
			t.Errorf("at first: %d lines, %d held back", logged, held)
		}
		<-time.After(throttleTime)
		if logged, held := lines(2); logged != 2 || held != 5 {
			t.Errorf("later: %d lines, %d held back, want 2 and 5", logged, held)
		}
	})
}
