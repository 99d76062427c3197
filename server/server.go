// Package server serves the journal, and the state that follows from its entries, to routers over gRPC.
//
// Requests flow in; entries flow out, as the bytes that the journal encoded once. Each stream is a cursor in
// the journal and has no queue. Guarantee: a subscriber receives every entry after the requested start once and
// in order, or an error with the reason; a slow subscriber does not delay others.
//
// It has more than 15 files: one or two for the calls of each service, all methods of Server. What is of use to several of them and has a
// boundary is a package: access, match, registration and those in internal.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/http"
	"slices"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/tap"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/loglimit"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

const (
	// A connection without traffic is pinged after keepaliveTime, and closed if the ping is not acknowledged within keepaliveTimeout.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	handshakeTimeout = 5 * time.Second
	// gracefulStopTimeout is the time without writes after which the graceful stop ends, once all streams have ended.
	gracefulStopTimeout = time.Second
	maxRequestBytes     = 1 << 20  // see admission.Receiving
	maxHeaderBytes      = 16 << 10 // as HTTP/2 counts them; several times the largest token
	// receiveWindow in bytes is fixed, since requests are small. A window that gRPC adapts grows to 16 MiB.
	receiveWindow = 64 << 10
	// connWindow in bytes bounds what the streams of a connection have in flight. It takes no memory: gRPC enlarges it
	// when data arrives, and the windows of the streams bound the data.
	connWindow = 16 << 20
	// minUnreadTimeout is how long an answer may at least be unread, and the end of a stream that says why it has ended.
	minUnreadTimeout = time.Minute
	// readBuffer in bytes is allocated for each connection.
	readBuffer = 4 << 10
)

// Server serves kvcast.v1, gRPC health and reflection.
type Server struct {
	serving
	cfg         Config
	journal     Journal
	index       *index.Index
	grpc        *grpc.Server
	connections *admission.Connections
	receiving   *admission.Receiving
	unread      *admission.Unread
	gate        *access.Gate
	metrics     *metrics

	streams     *openStreams
	subscribers *subscribers
	snapshots   snapshots
	queries     queries
	quotas      quotas
	sharing     sharingCache
	standing    *standing
	outcomes    *outcomes

	calls        calls
	adapters     map[string]bool             // services of RegisterAdapter
	unaryQueries grpc.UnaryServerInterceptor // of Call
}

// New returns a server of a journal, and of an index that has all of the journal's entries: j is an *follow.Follower, except in tests.
// Until StartServing, calls that need the state are refused. New panics if its metrics are already registered.
func New(cfg Config, j Journal, x *index.Index) *Server {
	cfg = cfg.withDefaults()
	all := promauto.With(prometheus.WrapRegistererWithPrefix("kvcast_server_", cfg.Registerer))
	s := &Server{
		serving: serving{health: health.NewServer(), noRouters: cfg.NoRouters, outdated: newOutdated()},
		cfg:     cfg, journal: j, index: x,
		streams:     newOpenStreams(),
		subscribers: newSubscribers(),
		snapshots:   snapshots{slots: admission.NewLimiter(cfg.MaxSnapshots, cfg.MaxSnapshots, cfg.MaxSubscribers, cfg.MaxSnapshotWait)},
		queries:     newQueries(all),
		quotas:      newQuotas(all, &cfg),
		outcomes:    newOutcomes(x, &cfg),
	}
	s.standing = &standing{sources: cfg.Sources, cluster: cfg.Cluster, knowledge: cfg.Knowledge, overpredicted: s.outcomes.overpredicted}
	s.gate = access.NewGate(access.Config{
		List: cfg.Access, ClientCertificates: cfg.ClientCertificates, ForRouters: s.isForRouters, Bounds: j.Bounds,
		Permitted: func(ctx context.Context) { s.connections.Proved(ctx) }, Close: admission.CloseConnection, Interval: cfg.AccessInterval, Logger: cfg.Logger,
	})
	connections := admission.NewQuota(all, "connections", cfg.MaxConnections, cfg.MaxConnectionsPerAddress)
	s.unread = admission.NewUnread(max(cfg.StallTimeout, minUnreadTimeout), s.connectionStalled)
	s.connections = admission.NewConnections(connections, s.unread, s.gate.Closed(), s.connectionRefused)
	s.metrics = s.newMetrics(all)
	s.receiving = admission.NewReceiving(cfg.ReceiveTimeout, s.metrics.late, s.streams.draining)
	calls := grpcprom.NewServerMetrics()
	cfg.Registerer.MustRegister(calls, indexMetrics{x}, s.outcomes, budget.Collector(append(s.quotas.budgets(), s.connections.Total(), s.unread.Total())))
	s.grpc = grpc.NewServer(s.options(calls)...)
	s.calls = s.newCalls()
	kvcastv1.RegisterRouterEventServiceServer(s.grpc, routerEvents{Server: s})
	kvcastv1.RegisterInspectionServiceServer(s.grpc, inspection{Server: s})
	kvcastv1.RegisterWorkerServiceServer(s.grpc, cfg.Workers(s))
	healthv1.RegisterHealthServer(s.grpc, healthService{s.health})
	if !cfg.NoReflection {
		reflection.Register(s.grpc)
	}
	s.services = slices.Collect(maps.Keys(s.grpc.GetServiceInfo()))
	s.setHealth(healthv1.HealthCheckResponse_NOT_SERVING)
	return s
}

