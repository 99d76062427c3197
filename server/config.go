package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/stats"

	"github.com/kvcast/kvcast/internal/history"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/access"
)

// Defaults of Config.
const (
	DefaultProgressInterval         = time.Second
	DefaultMaxConnections           = 4096
	DefaultMaxConnectionsPerAddress = DefaultMaxConnections / 8
	DefaultMaxSubscribers           = 1024
	DefaultStallTimeout             = 30 * time.Second
	DefaultMaxSnapshots             = 4
	DefaultMaxSnapshotWait          = 5 * time.Minute
	DefaultMaxEvictedBytes          = 64 << 20
	DefaultMaxFilterBytes           = 64 << 20
	DefaultMaxMatchBytes            = 128 << 20
	DefaultResponseBytes            = 64 << 10
	DefaultReceiveTimeout           = 5 * time.Second
	DefaultPingInterval             = 10 * time.Second // the interval of clients in Python and Rust by default
	DefaultMaxConnectionAgeGrace    = 10 * time.Second
	DefaultAccessInterval           = 5 * time.Minute
)

// Bounds of Config. Responses larger than MaxResponseBytes are not sent faster.
const (
	// MinFilterBytes is enough for one filter with the maximum number of names.
	MinFilterBytes   = 1 << 20
	MinResponseBytes = 4 << 10
	MaxResponseBytes = 512 << 10

	minProgressInterval = time.Millisecond
	minAccessInterval   = time.Millisecond
	minStallTimeout     = 10 * time.Millisecond
	minSnapshotWait     = time.Millisecond
	minPingInterval     = time.Second
)

// Limits are those of a server. Zero means the default. Other values outside the bounds are replaced by the nearest bound.
type Limits struct {
	// ProgressInterval is the maximum time between two messages to an idle subscriber; up to a fifth is subtracted
	// at random. At least 1 ms; default 1 s. A View grows older after two intervals without a message.
	ProgressInterval time.Duration
	// MaxConnections bounds the open connections, and separately the open health watches; default 4,096. Further
	// connections are closed at once.
	MaxConnections int
	// MaxConnectionsPerAddress bounds the open connections of one client address, and separately its health
	// watches; default 512. All IPv6 addresses in a /64 count as one.
	MaxConnectionsPerAddress int
	// MaxSubscribers bounds the open Subscribe streams, and separately the open Replay streams; default 1,024. One client address may have
	// MaxConnectionsPerAddress of each.
	MaxSubscribers int
	// StallTimeout is the time after which a stream ends if a send blocks because the client does not read. At least 10 ms; default 30 s. A
	// snapshot must be read at 8 MiB per StallTimeout, since other snapshots wait for its sweep's slot.
	StallTimeout time.Duration
	// MaxSnapshots bounds the concurrent sweeps over the index, for snapshots of Snapshot and Subscribe; default 4. Each may have a copy of
	// one dp rank's blocks, some 120 bytes a block while it is sorted, and then 40, and 16 MiB of encoded blocks. Streams with the same filter
	// that wait for a slot, or come within a second if they have none, share a sweep. Up to MaxSubscribers further ones wait, of which addresses take turns.
	MaxSnapshots int
	// MaxSnapshotWait is the maximum wait of a snapshot for a slot; at least 1 ms, default 5 min.
	MaxSnapshotWait time.Duration
	// MaxEvictedBytes bounds the memory of evicted journal entries that streams still reference; default 64 MiB.
	// Above it, streams whose send of evicted entries has blocked for a second are ended as stalled.
	MaxEvictedBytes int
	// MaxFilterBytes bounds the memory of the filters of all calls in progress; at least MinFilterBytes (1 MiB), default 64 MiB. One client address may
	// use a quarter, but always MinFilterBytes.
	MaxFilterBytes int64
	// MaxMatchBytes bounds the memory of the requests of MatchPrefix and MatchPrefixes in progress; default 128 MiB.
	// A usual request takes some 20 KiB. One client address may use a quarter, but always as much as the largest request.
	MaxMatchBytes int64
	// ResponseBytes is the approximate size of a response to a subscriber that is
	// behind: 4 KiB to 512 KiB, default 64 KiB. A larger entry is still sent whole.
	ResponseBytes int
	// ReceiveTimeout is the time in which a call's request must be complete, from when the server begins to receive it; default
	// 5 s. The call is cancelled otherwise.
	ReceiveTimeout time.Duration
	// PingInterval is the minimum interval of a client's keepalive pings; at least 1 s, default 10 s. A client that
	// repeatedly pings at less than nine tenths of the interval is disconnected.
	PingInterval time.Duration
	// MaxConnectionAge is the age of a connection, plus or minus a tenth, at which the server sends GOAWAY. Its
	// Subscribe streams then end with MAX_CONNECTION_AGE. Default 0: no limit.
	MaxConnectionAge time.Duration
	// MaxConnectionAgeGrace is the time after the GOAWAY within which Subscribe streams end, and the minimum time
	// after that until other calls are aborted; default 10 s.
	MaxConnectionAgeGrace time.Duration
}

