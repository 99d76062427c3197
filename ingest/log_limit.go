package ingest

import (
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

// logLimiter suppresses log lines, by their kind.
type logLimiter [numLogKinds]loglimit.Limit
