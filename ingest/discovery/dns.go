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

// lookupTimeout is how long a name server may take.
const lookupTimeout = 5 * time.Second

// DNS is a name that has an address for each engine, as that of a headless service
// does.
type DNS struct {
	// Host is the name.
	Host string
	// Port is where each engine publishes.
	Port int
	// ReplayPort is where each replays; 0 means that none does.
	ReplayPort int
	// Engine is what the engines are, and Model what they serve; both as of
	// ingest.Worker.
	Engine feed.Engine
	Copies config.Copies
	Model  string
	// BlockSize is in tokens; 0 means that of the first store.
	BlockSize uint32

	// lookup is the resolver; nil means the system's.
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Find returns a worker for each address, named ADDRESS:PORT. A name without addresses is no error: all engines may be
// gone.
func (d DNS) Find(ctx context.Context) ([]config.Worker, error) {
	lookup := d.lookup
	if lookup == nil {
		lookup = net.DefaultResolver.LookupNetIP
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addresses, err := lookup(ctx, "ip", d.Host)
	var no *net.DNSError
	if errors.As(err, &no) && no.IsNotFound {
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
