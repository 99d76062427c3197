// Package workload decides what a simulated engine computes, and when.
//
// A seed, or a trace of requests, flows in; requests to a block pool and their events flow
// out, step by step. Equal input gives equal steps.
package workload

import (
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Workload runs requests on a block pool. It is for one goroutine.
type Workload interface {
	// Due returns the time of the next step since the start, and false where there is no
	// further step.
	Due() (time.Duration, bool)
	// Step runs the next step, and returns its events, of which there may be none.
	Step() []wire.Event
	// Restart ends all running requests and empties the pool, as the end of the engine's
	// process does.
	Restart()
	// Lost returns how many requests were refused, and how many were cut.
	Lost() (refused, cut uint64)
}
