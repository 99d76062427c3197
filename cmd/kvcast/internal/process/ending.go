// Package process bounds what the process uses: the memory of the Go runtime, and the time until it ends.
package process

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"time"
)

// exitTimeout bounds the time from the signal to the exit, whatever hangs. It is documented.
const exitTimeout = 10 * time.Second

// Ending is how the process ends: after exitTimeout at the latest, and at once at a second interrupt.
type Ending struct {
	log   *slog.Logger
	waits atomic.Pointer[string] // what the process waits for
}

// NewEnding returns an Ending that logs each step of the process at level DEBUG.
func NewEnding(log *slog.Logger) *Ending { return &Ending{log: log} }

// WaitsFor records what the process waits for from now on.
func (e *Ending) WaitsFor(what string) {
	e.waits.Store(&what)
	e.log.Debug("next step", "waits_for", what)
}

// Bound ends the process when ctx has been done for exitTimeout, or at an interrupt after that. The process has then stored no less than
// one that is killed.
func (e *Ending) Bound(ctx context.Context) {
	<-ctx.Done()
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt)
	var why string
	select {
	case <-time.After(exitTimeout):
		why = "it has not ended within " + exitTimeout.String()
	case <-again:
		why = "it was interrupted again"
	}
	e.log.Error("kvcast exits before everything is stopped", "why", why, "waits_for", *e.waits.Load())
	os.Exit(1)
}
