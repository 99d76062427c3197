package workload

import (
	"fmt"
	"time"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// traceTick is the duration of an engine's step in trace time: each running request generates a
// token.
const traceTick = 25 * time.Millisecond

// maxRunning is the maximum number of running requests, the usual max_num_seqs of vLLM. Further
// requests wait.
const maxRunning = 256

// TraceRun is a Workload that runs a trace: its requests start in order once they are due and fit
// beside the running ones, generate a token per tick, and finish.
type TraceRun struct {
	pool    *blockpool.Pool
	speed   float64
	trace   *Trace
	arrived int   // requests that wait, run or have ended
	begun   int   // requests that no longer wait
	tick    int64 // of the next step
	running []*traceRequest
	blocked bool // the next request does not fit until a running one finishes
	refused uint64
	cut     uint64
}

// traceRequest is a running request.
type traceRequest struct {
	request *blockpool.Request
	id      uint64 // of its generated tokens
	done    int    // generated tokens
	want    int    // tokens to generate
}

// NewTraceRun returns the workload of a trace, with the time accelerated by a factor; 0 means as
// fast as possible. The pool's block size must divide TraceBlock.
func NewTraceRun(trace *Trace, pool *blockpool.Pool, speed float64) (*TraceRun, error) {
	if TraceBlock%pool.BlockSize() != 0 {
		return nil, fmt.Errorf("configure trace: a block_size of %d does not divide %d, the trace's", pool.BlockSize(), TraceBlock)
	}
	return &TraceRun{pool: pool, speed: speed, trace: trace}, nil
}

// Due implements Workload. It skips the time during which no request runs.
func (l *TraceRun) Due() (time.Duration, bool) {
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

// Step implements Workload.
func (l *TraceRun) Step() []wire.Event {
	if len(l.running) == 0 && l.begun == l.arrived && l.arrived < len(l.trace.Requests) {
		l.tick = max(l.tick, tickOf(l.trace.Requests[l.arrived].At))
	}
	for l.arrived < len(l.trace.Requests) && tickOf(l.trace.Requests[l.arrived].At) <= l.tick {
		l.arrived++
	}
	l.tick++
	// Running requests come first, as in vLLM's scheduler.
	return append(l.generate(), l.begin()...)
}

// begin starts the waiting requests, in order, until one does not fit.
func (l *TraceRun) begin() []wire.Event {
	var events []wire.Event
	for l.begun < l.arrived && len(l.running) < maxRunning && !l.blocked {
		req := &l.trace.Requests[l.begun]
		if req.Input/l.pool.BlockSize() > l.pool.Capacity() {
			l.refused++
			l.begun++
			continue
		}
		r, more, ok := l.pool.Start(req.Prompt())
		if !ok {
			l.blocked = true
			break
		}
		events = append(events, more...)
		l.running = append(l.running, &traceRequest{request: r, id: outputID | uint64(l.begun), want: req.Output})
		l.begun++
	}
	return events
}

// generate generates a token for every running request, and finishes those that have all.
func (l *TraceRun) generate() []wire.Event {
	var events []wire.Event
	unfinished := l.running[:0]
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
			l.blocked = false
			continue
		}
		unfinished = append(unfinished, r)
	}
	clear(l.running[len(unfinished):])
	l.running = unfinished
	return events
}

// Restart implements Workload. Running requests count as cut.
func (l *TraceRun) Restart() {
	for _, r := range l.running {
		r.request.Finish()
		l.cut++
	}
	clear(l.running)
	l.running, l.blocked = l.running[:0], false
	l.pool.Restart()
}

// Lost implements Workload: refused requests have a prompt that exceeds the pool, and cut ones
// ended before they had generated all their tokens.
func (l *TraceRun) Lost() (refused, cut uint64) { return l.refused, l.cut }
