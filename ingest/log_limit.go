package ingest

import (
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// logInterval is the minimum time between two log lines of one kind, of one worker or listener.
const logInterval = 10 * time.Second

// logKind is a kind of log line that a faulty engine could cause with every batch.
type logKind uint8

const (
	logGap logKind = iota
	logRestart
	logRejected
	logRank
	logConnect
	logTooLong
	logReplay
	logReplayHole
	logReplayHost
	logReplayDone
	logSnapshot
	logSnapshotDone
	logNoSnapshot
	logSilent
	logConflict
	logForeign
	logClaim
	logRefused

	// Each refusal is a kind, from logRefused on, and each reason to skip an event, from logDoubt on.
	logDoubt    = logRefused + logKind(numRefusals)
	numLogKinds = logDoubt + logKind(wire.NumReasons)
)

func logKindOf(r refusal) logKind { return logRefused + logKind(r) }

// logLimiter suppresses log lines. It is not safe for concurrent use.
type logLimiter [numLogKinds]logLimit

// allow reports whether a line of a kind may be logged now: see logLimit.
func (l *logLimiter) allow(kind logKind, now time.Time) (suppressed int, ok bool) {
	return l[kind].allow(now)
}

// logLimit suppresses log lines of one kind. It is not safe for concurrent use.
type logLimit struct {
	next       time.Time
	suppressed int
}

// allow reports whether a line may be logged now. suppressed is how many lines were not logged since the
// last.
func (l *logLimit) allow(now time.Time) (suppressed int, ok bool) {
	if now.Before(l.next) {
		l.suppressed++
		return 0, false
	}
	suppressed = l.suppressed
	l.suppressed, l.next = 0, now.Add(logInterval)
	return suppressed, true
}
