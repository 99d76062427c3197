package config

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Endpoint is a parsed ZeroMQ endpoint.
type Endpoint struct {
	Transport string // tcp or ipc
	Address   string // tcp: the host, ipc: the path
	Port      int    // tcp only; 0 means any
}

// The transports of endpoints, and bounds of their addresses.
const (
	TransportTCP = "tcp"
	TransportIPC = "ipc"

	MaxPort = 65535
	// maxIPCPath is the longest path of a Unix socket that Linux takes.
	maxIPCPath = 107
)

// AllowedConnect and AllowedBind describe valid endpoints in errors.
const (
	AllowedConnect = "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH"
	AllowedBind    = "tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH"
)

// ParseEndpoint parses an endpoint. open reports whether its host and port may be left
// open, as for binding. inproc is invalid: every Ingest has its own ZeroMQ context.
func ParseEndpoint(s string, open bool) (Endpoint, bool) {
	transport, address, ok := strings.Cut(s, "://")
	if !ok || strings.ContainsAny(address, "\x00; ") {
		return Endpoint{}, false
	}
	switch transport {
	case TransportIPC:
		if address == "" || len(address) > maxIPCPath {
			return Endpoint{}, false
		}
		return Endpoint{Transport: TransportIPC, Address: address}, true
	case TransportTCP:
		host, p, err := net.SplitHostPort(address)
		if err != nil || host == "" || (host == "*" && !open) {
			return Endpoint{}, false
		}
		if p == "*" {
			p = "0"
		}
		port, err := strconv.ParseUint(p, 10, 16)
		if err != nil || (port == 0 && !open) {
			return Endpoint{}, false
		}
		return Endpoint{Transport: TransportTCP, Address: host, Port: int(port)}, true
	default:
		return Endpoint{}, false
	}
}

// String returns the endpoint in libzmq's form.
func (e Endpoint) String() string {
	if e.Transport == TransportIPC {
		return "ipc://" + e.Address
	}
	port := "*"
	if e.Port != 0 {
		port = strconv.Itoa(e.Port)
	}
	return "tcp://" + net.JoinHostPort(e.Address, port)
}

// OfRank returns the endpoint of a dp rank. Rank r is on rank 0's port + r; TensorRT-LLM
// appends _dpR to ipc paths of the ranks above 0.
func (e Endpoint) OfRank(rank int) Endpoint {
	switch {
	case rank == 0:
	case e.Transport == TransportTCP:
		e.Port += rank
	default:
		e.Address = fmt.Sprintf("%s_dp%d", e.Address, rank)
	}
	return e
}
