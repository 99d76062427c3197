// Package workload generates the requests of a simulated engine.
//
// A seed, or a trace of requests, flows in; requests to a block pool and their events flow out,
// step by step. Equal input produces equal steps.
package workload

import (
	"time"

	"github.com/kvcast/kvcast/internal/wire"
)

// Workload runs requests on a block pool. It is not safe for concurrent use.
type Workload interface {
	// Due returns the time of the next step since the start, and false if there is no further step.
	Due() (time.Duration, bool)
	// Step runs the next step, and returns its events, possibly none.
	Step() []wire.Event
	// Restart ends all running requests and empties the pool, as a restart of the engine does.
	Restart()
	// Lost returns the numbers of rejected requests and of requests that were cut short.
	Lost() (rejected, cutShort uint64)
}
