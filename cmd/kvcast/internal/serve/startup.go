package serve

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

const (
	// startPollInterval is how often a starting server checks whether the engines have been read.
	startPollInterval = 10 * time.Millisecond
	// catchUpTimeout bounds the wait for engines that are being read, so that a replay that never ends does
	// not delay serving all others.
	catchUpTimeout = time.Minute
)

// startup is the wait before a server serves routers, until all reachable engines have been read.
type startup struct {
	sources    func() []ingest.SourceStatus
	discovered <-chan struct{} // closed once every watch has completed once
	wait       time.Duration   // for discovery and unreachable engines; 0: no wait
}

// unread counts the sources whose blocks are not known yet.
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

// run waits until discovery has completed once and every source has been read, for the wait time, or up to
// catchUpTimeout for sources that are being read. It returns those that have not been read, and false if ctx
// was done before.
func (s startup) run(ctx context.Context) (unread, bool) {
	if s.wait == 0 {
		return s.unread(), ctx.Err() == nil
	}
	began := time.Now()
	ticker := time.NewTicker(startPollInterval)
	defer ticker.Stop()
	discovered := s.discovered
	for {
		elapsed, u := time.Since(began), s.unread()
		isComplete := discovered == nil && u.connecting == 0 || elapsed >= s.wait
		if isComplete && u.catchingUp == 0 || elapsed >= max(s.wait, catchUpTimeout) {
			return u, ctx.Err() == nil
		}
		select {
		case <-ticker.C:
		case <-discovered:
			discovered = nil
		case <-ctx.Done():
			return unread{}, false
		}
	}
}
