package ingest

import "time"

// noticeInterval is how often at most a kind of notice is logged for one worker
// or listener.
const noticeInterval = 10 * time.Second

// notice is a kind of log line that a faulty engine could repeat with every
// batch.
type notice uint8

const (
	noticeGap notice = iota
	noticeRestart
	noticeRejected
	noticeRank
	noticeConnect
	noticeReplay
	noticeReplayHole
	noticeReplayHost
	noticeReplayDone
	noticeSilent
	noticeConflict
	noticeForeignHost
	noticeRefused

	// A listener's notices of messages refused: one kind for each refusal.
	numNotices = noticeRefused + notice(numRefusals)
)

func noticeOf(r refusal) notice { return noticeRefused + notice(r) }

// notices holds log lines back. One goroutine uses it.
type notices [numNotices]struct {
	next time.Time
	held int
}

// due tells whether a notice is to be logged now, and how many of its kind were
// held back since the last.
func (n *notices) due(kind notice, now time.Time) (held int, ok bool) {
	e := &n[kind]
	if now.Before(e.next) {
		e.held++
		return 0, false
	}
	held = e.held
	e.held = 0
	e.next = now.Add(noticeInterval)
	return held, true
}
