package serve

import (
	"log/slog"
	"time"
)

// refusal decides whether engines that connect are refused, so that they connect to another server: while the NATS servers do not
// answer this one, and others may take its workers.
type refusal struct {
	wasUnanswered bool // at the last look
	refused       bool
}

// look returns whether engines are refused. unanswered is what isUnanswered returns now, and others reports whether another server
// was there to take the workers when this one last knew. It takes two looks in a row: a server that has only stood still for a
// while gets answers again a moment later, and an engine that has stayed connected loses nothing.
func (r *refusal) look(unanswered, others bool) bool {
	r.refused = unanswered && (r.refused || r.wasUnanswered && others)
	r.wasUnanswered = unanswered
	return r.refused
}

// isUnanswered reports whether the stream has not been confirmed, or no heartbeat was read back, for longer than the TTL: other
// servers may have entries that this one lacks, or hold it for dead.
func isUnanswered(now, streamConfirmed, isolatedSince time.Time, ttl time.Duration) bool {
	return now.Sub(streamConfirmed) > ttl || !isolatedSince.IsZero() && now.Sub(isolatedSince) > ttl
}

// listeners are the ports that engines connect to.
type listeners interface {
	SuspendListeners()
	ResumeListeners() error
}

// listening suspends and resumes listeners as its refusal decides.
type listening struct {
	listeners listeners
	log       *slog.Logger
	refusal   refusal
	suspended bool
}

func (l *listening) look(unanswered, others bool) {
	refuse := l.refusal.look(unanswered, others)
	switch {
	case refuse && !l.suspended:
		l.log.Warn("engines that connect are refused, so that they connect to another server: the NATS servers do not answer this one")
		l.listeners.SuspendListeners()
		l.suspended = true
	case !refuse && l.suspended:
		if err := l.listeners.ResumeListeners(); err != nil {
			l.log.Error("engines cannot connect: it is tried again", "error", err)
			return
		}
		l.log.Info("engines that connect are accepted again")
		l.suspended = false
	}
}
