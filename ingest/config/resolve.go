package config

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Resolve returns an endpoint with its host name resolved to an address, IPv4 if it has
// one. libzmq would resolve it in the thread that serves all sockets.
func Resolve(ctx context.Context, s string) (string, error) {
	e, ok := ParseEndpoint(s, true)
	if !ok {
		return "", fmt.Errorf("resolve %q: want %s", s, AllowedConnect)
	}
	if !e.named() {
		return s, nil
	}
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", e.Address)
	if err != nil {
		return "", fmt.Errorf("look up host: %w", err)
	}
	if len(addresses) == 0 {
		return "", fmt.Errorf("look up host %s: no addresses", e.Address)
	}
	for i := range addresses {
		addresses[i] = addresses[i].Unmap()
	}
	first := slices.MinFunc(addresses, func(a, b netip.Addr) int { return a.Compare(b) }) // IPv4 comes before IPv6
	e.Address = first.String()
	return e.String(), nil
}

// named reports whether the endpoint's host is a name.
func (e Endpoint) named() bool {
	if e.Transport != TransportTCP || e.Address == "*" {
		return false
	}
	_, err := netip.ParseAddr(e.Address)
	return err != nil
}
