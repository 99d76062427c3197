package simulator

import (
	"fmt"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// traceTick is how long an engine's step takes in the time of a trace: each request
// that runs generates a token.
const traceTick = 25 * time.Millisecond

// maxRunning is the most requests that run at a time, the others wait: vLLM's usual
// max_num_seqs.
const maxRunning = 256

// traceLoad runs the requests of a trace on a Pool: they start in order once they
// are due and fit beside those that run, generate a token a tick, and finish. It
// is deterministic.
type traceLoad struct {
	pool    *Pool
	speed   float64
	trace   *Trace
	arrived int   // requests that are waiting or have started
	begun   int   // requests that have started, or never will
	tick    int64 // the next one
	running []*traceRun
	stuck   bool // the next one has no room before one that runs has finished
	refused uint64
	cut     uint64
}

// traceRun is a request that runs.
type traceRun struct {
	request *Request
	id      uint64 // of what it generates
	done    int    // tokens generated
	want    int
}

func newTraceLoad(trace *Trace, pool *Pool, speed float64) (*traceLoad, error) {
	if TraceBlock%pool.cfg.BlockSize != 0 {
		return nil, fmt.Errorf("configure trace: a block_size of %d does not divide %d, the trace's", pool.cfg.BlockSize, TraceBlock)
	}
	return &traceLoad{pool: pool, speed: speed, trace: trace}, nil
}

// due skips the time in which nothing runs.
func (l *traceLoad) due() (time.Duration, bool) {
	tick := l.tick
	if len(l.running) == 0 && l.begun == l.arrived {
		if l.arrived == len(l.trace.Requests) {
			return 0, false
		}
		tick = max(tick, tickOf(l.trace.Requests[l.arrived].At))
	}
	if l.speed == 0 {
		return 0, true
	}
	return time.Duration(float64(tick) * float64(traceTick) / l.speed), true
}

// tickOf returns the first tick that is not before a time.
func tickOf(at time.Duration) int64 { return int64((at + traceTick - 1) / traceTick) }

func (l *traceLoad) step() []wire.Event {
	if len(l.running) == 0 && l.begun == l.arrived && l.arrived < len(l.trace.Requests) {
		l.tick = max(l.tick, tickOf(l.trace.Requests[l.arrived].At))
	}
	for l.arrived < len(l.trace.Requests) && tickOf(l.trace.Requests[l.arrived].At) <= l.tick {
		l.arrived++
	}
	l.tick++
	// Those that run go first, as in vLLM's scheduler.
	return append(l.generate(), l.begin()...)
}

// begin starts those that wait, in order, until one has no room.
func (l *traceLoad) begin() []wire.Event {
	var events []wire.Event
	for l.begun < l.arrived && len(l.running) < maxRunning && !l.stuck {
		req := &l.trace.Requests[l.begun]
		if req.Input/l.pool.cfg.BlockSize > l.pool.cfg.Capacity {
			l.refused++
			l.begun++
			continue
		}
		r, more, ok := l.pool.Start(req.Prompt())
		if !ok {
			l.stuck = true
			break
		}
		events = append(events, more...)
		l.running = append(l.running, &traceRun{request: r, id: outputs | uint64(l.begun), want: req.Output})
		l.begun++
	}
	return events
}

// generate gives every request that runs a token, and finishes those that have
// all.
func (l *traceLoad) generate() []wire.Event {
	var events []wire.Event
	going := l.running[:0]
	for _, r := range l.running {
		if r.done < r.want {
			more, ok := r.request.Extend(traceToken(r.id, uint64(r.done)))
			events = append(events, more...)
			if !ok {
				l.cut++
				r.want = r.done
			} else {
				r.done++
			}
		}
		if r.done == r.want {
			r.request.Finish()
			l.stuck = false
			continue
		}
		going = append(going, r)
	}
	clear(l.running[len(going):])
	l.running = going
	return events
}

func (l *traceLoad) restart() {
	for _, r := range l.running {
		r.request.Finish()
		l.cut++
	}
	clear(l.running)
	l.running, l.stuck = l.running[:0], false
	l.pool.Restart()
}

func (l *traceLoad) lost() (refused, cut uint64) { return l.refused, l.cut }
