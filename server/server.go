package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/ingest/config"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal is what the server reads.
type Journal interface {
	// Bounds tells what is retained now.
	Bounds() journal.Bounds
	// Read returns entries; see journal.Memory.
	Read(q journal.Query, slices [][]byte) (journal.Chunk, error)
	// Changed returns a channel that the next append closes.
	Changed() <-chan struct{}
	// Bytes tells what the entries retained take.
	Bytes() int
	// Retained tells what those take that were let go of and are still in memory.
	Retained() int
}

// Config of a server. The zero value means the defaults.
type Config struct {
	// Progress is how often an idle subscriber hears that the stream is alive:
	// up to this long, and a fifth less at times. At least 1 ms; default 10 s.
	Progress time.Duration
	// MaxConnections is how many connections may be open, and how many health
	// watches; default 4,096. Those beyond are closed at once, or refused.
	MaxConnections int
	// MaxConnectionsPerAddress is how many of them the clients of one address may
	// have, where an IPv6 address stands for its /64; default 2,048.
	MaxConnectionsPerAddress int
	// MaxSubscribers is how many Subscribe streams may be open, and how many of
	// Replay; default 1,024.
	MaxSubscribers int
	// Stall is how long a client may read nothing while there is something to
	// send, before its stream is ended; at least 10 ms, default 30 s. A snapshot, of
	// which others wait for their turn, must be read at 8 MiB in this time.
	Stall time.Duration
	// MaxSnapshots is how many snapshots may be sent at a time, by Snapshot and by
	// Subscribe; default 4. Each may hold a copy of a table of a worker. Others wait
	// for their turn, as many as MaxSubscribers.
	MaxSnapshots int
	// SnapshotWait is how long a snapshot waits for its turn; at least 1 ms, default
	// 30 s.
	SnapshotWait time.Duration
	// MaxRetained bounds the memory of entries that the journal has let go of and
	// streams still hold; default 64 MiB. Beyond, those that hold them are ended as
	// if they had stalled, after a second.
	MaxRetained int
	// FilterBytes bounds the memory of the filters of all calls in progress; at least
	// 1 MiB, default 64 MiB.
	FilterBytes int64
	// ResponseBytes is about what a response holds whose subscriber is behind: 4 KiB
	// to 512 KiB, default 64 KiB. One entry is sent whole, whatever its size.
	ResponseBytes int
	// PingInterval is how often a client may ping; at least 1 s, default 10 s. One
	// that does more often, by a tenth and several times, is disconnected.
	PingInterval time.Duration
	// MaxConnectionAge is how old a connection may grow, a tenth more or less,
	// before its client is asked to make another; at most a year, default 0: any
	// age. Subscribe streams end with MAX_CONNECTION_AGE then.
	MaxConnectionAge time.Duration
	// MaxConnectionAgeGrace is the time within which the Subscribe streams of such
	// a connection end, and how long other calls have at least after that; at most
	// an hour, default 10 s.
	MaxConnectionAgeGrace time.Duration
	// TLS is what connections are secured with; nil: they are not.
	TLS *tls.Config
	// Tokens are those of which each call must carry one; nil: all may call.
	// Health checks and reflection need none.
	Tokens *Tokens
	// Version is what GetStatus tells.
	Version string
	// Sources tells the sources of each worker, by its name; nil where they are
	// not known. It must be safe to call at any time, and the map is the caller's.
	Sources func() map[string][]*kvcastv1.SourceStatus
	// Workers are what RegisterWorker adds to and DeregisterWorker removes from; nil:
	// neither can be called.
	Workers Workers
	// RegisterHosts are the hosts that RegisterWorker may name; none: any.
	RegisterHosts config.Hosts
	// Logger gets a line for each call that ends; nil discards them.
	Logger *slog.Logger
	// Registerer gets the metrics; nil means none are kept.
	Registerer prometheus.Registerer
}

// Defaults of Config.
const (
	DefaultProgress                 = 10 * time.Second
	DefaultMaxConnections           = 4096
	DefaultMaxConnectionsPerAddress = 2048
	DefaultMaxSubscribers           = 1024
	DefaultMaxSnapshots             = 4
	DefaultSnapshotWait             = 30 * time.Second
	DefaultResponseBytes            = 64 << 10
	DefaultMaxRetained              = 64 << 20
	DefaultFilterBytes              = 64 << 20
	DefaultPingInterval             = 10 * time.Second
	DefaultStall                    = 30 * time.Second
	DefaultMaxConnectionAgeGrace    = 10 * time.Second
)

// MinFilterBytes is the least that Config.FilterBytes may be: a filter of as many names
// as one may have fits.
const MinFilterBytes = 1 << 20

// Bounds of Config.ResponseBytes. Larger responses cost less for each event, but the
// transport takes them no faster.
const (
	MinResponseBytes = 4 << 10
	MaxResponseBytes = 512 << 10
)

