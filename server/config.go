package server

import (
	"crypto/tls"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Defaults of Config.
const (
	DefaultProgressInterval         = 10 * time.Second
	DefaultMaxConnections           = 4096
	DefaultMaxConnectionsPerAddress = 2048
	DefaultMaxSubscribers           = 1024
	DefaultStallTimeout             = 30 * time.Second
	DefaultMaxSnapshots             = 4
	DefaultMaxSnapshotWait          = 30 * time.Second
	DefaultMaxEvictedBytes          = 64 << 20
	DefaultMaxFilterBytes           = 64 << 20
	DefaultResponseBytes            = 64 << 10
	DefaultPingInterval             = 10 * time.Second // what the stock settings of Python's and Rust's clients need
	DefaultMaxConnectionAgeGrace    = 10 * time.Second
)

// Bounds of Config. Responses above MaxResponseBytes cost less per event, but the
// transport sends them no faster.
const (
	// MinFilterBytes has room for a filter with the largest number of names.
	MinFilterBytes   = 1 << 20
	MinResponseBytes = 4 << 10
	MaxResponseBytes = 512 << 10

	minProgressInterval = time.Millisecond
	minStallTimeout     = 10 * time.Millisecond
	minSnapshotWait     = time.Millisecond
	minPingInterval     = time.Second
)

// Config of a server. The zero value means the defaults. Values outside the bounds
// are replaced by the nearest bound.
type Config struct {
	// ProgressInterval is the longest time between two messages to an idle
	// subscriber; up to a fifth is subtracted at random. At least 1 ms; default 10 s.
	ProgressInterval time.Duration
	// MaxConnections bounds the open connections, and separately the open health
	// watches; default 4,096. Connections beyond it are closed at once.
	MaxConnections int
	// MaxConnectionsPerAddress bounds both per client address; default 2,048. An IPv6
	// address counts as its /64.
	MaxConnectionsPerAddress int
	// MaxSubscribers bounds the open Subscribe streams, and separately the open Replay streams; default 1,024.
	MaxSubscribers int
	// StallTimeout is how long a send may make no progress because the client does not
	// read. The stream then ends. At least 10 ms; default 30 s. A snapshot must be read
	// at 8 MiB per StallTimeout, since others wait for its slot.
	StallTimeout time.Duration
	// MaxSnapshots bounds the snapshots sent at a time, by Snapshot and Subscribe; default 4. Each may hold a
	// copy of one worker's block table. Up to MaxSubscribers more wait in FIFO order.
	MaxSnapshots int
	// MaxSnapshotWait is how long a snapshot may wait for a slot; at least 1 ms, default 30 s.
	MaxSnapshotWait time.Duration
	// MaxEvictedBytes bounds the memory of evicted journal entries that streams still reference; default 64
	// MiB. Above it, streams that have been sending such entries for a second are ended as stalled.
	MaxEvictedBytes int
	// MaxFilterBytes bounds the memory of the filters of all calls in progress; at
	// least MinFilterBytes, default 64 MiB.
	MaxFilterBytes int64
	// ResponseBytes is the approximate size of a response to a subscriber that is
	// behind: 4 KiB to 512 KiB, default 64 KiB. A larger entry is still sent whole.
	ResponseBytes int
	// PingInterval is the shortest interval at which a client may send keepalive pings; at least 1 s, default
	// 10 s. A client that repeatedly pings more than a tenth faster is disconnected.
	PingInterval time.Duration
	// MaxConnectionAge is the age, plus or minus a tenth, at which a client is asked to reconnect; default 0:
	// no limit. Subscribe streams then end with MAX_CONNECTION_AGE.
	MaxConnectionAge time.Duration
	// MaxConnectionAgeGrace is the time within which the Subscribe streams of such a
	// connection end, and then the least time other calls have to finish; default 10 s.
	MaxConnectionAgeGrace time.Duration
	// TLS secures connections; nil: plaintext.
	TLS *tls.Config
	// Tokens are the accepted bearer tokens; nil: calls need none. Health checks and reflection never need one.
	Tokens *Tokens
	// Version is reported by GetStatus.
	Version string
	// Sources returns the status of each worker's sources by worker name; nil: unknown.
	// It must be safe for concurrent use, and the caller owns the map it returns.
	Sources func() map[string][]*kvcastv1.SourceStatus
	// Workers handles RegisterWorker and DeregisterWorker; nil: both are unimplemented.
	Workers Workers
	// RegisterHosts are the hosts that RegisterWorker accepts; empty: all.
	RegisterHosts config.Hosts
	// Logger receives a record for each call that ends; nil: none.
	Logger *slog.Logger
	// Registerer receives the metrics; nil: none.
	Registerer prometheus.Registerer
}

// withDefaults returns the config with its defaults and bounds applied.
func (c Config) withDefaults() Config {
	c.ProgressInterval = max(positiveOr(c.ProgressInterval, DefaultProgressInterval), minProgressInterval)
	c.MaxConnections = positiveOr(c.MaxConnections, DefaultMaxConnections)
	c.MaxConnectionsPerAddress = positiveOr(c.MaxConnectionsPerAddress, DefaultMaxConnectionsPerAddress)
	c.MaxSubscribers = positiveOr(c.MaxSubscribers, DefaultMaxSubscribers)
	c.StallTimeout = max(positiveOr(c.StallTimeout, DefaultStallTimeout), minStallTimeout)
	c.MaxSnapshots = positiveOr(c.MaxSnapshots, DefaultMaxSnapshots)
	c.MaxSnapshotWait = max(positiveOr(c.MaxSnapshotWait, DefaultMaxSnapshotWait), minSnapshotWait)
	c.MaxEvictedBytes = positiveOr(c.MaxEvictedBytes, DefaultMaxEvictedBytes)
	c.MaxFilterBytes = max(positiveOr(c.MaxFilterBytes, DefaultMaxFilterBytes), MinFilterBytes)
	c.ResponseBytes = min(max(positiveOr(c.ResponseBytes, DefaultResponseBytes), MinResponseBytes), MaxResponseBytes)
	c.PingInterval = max(positiveOr(c.PingInterval, DefaultPingInterval), minPingInterval)
	c.MaxConnectionAge = max(c.MaxConnectionAge, 0)
	c.MaxConnectionAgeGrace = positiveOr(c.MaxConnectionAgeGrace, DefaultMaxConnectionAgeGrace)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	return c
}

func positiveOr[T int | int64 | time.Duration](v, otherwise T) T {
	if v > 0 {
		return v
	}
	return otherwise
}
