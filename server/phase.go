package server

import (
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// phase is where a server is in its life. It goes forward only.
type phase int32

const (
	// phaseStarting: what the engines hold is not known yet. Calls that would tell
	// of it are refused.
	phaseStarting phase = iota
	// phaseServing: every call is answered.
	phaseServing
	// phaseLeaving: health checks send new clients elsewhere. Those that come all
	// the same are answered.
	phaseLeaving
	// phaseAbandoned: the server was told to leave before it served.
	phaseAbandoned
)

// StartServing lets subscribers in, and answers health checks with SERVING from
// now on. Before, Subscribe, Replay, Snapshot and LookupBlocks end with STARTING;
// what an operator asks is answered. After StopServing it does nothing.
func (s *Server) StartServing() {
	if !s.advance(phaseStarting, phaseServing) {
		return
	}
	// The health server ignores this where StopServing has come in between.
	s.setHealth(healthv1.HealthCheckResponse_SERVING)
}

// StopServing answers health checks with NOT_SERVING from now on, so that load
// balancers send nobody new; all else goes on.
func (s *Server) StopServing() {
	if !s.advance(phaseServing, phaseLeaving) && !s.advance(phaseStarting, phaseAbandoned) {
		// It may have begun to serve between the two.
		s.advance(phaseServing, phaseLeaving)
	}
	s.health.Shutdown()
}

func (s *Server) advance(from, to phase) bool {
	return s.phase.CompareAndSwap(int32(from), int32(to))
}

func (s *Server) inPhase() phase { return phase(s.phase.Load()) }

// welcome refuses a call that tells what the engines hold while that is not
// known. The call must not take anybody's place before.
func (s *Server) welcome() error {
	switch s.inPhase() {
	case phaseStarting:
		return errStarting(s.journal.Bounds())
	case phaseAbandoned:
		return errShuttingDown(s.journal.Bounds())
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