// routerEvents implements kvcast.v1.RouterEventService.
type routerEvents struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	*Server
}

// options returns gRPC's options. Interceptors run in the order of their lists. Interceptors that refuse calls come
// first, so that a refused call costs little.
func (s *Server) options(calls *grpcprom.ServerMetrics) []grpc.ServerOption {
	stream := []grpc.StreamServerInterceptor{admission.StreamReceived, calls.StreamServerInterceptor(), s.limitPublicStreams}
	unary := []grpc.UnaryServerInterceptor{admission.UnaryReceived, calls.UnaryServerInterceptor()}
	logStream, logUnary := s.logInterceptors()
	recovering := recovery.WithRecoveryHandlerContext(s.recovered)
	s.unaryQueries = chainUnary(calls.UnaryServerInterceptor(), logUnary, recovery.UnaryServerInterceptor(recovering))
	if s.gate.Closed() {
		authStream, authUnary := s.gate.Interceptors()
		stream, unary = append(stream, authStream), append(unary, authUnary)
	}
	stream = append(stream, logStream, recovery.StreamServerInterceptor(recovering), s.trackAdapter)
	unary = append(unary, logUnary, recovery.UnaryServerInterceptor(recovering), s.limitAnswer)
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.MaxConcurrentStreams(s.maxConcurrentStreams()),
		grpc.StaticStreamWindowSize(receiveWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.ReadBufferSize(readBuffer),
		grpc.InTapHandle(s.admit),
		grpc.StatsHandler(s.receiving),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: s.cfg.PingInterval * 9 / 10, PermitWithoutStream: true, // timers may fire early
		}),
		grpc.KeepaliveParams(s.keepaliveParams()),
		grpc.ChainStreamInterceptor(stream...),
		grpc.ChainUnaryInterceptor(unary...),
	}
	if s.cfg.StatsHandler != nil {
		options = append(options, grpc.StatsHandler(s.cfg.StatsHandler))
	}
	if s.cfg.TLS != nil {
		cfg := s.cfg.TLS.Clone()
		cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS12)
		options = append(options, grpc.Creds(credentials.NewTLS(cfg)))
	}
	return options
}

// maxConcurrentStreams returns the limit of streams per connection. It allows a proxy to multiplex all
// subscribers, replays, MatchPrefixes streams and health watches over one connection.
func (s *Server) maxConcurrentStreams() uint32 {
	return uint32(min(2*s.cfg.MaxSubscribers+maxMatchStreamsPerAddress+min(s.cfg.MaxConnections, s.cfg.MaxConnectionsPerAddress), math.MaxInt32))
}

func (s *Server) connectionRefused(from net.Addr, err error) {
	limit, setting := s.cfg.MaxConnections, "subscribers.max_connections"
	if errors.Is(err, budget.ErrShare) {
		limit, setting = s.cfg.MaxConnectionsPerAddress, "subscribers.max_connections_per_address"
	}
	s.cfg.Logger.Warn("refused connection", loglimit.PeerAddress, from.String(), "limit", limit, "setting", setting)
}

// connectionStalled reports a connection that is closed, since the client does not read an answer.
func (s *Server) connectionStalled(from net.Addr) {
	s.metrics.unread.Inc()
	s.cfg.Logger.Warn("closed connection", loglimit.PeerAddress, from.String(), "error", "the client does not read an answer, or the end of a stream")
}

// RegisterAdapter adds a service for routers that do not use kvcast.v1, which only reads. It must be called before Serve.
func (s *Server) RegisterAdapter(d *grpc.ServiceDesc, service any) {
	if s.adapters == nil {
		s.adapters = make(map[string]bool)
	}
	s.adapters[d.ServiceName] = true
	s.grpc.RegisterService(d, service)
	s.services = append(s.services, d.ServiceName)
}

// noWorkers is the WorkerService of a server that changes no workers.
type noWorkers struct {
	kvcastv1.UnimplementedWorkerServiceServer
	bounds func() journal.Bounds
}

