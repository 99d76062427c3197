package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// lookupTimeout bounds a lookup of the name.
const lookupTimeout = 5 * time.Second

// Engines has what the discovered engines have in common.
type Engines struct {
	// Port is the port of each engine's PUB socket.
	Port int
	// ReplayPort is the port of each engine's replay socket; 0 means that there is none.
	ReplayPort int
	// Engine, Copies, Clears, Model, BlockSize and Pools are set in each config.Worker and its config.Source.
	Engine    feed.Engine
	Copies    config.Copies
	Clears    config.Clears
	Model     string
	BlockSize uint32
	Pools     []string
}

// DNS finds workers by a DNS name that has an address for each engine, as the name of a headless service does.
type DNS struct {
	// Host is the name.
	Host string
	Engines

	// lookup resolves the name; nil means net.DefaultResolver.LookupNetIP.
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Find returns a worker for each address, named ADDRESS:PORT. A name without addresses is not an error, because all engines may be gone.
func (d DNS) Find(ctx context.Context) ([]config.Worker, error) {
	lookup := d.lookup
	if lookup == nil {
		lookup = net.DefaultResolver.LookupNetIP
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addresses, err := lookup(ctx, "ip", d.Host)
	var dnsError *net.DNSError
	if errors.As(err, &dnsError) && dnsError.IsNotFound {
		addresses, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", d.Host, err)
	}
	for i, a := range addresses {
		addresses[i] = a.Unmap()
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	addresses = slices.Compact(addresses)
	workers := make([]config.Worker, len(addresses))
	for i, a := range addresses {
		workers[i] = d.Worker(net.JoinHostPort(a.String(), strconv.Itoa(d.Port)), a.String())
	}
	return workers, nil
}

// Worker returns the worker of the engine at a host.
func (e Engines) Worker(name, host string) config.Worker {
	source := config.Source{Engine: e.Engine, Copies: e.Copies, Clears: e.Clears, Connect: endpoint(host, e.Port)}
	if e.ReplayPort != 0 {
		source.Replay = endpoint(host, e.ReplayPort)
	}
	return config.Worker{Name: name, Model: e.Model, BlockSize: e.BlockSize, Pools: slices.Clone(e.Pools), Sources: []config.Source{source}}
}

func endpoint(host string, port int) string {
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
}
