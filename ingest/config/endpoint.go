package config

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Endpoint is a parsed endpoint: of ZeroMQ, or of a server that is called.
type Endpoint struct {
	Transport string // tcp or ipc of ZeroMQ, smg, openengine or lmcache of gRPC, lmcache-coordinator or mooncake of HTTP, or workers
	Address   string // ipc: the path; workers: the text for Announced; otherwise the host
	Port      int    // not of ipc or workers; 0 means any free port
}

// The transports of endpoints, and limits of their addresses.
const (
	TransportTCP = "tcp"
	TransportIPC = "ipc"
	// TransportSMG, TransportOpenEngine and TransportLMCache are the gRPC calls SubscribeKvEvents of the protocols of SMG, OpenEngine and
	// LMCache's multiprocess server.
	TransportSMG        = "smg"
	TransportOpenEngine = "openengine"
	TransportLMCache    = "lmcache"
	// TransportLMCacheCoordinator and TransportMooncake are the HTTP servers of LMCache's coordinator and of a Mooncake master.
	TransportLMCacheCoordinator = "lmcache-coordinator"
	TransportMooncake           = "mooncake"
	// TransportWorkers is what the workers announce that load from a pool. See Endpoint.Announced.
	TransportWorkers = "workers"

	MaxPort = 65535
	// maxIPCPath is the length of the longest path of a Unix socket on Linux.
	maxIPCPath = 107
)

// AllowedSource, AllowedConnect and AllowedBind describe valid endpoints in errors.
const (
	AllowedSource  = "tcp://HOST:PORT, smg://HOST:PORT, openengine://HOST:PORT, lmcache://HOST:PORT, lmcache-coordinator://HOST:PORT or mooncake://HOST:PORT with a port of 1 to 65535, ipc://PATH, or workers://disk or workers://external, with ?max_age=DURATION of 1s to 8760h or without"
	AllowedConnect = "tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH"
	AllowedBind    = "tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH"
)

// ParseSource parses the endpoint of a source: of ZeroMQ, gRPC or HTTP, or of no server.
func ParseSource(s string) (Endpoint, bool) {
	transport, address, _ := strings.Cut(s, "://")
	switch {
	case transport == TransportWorkers:
		e := Endpoint{Transport: TransportWorkers, Address: address}
		_, _, ok := e.Announced()
		return e, ok
	case !isCalled(transport):
		return ParseEndpoint(s, false)
	}
	e, ok := ParseEndpoint(TransportTCP+"://"+address, false)
	e.Transport = transport
	return e, ok
}

// Announced returns which blocks a pool holds if the endpoint is workers://TIER?max_age=DURATION: those that workers announce in a tier,
// until none has announced them for maxAge, by default DefaultMaxAge. ok is false if the endpoint is none or not valid.
func (e Endpoint) Announced() (tier kvblock.Tier, maxAge time.Duration, ok bool) {
	name, query, hasQuery := strings.Cut(e.Address, "?")
	tier, ok = map[string]kvblock.Tier{"disk": kvblock.TierDisk, "external": kvblock.TierExternal}[name]
	if !ok || e.Transport != TransportWorkers {
		return 0, 0, false
	}
	if !hasQuery {
		return tier, DefaultMaxAge, true
	}
	text, isAge := strings.CutPrefix(query, "max_age=")
	maxAge, err := time.ParseDuration(text)
	if !isAge || err != nil || maxAge < minMaxAge || maxAge > maxMaxAge {
		return 0, 0, false
	}
	return tier, maxAge, true
}

// DefaultMaxAge is for how long blocks that workers announce count as held by a pool, unless its endpoint says so.
const DefaultMaxAge = 24 * time.Hour

// minMaxAge and maxMaxAge bound what endpoints say.
const (
	minMaxAge = time.Second
	maxMaxAge = 365 * 24 * time.Hour
)

