package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
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
	cfg = cfg.withDefaults()
	s := &Server{
		cfg: cfg, journal: j, state: state, health: health.NewServer(), draining: make(chan struct{}),
		age: connectionAge{max: cfg.MaxConnectionAge, grace: cfg.MaxConnectionAgeGrace},
	}
	s.subscribers.limit, s.replays.limit, s.calls.limit = cfg.MaxSubscribers, cfg.MaxSubscribers, math.MaxInt
	s.snapshots.limit, s.snapshots.line, s.snapshots.wait = cfg.MaxSnapshots, cfg.MaxSubscribers, cfg.MaxSnapshotWait
	s.conns = newConnections(newQuota("connections", cfg.MaxConnections, cfg.MaxConnectionsPerAddress), s.connectionRefused)
	s.watches = newQuota("health_watches", cfg.MaxConnections, cfg.MaxConnectionsPerAddress)
	s.reflections = newQuota("reflection_streams", maxReflections, maxReflectionsPerAddress)
	s.arriving, s.unknownPeer = make(chan struct{}, maxArriving), newPeerAddress(netip.Prefix{})
	s.tokensLookups = newQueryLimiter("tokens_lookup", maxTokensLookups)
	s.blockLookups = newQueryLimiter("block_lookup", maxBlockLookups)
	s.workersQueries = newQueryLimiter("workers", maxWorkersQueries)
	s.filterBytes = budget.New("filter_bytes", cfg.MaxFilterBytes)
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
