package fleet

import (
	"context"
	"fmt"
	"time"
)

// Pause is how long a router got nothing.
type Pause struct {
	// Stream is the longest time between two entries, and Worker that between two entries of the same worker.
	Stream, Worker time.Duration
}

// String returns both times.
func (p Pause) String() string {
	return fmt.Sprintf("%v (of a worker %v)", p.Stream.Round(time.Millisecond), p.Worker.Round(time.Millisecond))
}

// pauses measures a Pause. Entries without events do not count.
type pauses struct {
	began   time.Time
	longest Pause
	last    time.Time
	workers map[string]time.Time // the last entry of each worker
}

// entry counts an entry of a worker that has come now.
func (p *pauses) entry(worker string, now time.Time) {
	if p.workers == nil {
		p.workers = make(map[string]time.Time)
	}
	if !p.last.IsZero() {
		p.longest.Stream = max(p.longest.Stream, now.Sub(p.since(p.last)))
	}
	if last, ok := p.workers[worker]; ok {
		p.longest.Worker = max(p.longest.Worker, now.Sub(p.since(last)))
	}
	p.last, p.workers[worker] = now, now
}

// since returns a time, or that of the beginning of the measurement if it is later.
func (p *pauses) since(t time.Time) time.Time {
	if t.Before(p.began) {
		return p.began
	}
	return t
}

// MeasurePause begins to measure a Pause.
func (r *Router) MeasurePause() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pauses.began, r.pauses.longest = time.Now(), Pause{}
}

// Pause waits until each of some workers has another entry, and returns the Pause since MeasurePause.
func (r *Router) Pause(ctx context.Context, workers ...string) (Pause, error) {
	called := time.Now()
	var longest Pause
	err := r.until(ctx, func() error {
		for _, w := range workers {
			if !r.pauses.workers[w].After(called) {
				return fmt.Errorf("%s has no entry for %v", w, time.Since(called))
			}
		}
		longest = r.pauses.longest
		return nil
	})
	return longest, err
}
