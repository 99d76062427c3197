package ingest

import "time"

// logInterval is the shortest time between two log lines of one kind, of a worker or
// listener.
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
	logRefused

	// One kind for each refusal of a listener.
	numLogKinds = logRefused + logKind(numRefusals)
)

func logKindOf(r refusal) logKind { return logRefused + logKind(r) }

// logLimiter suppresses log lines. It is not safe for concurrent use.
type logLimiter [numLogKinds]struct {
	next time.Time
	held int
}

// allow reports whether a line may be logged now, and how many of its kind were suppressed
// since the last.
func (n *logLimiter) allow(kind logKind, now time.Time) (held int, ok bool) {
	e := &n[kind]
	if now.Before(e.next) {
		e.held++
		return 0, false
	}
	held = e.held
	e.held = 0
	e.next = now.Add(logInterval)
	return held, true
}
