package budget_test

import (
	"net/netip"
	"testing"

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
