package budget

import "net/netip"

// AddressOf returns the prefix that limits by address count: an IPv4 address, or the /64 of an IPv6
// address, since one host usually has a whole /64. All invalid addresses share the zero prefix.
func AddressOf(ip netip.Addr) netip.Prefix {
	ip = ip.Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	prefix, _ := ip.Prefix(bits) // the zero prefix if the address is invalid
	return prefix
}
