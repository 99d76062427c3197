package simulator

import (
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// load is what an engine has to do.
type load interface {
	// due is when the next step is, in time since the start; false where there is
	// none any more.
	due() (time.Duration, bool)
	// step runs it, and returns its events. There may be none.
	step() []wire.Event
	// restart ends all that runs, and empties the pool.
	restart()
	// lost are the requests refused, and those cut.
	lost() (refused, cut uint64)
}

// generated is a Workload at a rate.
type generated struct {
	*Workload
	rate  float64 // in steps a second; 0 means as fast as possible
	steps uint64
}

func (g *generated) due() (time.Duration, bool) {
	if g.rate == 0 {
		return 0, true
	}
	return time.Duration(float64(g.steps) / g.rate * float64(time.Second)), true
}

func (g *generated) step() []wire.Event {
	g.steps++
	return g.Step()
}

func (g *generated) restart() { g.Restart() }

func (g *generated) lost() (refused, cut uint64) { return 0, 0 }
