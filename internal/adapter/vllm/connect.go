package vllm

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// Bounds of the wait between two attempts to connect, and of one attempt.
const (
	minRetry       = time.Second
	maxRetry       = 30 * time.Second
	connectTimeout = 5 * time.Second
)

// resolveInterval is the time between two lookups of a name of consumers, as of a name of engines. Tests change it.
var resolveInterval = 5 * time.Second

// maxAddresses bounds the consumers behind a name.
const maxAddresses = 64

// consumers are the consumers behind a name.
type consumers struct {
	mu      sync.Mutex      // guards all below
	listed  map[string]bool // the addresses that the name has
	running map[string]bool // those with a goroutine
}

// connectAll keeps a connection to each consumer of an endpoint until ctx ends. A name has a consumer at each of its addresses, which may change.
func (p *endpoint) connectAll(ctx context.Context) {
	host, port, err := net.SplitHostPort(p.addr)
	if err != nil || p.network != "tcp" || !isName(host) {
		p.connect(ctx, p.addr, func() bool { return false })
		return
	}
	c := &consumers{running: make(map[string]bool)}
	var running sync.WaitGroup
	defer running.Wait()
	failed, tooMany := false, false
	for ctx.Err() == nil {
		found, err := p.Egress.cfg.Lookup(ctx, "ip", host)
		addresses, left := addressesOf(found, port)
		if err == nil && len(addresses) == 0 {
			err = errors.New("the name has no addresses")
		}
		if err != nil && !failed && ctx.Err() == nil {
			p.logger.Warn("name of consumers was not resolved; those that were found before get events; is the endpoint under egress.zmq.connect right?",
				"endpoint", p.cfg.Connect, "error", err)
		}
		if failed = err != nil; !failed {
			if left > 0 && !tooMany {
				tooMany = true
				p.logger.Warn("name has more addresses than consumers are allowed, and the others get no events", "endpoint", p.cfg.Connect, "allowed", maxAddresses, "others", left)
			}
			for _, address := range c.list(addresses) {
				running.Go(func() { p.connect(ctx, address, func() bool { return c.remove(address) }) })
			}
		}
		outbound.Wait(ctx, resolveInterval)
	}
}

// isName reports whether a host can have several consumers.
func isName(host string) bool {
	_, err := netip.ParseAddr(host)
	return err != nil && host != "localhost"
}

// addressesOf returns the addresses of consumers behind a name: those of IPv4 if there are any, otherwise those of IPv6. A consumer that has both
// would get everything twice. left is the number of those beyond maxAddresses.
func addressesOf(found []netip.Addr, port string) (all []string, left int) {
	is6 := func(a netip.Addr) bool { return !a.Unmap().Is4() }
	if slices.ContainsFunc(found, func(a netip.Addr) bool { return !is6(a) }) {
		found = slices.DeleteFunc(slices.Clone(found), is6)
	}
	for _, a := range found {
		all = append(all, net.JoinHostPort(a.Unmap().String(), port))
	}
	slices.Sort(all)
	all = slices.Compact(all)
	used := min(len(all), maxAddresses)
	return all[:used], len(all) - used
}

// list sets the addresses that the name has, and returns those that need a goroutine, which count as running.
func (c *consumers) list(addresses []string) (missing []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed = make(map[string]bool, len(addresses))
	for _, a := range addresses {
		c.listed[a] = true
		if !c.running[a] {
			c.running[a] = true
			missing = append(missing, a)
		}
	}
	return missing
}

// remove ends the use of an address by its goroutine, unless the name has it, and reports whether it did.
func (c *consumers) remove(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listed[address] {
		return false
	}
	delete(c.running, address)
	return true
}

// connect keeps a connection to a consumer until ctx ends. Without a connection it asks whether the address is removed, and ends if so: an address
// that is missing for a moment keeps its connection. It logs each outage once.
func (p *endpoint) connect(ctx context.Context, address string, isRemoved func() bool) {
	dialer := net.Dialer{Timeout: connectTimeout}
	logged := false
	for retry := minRetry; ctx.Err() == nil; {
		c, err := dialer.DialContext(ctx, p.network, address)
		if err == nil {
			if p.serve(ctx, c, zmtp.PUB) {
				retry, logged = minRetry, false
			} else {
				err = errors.New("the peer has not completed the ZeroMQ handshake")
			}
		}
		if isRemoved() {
			return
		}
		if err != nil && !logged && ctx.Err() == nil {
			p.logger.Warn("consumer cannot be reached, and gets no events; is it running, and is the endpoint under egress.zmq.connect right?",
				"endpoint", p.cfg.Connect, "address", address, "error", err)
			logged = true
		}
		outbound.Wait(ctx, retry/2+rand.N(retry/2+1)) //nolint:gosec // jitter
		if isRemoved() {
			return
		}
		retry = min(2*retry, maxRetry)
	}
}
