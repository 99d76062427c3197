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

// dialing is the addresses of an endpoint's consumers.
type dialing struct {
	*endpoint
	port string // empty: there is one address, that of the endpoint
	host string

	mu      sync.Mutex // guards all below
	listed  map[string]bool
	running map[string]bool // have a goroutine
}

// connectAll keeps a connection to each consumer of an endpoint until ctx ends. Those behind a name are all of its addresses, which may change.
func (p *endpoint) connectAll(ctx context.Context) {
	d := &dialing{endpoint: p, running: make(map[string]bool)}
	if host, port, err := net.SplitHostPort(p.addr); err == nil && p.network == "tcp" && isName(host) {
		d.host, d.port = host, port
	}
	if d.port == "" {
		d.connect(ctx, p.addr)
		return
	}
	var running sync.WaitGroup
	defer running.Wait()
	failed := false
	for ctx.Err() == nil {
		found, err := p.Egress.cfg.Lookup(ctx, "ip", d.host)
		addresses := addressesOf(found, d.port)
		if err == nil && len(addresses) == 0 {
			err = errors.New("the name has no addresses")
		}
		if err == nil {
			for _, address := range d.list(addresses) {
				running.Go(func() { d.connect(ctx, address) })
			}
		} else if !failed && ctx.Err() == nil {
			p.logger.Warn("name of consumers was not resolved; those that were found before get events; is the endpoint under egress.zmq.connect right?",
				"endpoint", p.cfg.Connect, "error", err)
		}
		failed = err != nil
		outbound.Wait(ctx, resolveInterval)
	}
}

// isName reports whether a host can have several consumers.
func isName(host string) bool {
	_, err := netip.ParseAddr(host)
	return err != nil && host != "localhost"
}

// addressesOf returns the addresses of consumers behind a name: those of IPv4 if there are any, otherwise those of IPv6. A consumer that has both
// would get everything twice.
func addressesOf(found []netip.Addr, port string) (all []string) {
	is6 := func(a netip.Addr) bool { return !a.Unmap().Is4() }
	if slices.ContainsFunc(found, func(a netip.Addr) bool { return !is6(a) }) {
		found = slices.DeleteFunc(slices.Clone(found), is6)
	}
	for _, a := range found {
		all = append(all, net.JoinHostPort(a.Unmap().String(), port))
	}
	slices.Sort(all)
	all = slices.Compact(all)
	return all[:min(len(all), maxAddresses)]
}

// list says which addresses the name has now, and returns those that need a goroutine, which counts as running.
func (d *dialing) list(addresses []string) (missing []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.listed = make(map[string]bool, len(addresses))
	for _, a := range addresses {
		d.listed[a] = true
		if !d.running[a] {
			d.running[a] = true
			missing = append(missing, a)
		}
	}
	return missing
}

// leave reports whether the name has an address no more. The goroutine that asks ends then.
func (d *dialing) leave(address string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.port == "" || d.listed[address] {
		return false
	}
	delete(d.running, address)
	return true
}

// connect keeps a connection to a consumer until ctx ends, or until its connection has ended and the name does not have its address any more: an
// address can be missing for a moment. It logs each outage once.
func (d *dialing) connect(ctx context.Context, address string) {
	dialer := net.Dialer{Timeout: connectTimeout}
	logged := false
	for retry := minRetry; ctx.Err() == nil; {
		c, err := dialer.DialContext(ctx, d.network, address)
		if err == nil {
			if d.serve(ctx, c, zmtp.PUB) {
				retry, logged = minRetry, false
			} else {
				err = errors.New("the peer has not completed the ZeroMQ handshake")
			}
		}
		if d.leave(address) {
			return
		}
		if err != nil && !logged && ctx.Err() == nil {
			d.logger.Warn("consumer cannot be reached, and gets no events; is it running, and is the endpoint under egress.zmq.connect right?",
				"endpoint", d.cfg.Connect, "address", address, "error", err)
			logged = true
		}
		outbound.Wait(ctx, retry/2+rand.N(retry/2+1)) //nolint:gosec // jitter
		if d.leave(address) {
			return
		}
		retry = min(2*retry, maxRetry)
	}
}
