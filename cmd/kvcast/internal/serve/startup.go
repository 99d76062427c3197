package serve

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

const (
	// startPollInterval is the interval at which a starting server checks whether the engines have been read.
	startPollInterval = 10 * time.Millisecond
	// catchUpTimeout bounds the wait for the initial replays of engines. A replay that never ends must not keep the server from serving.
	catchUpTimeout = time.Minute
)

// startup waits until all reachable engines have been read, before the server serves routers.
type startup struct {
	sources    func() []ingest.SourceStatus
	discovered <-chan struct{} // closed after the first poll of every watch
	wait       time.Duration   // for discovery and unreachable engines; 0: no wait
}

// unread counts the sources whose blocks are unknown, by state.
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

// run waits until discovery has polled once and every source has been read. It waits at most s.wait for discovery and connections, and at
// most catchUpTimeout for replays. It returns the sources that have not been read, and false if ctx is done first.
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