const (
	// A connection without any traffic is pinged after deadAfter, and closed when
	// no answer comes within deadTimeout.
	deadAfter   = 30 * time.Second
	deadTimeout = 10 * time.Second
	// handshakeTime is how long a connection may be open without speaking HTTP/2.
	handshakeTime = 5 * time.Second
	// closingTime is how long connections have to be closed in good order once
	// all streams have ended.
	closingTime = time.Second
	// maxRequestBytes is far more than any request needs.
	maxRequestBytes = 256 << 10
	// maxHeaderBytes is what the headers of a call may come to, by the count of
	// HTTP/2: a token of the largest size fits several times.
	maxHeaderBytes = 16 << 10
	// receiveWindow is how much of a stream is taken before it is read. Requests are
	// small; the window that gRPC would adapt to a fast client grows to 16 MiB.
	receiveWindow = 64 << 10
)

// Server serves kvcast.v1, health and reflection.
type Server struct {
	cfg     Config
	journal Journal
	state   State
	grpc    *grpc.Server
	conns   *connections
	health  *health.Server
	metrics *metrics
	age     connectionAge

	subscribers subscribers
	replays     streams
	snapshots   places       // by Snapshot and by Subscribe
	calls       streams      // Subscribe, Snapshot and Replay
	phase       atomic.Int32 // a phase

	// What bounds clients, beside the above.
	watches        *quota        // of gRPC health
	reflections    *quota        // of gRPC reflection
	arriving       chan struct{} // one for each call whose request is arriving
	unknownPeer    *peerAddress  // of calls that came over no connection
	filterBytes    *budget.Budget
	tokensLookups  *queryLimiter
	blockLookups   *queryLimiter
	workersQueries *queryLimiter

	refusedConnections logThrottle
	refusedCalls       logThrottle

	draining chan struct{} // closed when nothing more will be appended
	drain    sync.Once
}

// New makes a server that reads a journal, and the state that its entries come
// to. It serves from StartServing on. New fails only where its metrics are registered already.
func New(cfg Config, j Journal, state State) (*Server, error) {
	if cfg.Progress <= 0 {
		cfg.Progress = DefaultProgress
	}
	cfg.Progress = max(cfg.Progress, time.Millisecond)
	if cfg.MaxConnections <= 0 {
		cfg.MaxConnections = DefaultMaxConnections
	}
	if cfg.MaxConnectionsPerAddress <= 0 {
		cfg.MaxConnectionsPerAddress = DefaultMaxConnectionsPerAddress
	}
	if cfg.MaxSubscribers <= 0 {
		cfg.MaxSubscribers = DefaultMaxSubscribers
	}
	if cfg.Stall <= 0 {
		cfg.Stall = DefaultStall
	}
	cfg.Stall = max(cfg.Stall, 10*time.Millisecond)
	if cfg.MaxSnapshots <= 0 {
		cfg.MaxSnapshots = DefaultMaxSnapshots
	}
	if cfg.SnapshotWait <= 0 {
		cfg.SnapshotWait = DefaultSnapshotWait
	}
	cfg.SnapshotWait = max(cfg.SnapshotWait, time.Millisecond)
	if cfg.MaxRetained <= 0 {
		cfg.MaxRetained = DefaultMaxRetained
	}
	if cfg.FilterBytes <= 0 {
		cfg.FilterBytes = DefaultFilterBytes
	}
	cfg.FilterBytes = max(cfg.FilterBytes, MinFilterBytes)
	if cfg.ResponseBytes <= 0 {
		cfg.ResponseBytes = DefaultResponseBytes
	}
	cfg.ResponseBytes = min(max(cfg.ResponseBytes, MinResponseBytes), MaxResponseBytes)
	if cfg.PingInterval <= 0 {
		cfg.PingInterval = DefaultPingInterval // what the stock settings of Python's and Rust's clients come to
	}
	cfg.PingInterval = max(cfg.PingInterval, time.Second)
	cfg.MaxConnectionAge = max(cfg.MaxConnectionAge, 0)
	if cfg.MaxConnectionAgeGrace <= 0 {
		cfg.MaxConnectionAgeGrace = DefaultMaxConnectionAgeGrace
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Registerer == nil {
		cfg.Registerer = prometheus.NewRegistry()
	}
	s := &Server{
		cfg: cfg, journal: j, state: state, health: health.NewServer(), draining: make(chan struct{}),
		age: connectionAge{max: cfg.MaxConnectionAge, grace: cfg.MaxConnectionAgeGrace},
	}
	s.subscribers.limit, s.replays.limit, s.calls.limit = cfg.MaxSubscribers, cfg.MaxSubscribers, math.MaxInt
	s.snapshots.limit, s.snapshots.line, s.snapshots.wait = cfg.MaxSnapshots, cfg.MaxSubscribers, cfg.SnapshotWait
	s.conns = newConnections(newQuota("connections", cfg.MaxConnections, cfg.MaxConnectionsPerAddress), s.connectionRefused)
	s.watches = newQuota("health_watches", cfg.MaxConnections, cfg.MaxConnectionsPerAddress)
	s.reflections = newQuota("reflection_streams", maxReflections, maxReflectionsPerAddress)
	s.arriving, s.unknownPeer = make(chan struct{}, maxArriving), newPeerAddress(netip.Prefix{})
	s.tokensLookups = newQueryLimiter("tokens_lookup", maxTokensLookups)
	s.blockLookups = newQueryLimiter("block_lookup", maxBlockLookups)
	s.workersQueries = newQueryLimiter("workers", maxWorkersQueries)
	s.filterBytes = budget.New("filter_bytes", cfg.FilterBytes)
	var err error
	if s.metrics, err = newMetrics(cfg.Registerer, s); err != nil {
		return nil, fmt.Errorf("register server metrics: %w", err)
	}
	calls := grpcprom.NewServerMetrics()
	if err := cfg.Registerer.Register(calls); err != nil {
		return nil, fmt.Errorf("register call metrics: %w", err)
	}
	s.grpc = grpc.NewServer(s.options(calls)...)
	kvcastv1.RegisterRouterEventServiceServer(s.grpc, routerEvents{Server: s})
	kvcastv1.RegisterWorkerServiceServer(s.grpc, workers{Server: s})
	healthv1.RegisterHealthServer(s.grpc, healthService{s.health})
	reflection.Register(s.grpc)
	s.setHealth(healthv1.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

// options are those of gRPC. Calls go through the interceptors in their order:
// one that is refused costs no more than that.
func (s *Server) options(calls *grpcprom.ServerMetrics) []grpc.ServerOption {
	stream := []grpc.StreamServerInterceptor{streamArrived, calls.StreamServerInterceptor(), s.limitOpenStreams}
	unary := []grpc.UnaryServerInterceptor{unaryArrived, calls.UnaryServerInterceptor()}
	if s.cfg.Tokens != nil {
		authStream, authUnary := s.authenticateCalls()
		stream, unary = append(stream, authStream), append(unary, authUnary)
	}
	logStream, logUnary := logCalls(s.cfg.Logger)
	recovering := recovery.WithRecoveryHandlerContext(s.recovered)
	stream = append(stream, logStream, recovery.StreamServerInterceptor(recovering))
	unary = append(unary, logUnary, recovery.UnaryServerInterceptor(recovering))
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.MaxConcurrentStreams(s.maxStreams()),
		grpc.StaticStreamWindowSize(receiveWindow),
		grpc.StaticConnWindowSize(receiveWindow),
		grpc.InTapHandle(s.receiveCall),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: s.cfg.PingInterval * 9 / 10, PermitWithoutStream: true, // a timer may be early
		}),
		grpc.KeepaliveParams(s.age.keepalive(keepalive.ServerParameters{Time: deadAfter, Timeout: deadTimeout})),
		grpc.ChainStreamInterceptor(stream...),
		grpc.ChainUnaryInterceptor(unary...),
	}
	if s.cfg.TLS != nil {
		secured := s.cfg.TLS.Clone()
		secured.MinVersion = max(secured.MinVersion, tls.VersionTLS12)
		options = append(options, grpc.Creds(credentials.NewTLS(secured))) // which offers h2 by ALPN
	}
	return options
}

