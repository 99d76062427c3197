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

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
)

// lookupTimeout bounds a lookup of the name.
const lookupTimeout = 5 * time.Second

// DNS finds workers by a DNS name that has an address for each engine, as the name of a headless service
// does.
type DNS struct {
	// Host is the name.
	Host string
	// Port is the port of each engine's PUB socket.
	Port int
	// ReplayPort is the port of each engine's replay socket; 0 means that there is none.
	ReplayPort int
	// Engine, Copies, Model and BlockSize are set in each config.Worker and its config.Source.
	Engine    feed.Engine
	Copies    config.Copies
	Model     string
	BlockSize uint32

	// lookup resolves the name; nil means net.DefaultResolver.LookupNetIP.
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Find returns a worker for each address, named ADDRESS:PORT. A name without addresses is not an error,
// because all engines may be gone.
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
		at := func(port int) string { return net.JoinHostPort(a.String(), strconv.Itoa(port)) }
		source := config.Source{Engine: d.Engine, Copies: d.Copies, Connect: "tcp://" + at(d.Port)}
		if d.ReplayPort != 0 {
			source.Replay = "tcp://" + at(d.ReplayPort)
		}
		workers[i] = config.Worker{Name: at(d.Port), Model: d.Model, BlockSize: d.BlockSize, Sources: []config.Source{source}}
	}
	return workers, nil
}
