package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// places may be taken by so many at a time. Whoever finds none stands in line, and
// gets the first that is given back once nobody is before. The line is bounded in
// number and in time: errLineFull and errNoPlace tell.
type places struct {
	limit int
	line  int           // how many may wait
	wait  time.Duration // how long each may

	mu      sync.Mutex // guards all below
	taken   int
	waiting []chan struct{} // in their order; each is closed when it gets a place
}

var (
	errLineFull = errors.New("too many are waiting")
	errNoPlace  = errors.New("no place became free in time")
	errStopped  = errors.New("the wait was stopped")
)

// enter takes a place. It waits for one until ctx or stop is done; for the latter
// its error is errStopped. While it waits it calls alive now and then, whose error
// ends the wait. Where it returns nil, leave has to give the place back.
func (p *places) enter(ctx context.Context, stop <-chan struct{}, every time.Duration, alive func() error) error {
	p.mu.Lock()
	if p.taken < p.limit {
		p.taken++
		p.mu.Unlock()
		return nil
	}
	if len(p.waiting) >= p.line {
		p.mu.Unlock()
		return errLineFull
	}
	mine := make(chan struct{})
	p.waiting = append(p.waiting, mine)
	p.mu.Unlock()
	timer := time.NewTimer(p.wait)
	defer timer.Stop()
	beats := time.NewTicker(every)
	defer beats.Stop()
	var err error
	for err == nil {
		select {
		case <-mine:
			return nil
		case <-beats.C:
			err = alive()
		case <-timer.C:
			err = errNoPlace
		case <-stop:
			err = errStopped
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiting, mine)
	if i < 0 {
		return nil // it got a place just now
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	return err
}

// leave gives a place back, to whoever is first in line.
func (p *places) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) == 0 {
		p.taken--
		return
	}
	close(p.waiting[0])
	p.waiting = slices.Delete(p.waiting, 0, 1)
}

// count returns how many places are taken, and how many wait for one.
func (p *places) count() (taken, waiting int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken, len(p.waiting)
}
