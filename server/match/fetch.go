package match

import (
	"net"
	"strconv"
	"strings"

	"github.com/kvcast/kvcast/internal/core/index"
)

// FetchLabel is the label of a worker with the endpoint at which its first dp rank gives its blocks to other engines: tcp://HOST:PORT, or only the port, of the
// host in the worker's endpoint. The rank after it has the next port, and so on.
const FetchLabel = "kvcast.io/fetch"

// fetchEndpoint returns the endpoint of the rank of a match; empty if its worker's label is absent or invalid.
func fetchEndpoint(m *index.Match) string {
	label := m.Labels[FetchLabel]
	if label == "" {
		return ""
	}
	address, ok := strings.CutPrefix(label, "tcp://")
	if !ok {
		host, _, err := net.SplitHostPort(m.Endpoint)
		if err != nil {
			return ""
		}
		address = net.JoinHostPort(host, label)
	}
	host, number, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return ""
	}
	port, err := strconv.ParseUint(number, 10, 16)
	if port += uint64(m.RankIndex); err != nil || port == 0 || port > 65535 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(port, 10))
}
