package dynamo

import (
	"net"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/budget"
)

// LimitConnections returns a listener that closes connections beyond the limits of all and of each address.
func LimitConnections(l net.Listener, registerer prometheus.Registerer) net.Listener {
	total := budget.New("dynamo_connections", maxConnections)
	registerer.MustRegister(budget.Collector{total})
	return budget.NewShares(total, maxConnections/8).Limit(l)
}
