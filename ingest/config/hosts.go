package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Hosts is a set of hosts that kvcast may connect to at a peer's request. The zero value is the empty set.
type Hosts struct {
	prefixes []netip.Prefix
	names    map[string]struct{}
	suffixes []string // of names, each with a leading dot
}

const allowedHosts = "an IP address, a CIDR such as 10.0.0.0/8, a name, or *.DOMAIN for all names in it"

// ParseHosts parses hosts: each is an IP address, a CIDR, a host name, or *.DOMAIN for all names that
// end in .DOMAIN. The error names the first invalid host.
func ParseHosts(hosts []string) (Hosts, error) {
	h := Hosts{names: make(map[string]struct{})}
	for _, s := range hosts {
		if !h.add(s) {
			return Hosts{}, fmt.Errorf("%q is not allowed: want %s", s, allowedHosts)
		}
	}
	return h, nil
}

func (h *Hosts) add(s string) bool {
	if p, err := netip.ParsePrefix(s); err == nil {
		h.prefixes = append(h.prefixes, p.Masked())
		return true
	}
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap()
		h.prefixes = append(h.prefixes, netip.PrefixFrom(a, a.BitLen()))
		return true
	}
	name := canonicalHost(s)
	domain, wildcard := strings.CutPrefix(name, "*")
	plain := strings.TrimPrefix(domain, ".")
	_, err := netip.ParseAddr(plain)
	if isAddress := err == nil; isAddress || !ValidHost(plain) || wildcard != strings.HasPrefix(domain, ".") {
		return false
	}
	if wildcard {
		h.suffixes = append(h.suffixes, domain)
	} else {
		h.names[name] = struct{}{}
	}
	return true
}

// labelForm is the form of a label of a host name (RFC 1123): 1 to 63 letters, digits and hyphens,
// without a hyphen at either end. Underscores are also valid, because names of containers have them.
var labelForm = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$`)

// ValidHost reports whether a host is a host name of at most 253 bytes, or an IP address other than the unspecified address.
func ValidHost(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		return !a.IsUnspecified() && (a.Zone() == "" || labelForm.MatchString(a.Zone()))
	}
	name := strings.TrimSuffix(host, ".")
	labels := strings.Split(name, ".")
	if len(name) > MaxNameBytes || slices.ContainsFunc(labels, func(l string) bool { return !labelForm.MatchString(l) }) {
		return false
	}
	// A name that ends in a number is a malformed IPv4 address.
	_, err := strconv.ParseUint(labels[len(labels)-1], 10, 64)
	return err != nil
}

// canonicalHost returns a host name in the form for comparisons.
func canonicalHost(s string) string { return strings.TrimSuffix(strings.ToLower(s), ".") }

// Empty reports whether the set is empty.
func (h Hosts) Empty() bool { return len(h.prefixes)+len(h.names)+len(h.suffixes) == 0 }

// Contain reports whether a host is in the set. An IP address is compared with addresses, and a name with names; names are not resolved.
func (h Hosts) Contain(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		a = a.Unmap().WithZone("")
		return slices.ContainsFunc(h.prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	name := canonicalHost(host)
	if _, ok := h.names[name]; ok {
		return true
	}
	return slices.ContainsFunc(h.suffixes, func(suffix string) bool {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	})
}

// ContainEndpoint reports whether the host of a source's endpoint is in the set. That of ipc never is.
func (h Hosts) ContainEndpoint(s string) bool {
	e, ok := ParseSource(s)
	return ok && e.Transport != TransportIPC && h.Contain(e.Address)
}

// ReplayHost returns the host of a peer's replay socket. named is the host in the peer's topic. It is returned if it is allowed, or is the
// peer's own address. If it is a name that is not allowed, the peer's own address is returned. Otherwise ok is false: a peer must not make
// kvcast connect to other hosts.
func ReplayHost(named string, peer netip.Addr, allowed Hosts) (host string, ok bool) {
	if allowed.Contain(named) {
		return named, true
	}
	peer = peer.Unmap()
	if !peer.IsValid() {
		return "", false
	}
	a, err := netip.ParseAddr(named)
	if err != nil {
		return peer.String(), true
	}
	// All loopback addresses are this host.
	if a = a.Unmap(); a == peer || a.IsLoopback() && peer.IsLoopback() {
		return named, true
	}
	return "", false
}
