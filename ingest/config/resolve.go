package config

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Resolve returns an endpoint with its host name resolved to an address, preferably IPv4. libzmq would resolve the name in the thread that
// serves all sockets. The endpoint of a gRPC server keeps its name, which its calls have as their authority.
func Resolve(ctx context.Context, s string) (string, error) {
	if e, ok := ParseSource(s); ok && e.Called() {
		return s, nil
	}
	e, ok := ParseEndpoint(s, true)
	if !ok {
		return "", fmt.Errorf("resolve %q: want %s", s, AllowedSource)
	}
	if _, err := netip.ParseAddr(e.Address); err == nil || e.Transport != TransportTCP || e.Address == "*" {
		return s, nil
	}
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", e.Address) // at least one
	if err != nil {
		return "", fmt.Errorf("look up host: %w", err)
	}
	for i := range addresses {
		addresses[i] = addresses[i].Unmap()
	}
	e.Address = slices.MinFunc(addresses, netip.Addr.Compare).String() // IPv4 is less than IPv6
	return e.String(), nil
}
