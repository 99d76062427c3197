package ingest

import "time"

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
	logReplay
	logReplayHole
	logReplayHost
	logReplayDone
	logSilent
	logConflict
	logForeignHost
	logPeer
	logRefused

	// Each refusal is a kind, from logRefused on.
	numLogKinds = logRefused + logKind(numRefusals)
)

func logKindOf(r refusal) logKind { return logRefused + logKind(r) }

// logLimiter suppresses log lines. It is not safe for concurrent use.
type logLimiter [numLogKinds]struct {
	next       time.Time
	suppressed int
}

// allow reports whether a line may be logged now. suppressed is how many lines of its kind were not
// logged since the last.
func (l *logLimiter) allow(kind logKind, now time.Time) (suppressed int, ok bool) {
	e := &l[kind]
	if now.Before(e.next) {
		e.suppressed++
		return 0, false
	}
	suppressed = e.suppressed
	e.suppressed, e.next = 0, now.Add(logInterval)
	return suppressed, true
}
