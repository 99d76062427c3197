// Package server serves routers over gRPC: the journal, and the state derived from it.
//
// Requests flow in; entries flow out, in the bytes that the journal encoded once. Each stream is a cursor in
// the journal without a queue of its own. Guarantee: a subscriber receives every entry once and in order from
// the requested start, or an error that says why not; a slow subscriber does not delay others.
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
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// A connection without traffic is pinged after keepaliveTime, and closed when no
	// answer arrives within keepaliveTimeout.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	handshakeTimeout = 5 * time.Second
	// gracefulStopTimeout bounds the graceful stop once all streams have ended.
	gracefulStopTimeout = time.Second
	maxRequestBytes     = 256 << 10
	maxHeaderBytes      = 16 << 10 // as HTTP/2 counts them; several times the largest token
	// receiveWindow is fixed: the window that gRPC adapts to a fast client grows to
	// 16 MiB, and requests are small.
	receiveWindow = 64 << 10
)

// Server serves kvcast.v1, gRPC health and reflection.
type Server struct {
	cfg         Config
	journal     Journal
	state       State
	grpc        *grpc.Server
	connections *connections
	health      *health.Server
	metrics     *metrics
	phase       atomic.Int32 // a phase

	subscribers *subscribers
	replays     *limiter
	snapshots   *limiter      // of Snapshot and Subscribe
	openStreams atomic.Int64  // of Subscribe, Snapshot and Replay
	noStreams   chan struct{} // has an element when openStreams has become 0
	draining    chan struct{} // closed when nothing more will be appended
	drain       sync.Once

	watches        *quota // of gRPC health
	reflections    *quota
	receiving      chan struct{} // has an element per call whose request is being received
	unknownPeer    *peerAddress  // of calls over connections that were not accepted here
	filterBytes    *budget.Budget
	tokensLookups  *queryLimiter
	blockLookups   *queryLimiter
	workersQueries *queryLimiter

	refusedConnections logLimiter
	refusedCalls       logLimiter
}

// New returns a server that reads a journal and the state that follows from its entries. Calls that need the
// state are refused until StartServing. New fails only if its metrics are already registered.
func New(cfg Config, j Journal, state State) (*Server, error) {
	cfg = cfg.withDefaults()
	s := &Server{
		cfg: cfg, journal: j, state: state, health: health.NewServer(),
		subscribers: newSubscribers(cfg.MaxSubscribers),
		replays:     newLimiter(cfg.MaxSubscribers, 0, 0),
		snapshots:   newLimiter(cfg.MaxSnapshots, cfg.MaxSubscribers, cfg.MaxSnapshotWait),
		noStreams:   make(chan struct{}, 1),
		draining:    make(chan struct{}),

		watches:        newQuota("health_watches", cfg.MaxConnections, cfg.MaxConnectionsPerAddress),
		reflections:    newQuota("reflection_streams", maxReflections, maxReflectionsPerAddress),
		receiving:      make(chan struct{}, maxReceiving),
		unknownPeer:    newPeerAddress(netip.Prefix{}),
		filterBytes:    budget.New("filter_bytes", cfg.MaxFilterBytes),
		tokensLookups:  newQueryLimiter("tokens_lookup", maxTokensLookups),
		blockLookups:   newQueryLimiter("block_lookup", maxBlockLookups),
		workersQueries: newQueryLimiter("workers", maxWorkersQueries),
	}
	s.connections = newConnections(newQuota("connections", cfg.MaxConnections, cfg.MaxConnectionsPerAddress), s.connectionRefused)
	var err error
	if s.metrics, err = newMetrics(s); err != nil {
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

// routerEvents implements kvcast.v1.RouterEventService.
type routerEvents struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	*Server
}

// options returns gRPC's options. Interceptors run in the order of their lists, so
// that a refused call costs as little as possible.
func (s *Server) options(calls *grpcprom.ServerMetrics) []grpc.ServerOption {
	stream := []grpc.StreamServerInterceptor{streamReceived, calls.StreamServerInterceptor(), s.limitPublicStreams}
	unary := []grpc.UnaryServerInterceptor{unaryReceived, calls.UnaryServerInterceptor()}
	if s.cfg.Tokens != nil {
		authStream, authUnary := s.authInterceptors()
		stream, unary = append(stream, authStream), append(unary, authUnary)
	}
	logStream, logUnary := logInterceptors(s.cfg.Logger)
	recovering := recovery.WithRecoveryHandlerContext(s.recovered)
	stream = append(stream, logStream, recovery.StreamServerInterceptor(recovering))
	unary = append(unary, logUnary, recovery.UnaryServerInterceptor(recovering))
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.MaxConcurrentStreams(s.maxConcurrentStreams()),
		grpc.StaticStreamWindowSize(receiveWindow),
		grpc.StaticConnWindowSize(receiveWindow),
		grpc.InTapHandle(s.startReceiving),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: s.cfg.PingInterval * 9 / 10, PermitWithoutStream: true, // timers may fire early
		}),
		grpc.KeepaliveParams(s.keepaliveParams()),
		grpc.ChainStreamInterceptor(stream...),
		grpc.ChainUnaryInterceptor(unary...),
	}
	if s.cfg.TLS != nil {
		cfg := s.cfg.TLS.Clone()
		cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS12)
		options = append(options, grpc.Creds(credentials.NewTLS(cfg)))
	}
	return options
}