func (s noWorkers) RegisterWorker(context.Context, *kvcastv1.RegisterWorkerRequest) (*kvcastv1.RegisterWorkerResponse, error) {
	return nil, callerror.New(callerror.Unimplemented, s.bounds(), "this server does not register workers; name the worker in its configuration")
}

func (s noWorkers) DeregisterWorker(context.Context, *kvcastv1.DeregisterWorkerRequest) (*kvcastv1.DeregisterWorkerResponse, error) {
	return nil, callerror.New(callerror.Unimplemented, s.bounds(), "this server does not deregister workers; start it without the worker")
}

// Bounds returns those of the journal.
func (s *Server) Bounds() journal.Bounds { return s.journal.Bounds() }

// Logger returns that of the server.
func (s *Server) Logger() *slog.Logger { return s.cfg.Logger }

// HasWorker reports whether there is a worker with the name, registered or not.
func (s *Server) HasWorker(name string) bool {
	_, ok := s.index.Worker(name)
	return ok
}

// MayChangeWorkers returns the client's error if everyone who reaches the port could register workers, and that is not wanted.
func (s *Server) MayChangeWorkers() error {
	if s.gate.Closed() || s.cfg.OpenRegistration {
		return nil
	}
	return callerror.New(callerror.PermissionDenied, s.Bounds(),
		"this server has neither tokens nor client certificates, and so changes no workers: start it with --auth-tokens or --tls-client-ca, or with --auth-open-registration to let everyone change them")
}

// isForRouters reports whether access.RoleRouter permits the calls of a service: it only reads.
func (s *Server) isForRouters(service string) bool {
	return s.adapters[service] || service == kvcastv1.RouterEventService_ServiceDesc.ServiceName || service == kvcastv1.InspectionService_ServiceDesc.ServiceName
}

// SetAccess replaces Config.Access. Streams that are not permitted any more end within Config.AccessInterval. It has no effect on whether calls need a token or a
// certificate, which New determines.
func (s *Server) SetAccess(l access.List) { s.gate.Set(l) }

// AuthorizeHTTP returns a handler that passes on requests with the credentials of a router or an operator, and refuses others: see
// access.Gate.AuthorizeHTTP.
func (s *Server) AuthorizeHTTP(next http.Handler) http.Handler { return s.gate.AuthorizeHTTP(next) }

// Serve accepts connections until Shutdown, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(s.connections.Listener(l))
	if err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve gRPC: %w", err)
	}
	return nil
}

// Shutdown ends each Subscribe stream when it has sent all entries of the journal, waits for Snapshot and Replay
// streams, and stops the server. The caller must not append to the journal any more. When ctx ends, the open
// streams are aborted. Once all streams have ended, the connections are closed when a second has passed in which
// nothing was written: health watches and connections without calls do not end by themselves.
func (s *Server) Shutdown(ctx context.Context) {
	s.StopServing()
	s.streams.drain()
	s.streams.wait(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.grpc.GracefulStop()
	}()
	if !awaitStop(ctx, stopped, s.connections.Writes) {
		// GracefulStop and Stop both wait for connections in their handshake.
		s.connections.Close()
		s.grpc.Stop()
		<-stopped
	}
}

// awaitStop waits for the graceful stop. It returns false if ctx ends before, or if there are no writes for gracefulStopTimeout: a
// subscriber may still read what was sent.
func awaitStop(ctx context.Context, stopped <-chan struct{}, writes func() uint64) bool {
	quiet := time.NewTicker(gracefulStopTimeout)
	defer quiet.Stop()
	for before := writes(); ; {
		select {
		case <-stopped:
			return true
		case <-ctx.Done():
			return false
		case <-quiet.C:
			now := writes()
			if now == before {
				return false
			}
			before = now
		}
	}
}

// admit is gRPC's tap handle, see admission.Receiving.
func (s *Server) admit(ctx context.Context, call *tap.Info) (context.Context, error) {
	if access.IsPublic(call.FullMethodName) {
		clear(call.Header) // the header is not used, and would stay in memory until the stream ends
	}
	return s.receiving.Admit(ctx, call)
}

// checkServing returns an error for a call that needs the engines' state, if StartServing was not called.
func (s *Server) checkServing() error {
	switch {
	case s.cfg.NoRouters:
		return callerror.New(callerror.NotServing, s.journal.Bounds(), "this server serves no routers; call another one of the cluster")
	case s.started.Load():
		return nil
	case s.stopping.Load():
		return callerror.Draining(s.journal.Bounds())
	}
	return callerror.New(callerror.Starting, s.journal.Bounds(), "the server is starting and does not know the engines' caches yet; try again")
}
