package server

import (
	"sync"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// outdated is whether other servers may have entries that this one cannot read.
type outdated struct {
	mu    sync.Mutex
	is    bool
	begun chan struct{} // closed while it is
}

func newOutdated() *outdated { return &outdated{begun: make(chan struct{})} }

// set sets it, and reports whether that is a change.
func (o *outdated) set(is bool) (changed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.is == is {
		return false
	}
	if o.is = is; is {
		close(o.begun)
	} else {
		o.begun = make(chan struct{})
	}
	return true
}

// get reports whether it is. begins is closed when it begins.
func (o *outdated) get() (is bool, begins <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.is, o.begun
}

// outdatedError returns the error of a stream that an outdated server ends or refuses.
func outdatedError(b journal.Bounds) error {
	return callerror.New(callerror.Outdated, b, "the server cannot tell whether it has the newest entries, since the NATS servers do not answer it; resume after the last position at another server, or here when it is ready")
}
