package simulator

import (
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// TraceLoad is a trace without sockets.
type TraceLoad struct{ l *traceLoad }

func NewTraceLoad(t *Trace, p *Pool, speed float64) (TraceLoad, error) {
	l, err := newTraceLoad(t, p, speed)
	return TraceLoad{l}, err
}

func (t TraceLoad) Due() (time.Duration, bool)  { return t.l.due() }
func (t TraceLoad) Step() []wire.Event          { return t.l.step() }
func (t TraceLoad) Restart()                    { t.l.restart() }
func (t TraceLoad) Lost() (refused, cut uint64) { return t.l.lost() }
func (t TraceLoad) Running() int                { return len(t.l.running) }