// Config configures a server.
type Config struct {
	Limits
	// TLS secures connections; nil: plaintext.
	TLS *tls.Config
	// Access has the tokens and certificates that permit calls, which SetAccess can replace. Without tokens and
	// ClientCertificates, calls need neither. Health checks and reflection never need them.
	Access access.List
	// ClientCertificates says that TLS verifies client certificates, and that one permits calls.
	ClientCertificates bool
	// AccessInterval is how often open streams are checked. A stream ends with UNAUTHENTICATED if its token was removed from Access, or its
	// client certificate has no role there any more. If the certificate has expired, the connection is closed. At least 1 ms; default 5 min.
	AccessInterval time.Duration
	// OpenRegistration permits RegisterWorker and DeregisterWorker to everyone if calls need no token or certificate.
	OpenRegistration bool
	// NoReflection omits gRPC reflection.
	NoReflection bool
	// NoRouters refuses the calls of routers, which go to other servers of the cluster. GetStatus, ListWorkers and ListSubscribers work.
	NoRouters bool
	// Version is the version in GetStatusResponse.
	Version string
	// Sources returns the status of each worker's sources, by worker name; nil: the sources are unknown. It must be
	// safe for concurrent use. The server may modify the returned map.
	Sources func() map[string][]*kvcastv1.SourceStatus
	// Aliases returns for block hashes of a worker's sources the block hashes that entries have, with the names of the
	// sources that hold the blocks now; nil if no worker has several sources. It must be safe for concurrent use.
	Aliases func(worker string, rank uint32, hashes []uint64) map[uint64][]string
	// Recovery returns the progress of the recovery from a durable journal; nil if none is in progress. The function may
	// be nil. It must be safe for concurrent use.
	Recovery func() *kvcastv1.Recovery
	// Cluster shows the servers that share the journal; nil: it is not shared. Its methods must be safe for concurrent use.
	Cluster Cluster
	// Knowledge returns until when the server knows what the engines have cached; nil: until now. It must be safe for concurrent use.
	Knowledge func() Knowledge
	// Newest returns the newest seq of a journal that another server writes. Subscribe and Replay then wait for a position
	// that this server has not read yet. Nil: the journal is written by this server.
	Newest func(context.Context) (uint64, error)
	// Incidents is what InspectionService lists, and where the server remembers the ends of subscriptions; nil: a log of its own.
	Incidents *incident.Log
	// History has the samples that InspectionService.GetHistory returns. If it is nil, there are none.
	History *history.History
	// Retention is the journal's, which GetStatus returns. Zero: it is not known.
	Retention journal.Config
	// Workers returns the WorkerService, such as registration.New's; nil: both of its methods are unimplemented.
	Workers func(*Server) kvcastv1.WorkerServiceServer
	// Logger receives a record for each call that ends; nil: none.
	Logger *slog.Logger
	// StatsHandler observes the calls, for example to trace them; nil: none.
	StatsHandler stats.Handler
	// Registerer receives the metrics; nil: none.
	Registerer prometheus.Registerer
}

// Cluster shows the servers that share a journal, and which of them ingests each worker.
type Cluster interface {
	// ID names this server.
	ID() string
	// Instances returns the servers, by id. The caller keeps them.
	Instances() []*kvcastv1.InstanceStatus
	// Owners returns the owner of each worker that has one or is to have one. The caller keeps the elements.
	Owners() map[string]*kvcastv1.WorkerOwner
	// WorkerStates returns the states of the workers that other servers own, as far as they have reported them. The caller keeps it.
	WorkerStates() map[string]kvcastv1.WorkerState
	// SourcesDown returns the dp ranks that other servers ingest and have no connection to.
	SourcesDown() []RankSince
	// Overpredicted returns the dp ranks that other servers call OVERPREDICTED, by what routers have reported to them.
	Overpredicted() []RankSince
}

func (c Config) withDefaults() Config {
	c.Limits = c.Limits.withDefaults()
	c.AccessInterval = max(cmp.Or(c.AccessInterval, DefaultAccessInterval), minAccessInterval)
	if c.Workers == nil {
		c.Workers = func(s *Server) kvcastv1.WorkerServiceServer { return noWorkers{bounds: s.Bounds} }
	}
	c.Incidents = cmp.Or(c.Incidents, new(incident.Log))
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	return c
}

func (l Limits) withDefaults() Limits {
	l.ProgressInterval = max(cmp.Or(l.ProgressInterval, DefaultProgressInterval), minProgressInterval)
	l.MaxConnections = cmp.Or(l.MaxConnections, DefaultMaxConnections)
	l.MaxConnectionsPerAddress = cmp.Or(l.MaxConnectionsPerAddress, DefaultMaxConnectionsPerAddress)
	l.MaxSubscribers = cmp.Or(l.MaxSubscribers, DefaultMaxSubscribers)
	l.StallTimeout = max(cmp.Or(l.StallTimeout, DefaultStallTimeout), minStallTimeout)
	l.MaxSnapshots = cmp.Or(l.MaxSnapshots, DefaultMaxSnapshots)
	l.MaxSnapshotWait = max(cmp.Or(l.MaxSnapshotWait, DefaultMaxSnapshotWait), minSnapshotWait)
	l.MaxEvictedBytes = cmp.Or(l.MaxEvictedBytes, DefaultMaxEvictedBytes)
	l.MaxFilterBytes = max(cmp.Or(l.MaxFilterBytes, DefaultMaxFilterBytes), MinFilterBytes)
	l.MaxMatchBytes = cmp.Or(l.MaxMatchBytes, DefaultMaxMatchBytes)
	l.ResponseBytes = min(max(cmp.Or(l.ResponseBytes, DefaultResponseBytes), MinResponseBytes), MaxResponseBytes)
	l.ReceiveTimeout = cmp.Or(l.ReceiveTimeout, DefaultReceiveTimeout)
	l.PingInterval = max(cmp.Or(l.PingInterval, DefaultPingInterval), minPingInterval)
	l.MaxConnectionAgeGrace = cmp.Or(l.MaxConnectionAgeGrace, DefaultMaxConnectionAgeGrace)
	return l
}
