package server

import (
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// serving is whether a server serves, and what health checks are answered.
type serving struct {
	health    *health.Server
	noRouters bool     // see Config.NoRouters
	services  []string // those that gRPC serves

	started  atomic.Bool // StartServing was called, before StopServing
	stalled  atomic.Bool // the argument of the last SetStalled
	stopping atomic.Bool // StopServing was called
	outdated *outdated
}

// StartServing makes the server answer all calls and report SERVING to health checks. Before StartServing,
// Subscribe, Replay, Snapshot and LookupBlocks end with STARTING. After StopServing, it does nothing.
func (s *serving) StartServing() {
	if !s.stopping.Load() {
		s.started.Store(true)
		s.refreshHealth() // ignored after a concurrent StopServing
	}
}

// SetStalled notifies the server whether the journal acknowledges no appends. While it does not, the server reports
// NOT_SERVING to health checks, since routers get no news. Calls are still answered, and streams stay open.
func (s *serving) SetStalled(stalled bool) {
	if s.stalled.Swap(stalled) != stalled {
		s.refreshHealth()
	}
}

// SetOutdatedAfter sets the time after which other servers may have entries that the server cannot read; a time that has passed: they may now.
// Until the first call, they have none. When a call finds that the server is outdated, it reports NOT_SERVING to health checks, ends the
// MatchPrefixes streams that are open, and the Subscribe streams that have all entries: their clients go to another server. From that time on,
// also if the process stood still and no call has come, Subscribe streams get no Progress, and no others are accepted. The answers of all
// other calls say how old they are.
func (s *serving) SetOutdatedAfter(at time.Time) {
	if s.outdated.set(at) {
		s.refreshHealth()
	}
}

// refreshHealth sets what health checks are answered, while the server serves.
func (s *serving) refreshHealth() {
	switch isOutdated, _ := s.outdated.get(); {
	case !s.started.Load() || s.stopping.Load():
	case s.stalled.Load() || isOutdated:
		s.setHealth(healthv1.HealthCheckResponse_NOT_SERVING)
	default:
		s.setHealth(healthv1.HealthCheckResponse_SERVING)
	}
}

// StopServing makes the server report NOT_SERVING to health checks, so that load balancers send new clients
// elsewhere. Calls are still answered.
func (s *serving) StopServing() {
	s.stopping.Store(true)
	s.health.Shutdown()
}

func (s *serving) setHealth(to healthv1.HealthCheckResponse_ServingStatus) {
	s.health.SetServingStatus("", to)
	for _, name := range s.services {
		if s.noRouters && name == kvcastv1.RouterEventService_ServiceDesc.ServiceName {
			s.health.SetServingStatus(name, healthv1.HealthCheckResponse_NOT_SERVING)
			continue
		}
		s.health.SetServingStatus(name, to)
	}
}

// Unready returns why the server is not ready; empty if it is.
func (s *serving) Unready() string {
	switch {
	case s.stopping.Load():
		return "shutting down"
	case !s.started.Load():
		return "starting"
	case s.stalled.Load():
		return "the journal does not answer"
	}
	if is, _ := s.outdated.get(); is {
		return "the NATS servers have newer entries, or do not answer"
	}
	return ""
}

// outdated is whether other servers may have entries that this one cannot read.
type outdated struct {
	mu    sync.Mutex
	after time.Time     // from then on they may; zero: never
	begun chan struct{} // closed if they might at the last set
	was   bool          // begun is closed
}

func newOutdated() *outdated { return &outdated{begun: make(chan struct{})} }

// set sets the time after which they may, and reports whether they may now, and might not at the last set, or the reverse.
func (o *outdated) set(after time.Time) (changed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.after = after
	if o.is() == o.was {
		return false
	}
	if o.was = !o.was; o.was {
		close(o.begun)
	} else {
		o.begun = make(chan struct{})
	}
	return true
}

// is reports whether they may now. The caller holds the lock.
func (o *outdated) is() bool { return !o.after.IsZero() && time.Now().After(o.after) }

// get reports whether they may now. begins is closed by the first set that finds so.
func (o *outdated) get() (is bool, begins <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.is(), o.begun
}

// outdatedError returns the error of a stream that an outdated server ends or refuses.
func outdatedError(b journal.Bounds) error {
	return callerror.New(callerror.Outdated, b, "the server cannot tell whether it has the newest entries, since the NATS servers do not answer it; resume after the last position at another server, or here when it is ready")
}