// Called reports whether the endpoint is that of a server that is called, by gRPC or HTTP, or of none, and not one of ZeroMQ.
func (e Endpoint) Called() bool { return isCalled(e.Transport) || e.Transport == TransportWorkers }

func isCalled(transport string) bool {
	return slices.Contains([]string{TransportSMG, TransportOpenEngine, TransportLMCache, TransportLMCacheCoordinator, TransportMooncake}, transport)
}

// ParseEndpoint parses an endpoint of ZeroMQ. bind reports whether the endpoint is to be bound: its host may then
// be *, and its port * or 0. inproc is invalid, because every Ingest has its own ZeroMQ context.
func ParseEndpoint(s string, bind bool) (Endpoint, bool) {
	transport, address, ok := strings.Cut(s, "://")
	if !ok || strings.ContainsAny(address, "; ") || !Printable(address) {
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
		if err != nil || host == "" || host == "*" && !bind {
			return Endpoint{}, false
		}
		if p == "*" {
			p = "0"
		}
		port, err := strconv.ParseUint(p, 10, 16)
		if err != nil || port == 0 && !bind {
			return Endpoint{}, false
		}
		return Endpoint{Transport: TransportTCP, Address: host, Port: int(port)}, true
	default:
		return Endpoint{}, false
	}
}

// String returns the endpoint as text, for ZeroMQ in libzmq's form.
func (e Endpoint) String() string {
	if e.Transport == TransportIPC || e.Transport == TransportWorkers {
		return e.Transport + "://" + e.Address
	}
	port := "*"
	if e.Port != 0 {
		port = strconv.Itoa(e.Port)
	}
	return e.Transport + "://" + net.JoinHostPort(e.Address, port)
}

// Net returns the network and address of the endpoint for package net. Host * means all addresses.
func (e Endpoint) Net() (network, address string) {
	if e.Transport == TransportIPC {
		return "unix", e.Address
	}
	host := e.Address
	if host == "*" {
		host = ""
	}
	return "tcp", net.JoinHostPort(host, strconv.Itoa(e.Port))
}

// RemoveSocket removes the Unix socket that a process leaves behind if it is killed. It returns nil if
// there is no file, and an error if the path is another kind of file.
func RemoveSocket(path string) error {
	switch file, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case file.Mode().Type() != os.ModeSocket:
		return fmt.Errorf("%s exists, and is not a socket", path)
	}
	return os.Remove(path)
}

// Endpoints returns the endpoints of each dp rank of a valid source with defaults.
func (s Source) Endpoints() []RankEndpoints {
	snapshot, hasSnapshot := ParseEndpoint(s.Snapshot, false)
	if len(s.Ranks) > 0 {
		all := slices.Clone(s.Ranks)
		for i := range all {
			if hasSnapshot {
				all[i].Snapshot = snapshot.OfRank(int(all[i].Rank) - s.FirstRank).String()
			}
		}
		return all
	}
	connect, _ := ParseSource(s.Connect)
	replay, hasReplay := ParseEndpoint(s.Replay, false)
	all := make([]RankEndpoints, s.DPSize)
	for i := range all {
		all[i] = RankEndpoints{Rank: uint32(s.FirstRank + i), Connect: connect.OfRank(i).String()}
		if hasReplay {
			all[i].Replay = replay.OfRank(i).String()
		}
		if hasSnapshot {
			all[i].Snapshot = snapshot.OfRank(i).String()
		}
	}
	return all
}

// OfRank returns the endpoint of a dp rank; e is the endpoint of rank 0, or ranks count from the one that e is the endpoint
// of. Over tcp rank r has that port + r. Over ipc TensorRT-LLM appends _dpR to the path of a rank R above 0. All ranks of a server that is called have one endpoint.
func (e Endpoint) OfRank(rank int) Endpoint {
	switch {
	case rank == 0, e.Called():
	case e.Transport == TransportTCP:
		e.Port += rank
	default:
		e.Address = fmt.Sprintf("%s_dp%d", e.Address, rank)
	}
	return e
}
