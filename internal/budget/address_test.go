package budget_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/budget"
)

func TestAddressOf(t *testing.T) {
	for ip, want := range map[string]string{
		"192.0.2.1": "192.0.2.1/32", "::ffff:192.0.2.1": "192.0.2.1/32", "2001:db8::1": "2001:db8::/64", "fe80::1%eth0": "fe80::/64",
	} {
		if got := budget.AddressOf(netip.MustParseAddr(ip)); got.String() != want {
			t.Errorf("%s: got %v, want %s", ip, got, want)
		}
	}
	if got := budget.AddressOf(netip.Addr{}); got != (netip.Prefix{}) {
		t.Errorf("no address: got %v", got)
	}
}

func TestPeerOf(t *testing.T) {
	for _, tt := range []struct{ address, want string }{
		{"10.0.0.7:1", "10.0.0.7/32"},
		{"[::ffff:10.0.0.7]:2", "10.0.0.7/32"},
		{"[2001:db8:1:2:3:4:5:6]:3", "2001:db8:1:2::/64"},
		{"[2001:db8:1:2:ffff::1]:4", "2001:db8:1:2::/64"},
		{"[2001:db8:1:3::1]:5", "2001:db8:1:3::/64"},
		{"[fe80::1%eth0]:6", "fe80::/64"},
		{"[::1]:7", "::/64"},
	} {
		if got := budget.PeerOf(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(tt.address))); got.String() != tt.want {
			t.Errorf("%s: got %v, want %s", tt.address, got, tt.want)
		}
	}
	for _, a := range []net.Addr{nil, &net.TCPAddr{}, &net.UnixAddr{Name: "s"}} {
		if got := budget.PeerOf(a); got != (netip.Prefix{}) {
			t.Errorf("%v: got %v, want none", a, got)
		}
	}
}

func TestAddressesHaveShares(t *testing.T) {
	total := budget.New("things", 10)
	shares := budget.NewShares(total, 6)
	address := func(ip string) netip.Prefix { return budget.AddressOf(netip.MustParseAddr(ip)) }
	a, b, c := address("192.0.2.1"), address("192.0.2.2"), address("192.0.2.3")
	for _, tt := range []struct {
		address netip.Prefix
		n       int64
		want    error
	}{
		{a, 7, budget.ErrShare}, {a, 6, nil}, {a, 1, budget.ErrShare}, {b, 5, budget.ErrTotal}, {b, 3, nil}, {c, 1, nil}, {c, 1, budget.ErrTotal},
	} {
		if err := shares.Reserve(tt.address, tt.n); !errors.Is(err, tt.want) {
			t.Errorf("%v reserves %d: got %v, want %v", tt.address, tt.n, err, tt.want)
		}
	}
	shares.Release(a, 6)
	if err := shares.Reserve(a, 6); err != nil || total.Used() != 10 {
		t.Errorf("after a release: got %v, and %d used", err, total.Used())
	}
}

// TestAcquireWaitsInOrder has one address that uses its share while others wait for the budget.
func TestAcquireWaitsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		total := budget.New("units", 2)
		shares := budget.NewShares(total, 1)
		a, b, c := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("10.0.0.3/32")
		var order []string
		acquire := func(ctx context.Context, name string, address netip.Prefix) {
			go func() {
				err := shares.Acquire(ctx, address, 1)
				order = append(order, fmt.Sprint(name, " ", err))
			}()
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		acquire(t.Context(), "a1", a)
		acquire(t.Context(), "a2", a) // waits for its share
		acquire(t.Context(), "b1", b)
		acquire(ctx, "c1", c)         // waits for the budget
		acquire(t.Context(), "c2", c) // waits behind c1
		cancel()
		synctest.Wait()
		shares.Release(b, 1)
		synctest.Wait()
		shares.Release(a, 1)
		synctest.Wait()
		if diff := cmp.Diff([]string{"a1 <nil>", "b1 <nil>", "c1 context canceled", "c2 <nil>", "a2 <nil>"}, order); diff != "" {
			t.Errorf("order (-want +got):\n%s", diff)
		}
		shares.Release(a, 1)
		shares.Release(c, 1)
		if total.Used() != 0 || shares.Full(a) {
			t.Errorf("%d units stay reserved", total.Used())
		}
	})
}

// TestAddressesTakeTurns has an address that always waits. Another one gets every second unit, and its calls displace those of the first from the queue.
func TestAddressesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const waiting = 4
		shares := budget.NewShares(budget.New("units", 1), 1).LimitWaiting(waiting)
		many, few := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32")
		var order []string
		acquire := func(name string, address netip.Prefix) {
			go func() {
				if err := shares.Acquire(t.Context(), address, 1); err != nil {
					name += " refused"
				}
				order = append(order, name)
			}()
			synctest.Wait()
		}
		for i := range waiting + 2 { // one runs, and one finds the queue full
			acquire(fmt.Sprint("many ", i), many)
		}
		acquire("few 0", few)
		acquire("few 1", few)
		for _, address := range []netip.Prefix{many, many, few, many, few} {
			shares.Release(address, 1)
			synctest.Wait()
		}
		want := []string{"many 0", "many 5 refused", "many 4 refused", "many 3 refused", "many 1", "few 0", "many 2", "few 1"}
		if diff := cmp.Diff(want, order); diff != "" {
			t.Errorf("order (-want +got):\n%s", diff)
		}
		if shares.Waiting() != 0 || !shares.TryAcquire(few, 1) || shares.TryAcquire(many, 1) {
			t.Error("after the last release, one unit is free")
		}
	})
}
