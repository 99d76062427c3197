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

// startup waits until discovery has found the workers, and all reachable engines have been read, before the server serves routers.
type startup struct {
	sources       func() []ingest.SourceStatus
	discovered    <-chan struct{} // closed when every discovery has succeeded
	discoveryWait time.Duration   // for discovery
	wait          time.Duration   // for unreachable engines, after discovery; 0: no wait
}

// unread is what is unknown: whether discovery has not succeeded, and how many sources have not been read, by state.
type unread struct {
	undiscovered           bool
	connecting, catchingUp int
}

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

// run waits until discovery has succeeded, and then until every source has been read. It waits at most s.discoveryWait for discovery, s.wait for
// connections, and catchUpTimeout for replays. It returns what has not been read, and false if ctx is done first.
func (s startup) run(ctx context.Context) (unread, bool) {
	discovered := s.awaitDiscovery(ctx)
	u, ok := s.awaitEngines(ctx)
	u.undiscovered = !discovered
	return u, ok
}

// awaitDiscovery reports whether discovery succeeds in time.
func (s startup) awaitDiscovery(ctx context.Context) bool {
	select {
	case <-s.discovered:
		return true
	case <-ctx.Done():
		return false
	case <-time.After(s.discoveryWait):
	}
	select {
	case <-s.discovered:
		return true
	default:
		return false
	}
}

func (s startup) awaitEngines(ctx context.Context) (unread, bool) {
	if s.wait == 0 {
		return s.unread(), ctx.Err() == nil
	}
	began := time.Now()
	ticker := time.NewTicker(startPollInterval)
	defer ticker.Stop()
	for {
		elapsed, u := time.Since(began), s.unread()
		isComplete := u.connecting == 0 || elapsed >= s.wait
		if isComplete && u.catchingUp == 0 || elapsed >= max(s.wait, catchUpTimeout) {
			return u, ctx.Err() == nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return unread{}, false
		}
	}
}
