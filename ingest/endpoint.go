package ingest

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// endpoint is a ZeroMQ endpoint, taken apart.
type endpoint struct {
	transport string // tcp or ipc
	address   string // tcp: the host, ipc: the path
	port      int    // tcp only; 0 means any
}

const (
	transportTCP = "tcp"
	transportIPC = "ipc"

	maxPort = 65535
	// maxIPCPath is the longest path of a Unix socket that Linux takes.
	maxIPCPath = 107
)

const (
	allowedConnect = "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH"
	allowedBind    = "tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH"
)

// parseEndpoint takes an endpoint apart; open tells whether its host and port
// may be left open, as for binding. inproc is not accepted: it does not leave
// its ZeroMQ context, and every Ingest has its own.
func parseEndpoint(s string, open bool) (endpoint, bool) {
	transport, address, ok := strings.Cut(s, "://")
	if !ok || strings.ContainsAny(address, "\x00; ") {
		return endpoint{}, false
	}
	switch transport {
	case transportIPC:
		if address == "" || len(address) > maxIPCPath {
			return endpoint{}, false
		}
		return endpoint{transport: transportIPC, address: address}, true
	case transportTCP:
		host, p, err := net.SplitHostPort(address)
		if err != nil || host == "" || (host == "*" && !open) {
			return endpoint{}, false
		}
		if p == "*" {
			p = "0"
		}
		port, err := strconv.ParseUint(p, 10, 16)
		if err != nil || (port == 0 && !open) {
			return endpoint{}, false
		}
		return endpoint{transport: transportTCP, address: host, port: int(port)}, true
	default:
		return endpoint{}, false
	}
}

// String returns the endpoint as libzmq takes it.
func (e endpoint) String() string {
	if e.transport == transportIPC {
		return "ipc://" + e.address
	}
	port := "*"
	if e.port != 0 {
		port = strconv.Itoa(e.port)
	}
	return "tcp://" + net.JoinHostPort(e.address, port)
}

// ofRank returns the endpoint of a dp rank. Engines put rank r on the port r
// above rank 0's; TensorRT-LLM tells ipc paths apart by a suffix, which rank 0
// goes without.
func (e endpoint) ofRank(rank int) endpoint {
	switch {
	case rank == 0:
	case e.transport == transportTCP:
		e.port += rank
	default:
		e.address = fmt.Sprintf("%s_dp%d", e.address, rank)
	}
	return e
}