// maxConcurrentStreams has room for a proxy that multiplexes all subscribers, replays
// and health watches over one connection.
func (s *Server) maxConcurrentStreams() uint32 {
	return uint32(min(2*s.cfg.MaxSubscribers+min(s.cfg.MaxConnections, s.cfg.MaxConnectionsPerAddress), math.MaxInt32))
}

// connectionRefused logs a refused connection.
func (s *Server) connectionRefused(from net.Addr, err error) {
	omitted, ok := s.refusedConnections.allow()
	if !ok {
		return
	}
	limit, setting := s.cfg.MaxConnections, "subscribers.max_connections"
	if errors.Is(err, errAddressQuota) {
		limit, setting = s.cfg.MaxConnectionsPerAddress, "subscribers.max_connections_per_address"
	}
	s.cfg.Logger.Warn("refused connection", "peer.address", from.String(), "limit", limit, "setting", setting, "suppressed", omitted)
}

// Serve accepts connections until Shutdown, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(s.connections.listen(l))
	if err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve gRPC: %w", err)
	}
	return nil
}

// Shutdown ends every Subscribe stream once it has sent all entries of the journal, waits for snapshots and
// replays, and stops the server. The caller must not append to the journal any more. When ctx ends first, the
// streams that remain are aborted. Health watches and connections without calls are closed after a second.
func (s *Server) Shutdown(ctx context.Context) {
	s.StopServing()
	s.drain.Do(func() { close(s.draining) })
	s.waitForStreams(ctx)
	ctx, cancel := context.WithTimeout(ctx, gracefulStopTimeout)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.grpc.GracefulStop()
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		// GracefulStop and Stop both wait for connections in their handshake.
		s.connections.close()
		s.grpc.Stop()
		<-stopped
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

// waitForStreams waits until no Subscribe, Snapshot or Replay stream is open.
func (s *Server) waitForStreams(ctx context.Context) {
	for s.openStreams.Load() > 0 {
		select {
		case <-s.noStreams:
		case <-ctx.Done():
			return
		}
	}
	s.signalNoStreams() // another Shutdown may wait too
}

func (s *Server) streamEnded() {
	if s.openStreams.Add(-1) == 0 {
		s.signalNoStreams()
	}
}

func (s *Server) signalNoStreams() {
	select {
	case s.noStreams <- struct{}{}:
	default:
	}
}

// phase is the state of a server. It only advances.
type phase int32

const (
	phaseStarting     phase = iota // the engines' state is not known yet: calls that need it are refused
	phaseServing                   // all calls are answered
	phaseStopping                  // as phaseServing, but health checks say NOT_SERVING
	phaseStoppedEarly              // stopped before it served: as phaseStarting
)

// StartServing answers all calls and reports SERVING to health checks from now on. Before, Subscribe, Replay,
// Snapshot and LookupBlocks end with STARTING. It does nothing after StopServing.
func (s *Server) StartServing() {
	if s.advance(phaseStarting, phaseServing) {
		s.setHealth(healthv1.HealthCheckResponse_SERVING) // ignored after a concurrent StopServing
	}
}

// StopServing reports NOT_SERVING to health checks from now on, so that load balancers
// send new clients elsewhere. All calls are still answered.
func (s *Server) StopServing() {
	if !s.advance(phaseServing, phaseStopping) && !s.advance(phaseStarting, phaseStoppedEarly) {
		s.advance(phaseServing, phaseStopping) // StartServing was called between the two
	}
	s.health.Shutdown()
}

func (s *Server) advance(from, to phase) bool {
	return s.phase.CompareAndSwap(int32(from), int32(to))
}

func (s *Server) currentPhase() phase { return phase(s.phase.Load()) }

// checkServing returns an error for a call that needs the state while it is not known.
func (s *Server) checkServing() error {
	switch s.currentPhase() {
	case phaseStarting:
		return errorf(ReasonStarting, s.journal.Bounds(), "the server is starting and does not know the engines' caches yet; try again")
	case phaseStoppedEarly:
		return shuttingDown(s.journal.Bounds())
	default:
		return nil
	}
}

// setHealth sets the health of the server and of each of its services.
func (s *Server) setHealth(to healthv1.HealthCheckResponse_ServingStatus) {
	s.health.SetServingStatus("", to)
	for name := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(name, to)
	}
}
