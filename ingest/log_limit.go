package ingest

import (
	"time"

	"github.com/kvcast/kvcast/internal/core/loglimit"
	"github.com/kvcast/kvcast/internal/wire"
)

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
	logReread
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
type logLimiter [numLogKinds]loglimit.Limit

// allow reports whether a line of a kind may be logged now: see loglimit.Limit.
func (l *logLimiter) allow(kind logKind, now time.Time) (suppressed int, ok bool) {
	return l[kind].Allow(now)
}
