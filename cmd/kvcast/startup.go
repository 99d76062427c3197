package main

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

const (
	// startLook is how often a start looks whether the engines have been read.
	startLook = 10 * time.Millisecond
	// catchUpMost is how long a start waits for engines that are being read: one that
	// begins anew over and over, or whose replay does not end, must not keep the
	// routers away from all others.
	catchUpMost = time.Minute
)

// startup is what a server waits for before it lets routers in: that it knows what
// the engines hold, as far as that can be known.
type startup struct {
	// sources are those that are read now.
	sources func() []ingest.SourceStatus
	// looked is closed when discovery has looked everywhere once.
	looked <-chan struct{}
	// wait is how long discovery may take, and engines may not be reachable; with 0
	// nothing is waited for.
	wait time.Duration
}

// unread are the sources of which it is not known yet what they hold.
type unread struct{ connecting, catchingUp int }

func (s startup) unread() (u unread) {
	for _, src := range s.sources() {
		switch src.State {
		case ingest.SourceConnecting:
			u.connecting++
		case ingest.SourceCatchingUp:
			u.catchingUp++
		default:
		}
	}
	return u
}

// run waits until discovery has looked and no source is unread. It gives up on
// those that can not be reached after the wait, and on the others after
// catchUpMost. It returns those it gave up on, and false where ctx was done before.
func (s startup) run(ctx context.Context) (unread, bool) {
	if s.wait == 0 {
		return s.unread(), ctx.Err() == nil
	}
	patience, end := time.NewTimer(s.wait), time.NewTimer(max(s.wait, catchUpMost))
	defer patience.Stop()
	defer end.Stop()
	patient := true
	select {
	case <-s.looked:
	case <-patience.C:
		patient = false
	case <-ctx.Done():
		return unread{}, false
	}
	look := time.NewTicker(startLook)
	defer look.Stop()
	for {
		u := s.unread()
		if u.catchingUp == 0 && (u.connecting == 0 || !patient) {
			return u, ctx.Err() == nil
		}
		select {
		case <-look.C:
		case <-patience.C:
			patient = false
		case <-end.C:
			return u, true
		case <-ctx.Done():
			return unread{}, false
		}
	}
}