// maxStreams is how many calls may be open over one connection: a proxy may have all
// subscribers over one, with a health watch each, replays, and calls that end at once.
func (s *Server) maxStreams() uint32 {
	return uint32(min(2*s.cfg.MaxSubscribers+min(s.cfg.MaxConnections, s.cfg.MaxConnectionsPerAddress), math.MaxInt32))
}

// connectionRefused logs that a connection was refused.
func (s *Server) connectionRefused(from net.Addr, why error) {
	heldBack, ok := s.refusedConnections.line()
	if !ok {
		return
	}
	limit, setting := s.cfg.MaxConnections, "subscribers.max_connections"
	if errors.Is(why, errAddressShare) {
		limit, setting = s.cfg.MaxConnectionsPerAddress, "subscribers.max_connections_per_address"
	}
	s.cfg.Logger.Warn("refused connection", "peer.address", from.String(), "limit", limit, "setting", setting, "held_back", heldBack)
}

// Serve accepts connections until Shutdown, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(s.conns.listen(l))
	if err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve gRPC: %w", err)
	}
	return nil
}

// Shutdown ends every Subscribe stream once it has sent all that the journal
// holds, to which nothing may be appended any more, lets snapshots and replays
// come to their end, and then ends the server. When ctx ends first, streams
// whose clients do not read are cut off. What else is open (health watches,
// connections that never said a word) is not waited for longer than a second.
func (s *Server) Shutdown(ctx context.Context) {
	s.StopServing()
	s.drain.Do(func() { close(s.draining) })
	s.calls.wait(ctx)
	closing, cancel := context.WithTimeout(ctx, closingTime)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
	case <-closing.Done():
		// Both ways to stop wait for connections that have not finished their
		// handshake, so those have to be closed beneath gRPC.
		s.conns.close()
		s.grpc.Stop()
		<-done
	}
}

func (s *Server) isDraining() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}
