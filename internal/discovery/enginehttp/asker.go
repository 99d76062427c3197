package enginehttp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// The time until an engine that has not answered is asked again doubles from minBackoff to maxBackoff.
	minBackoff, maxBackoff = time.Second, 30 * time.Second
	// refreshInterval is the time until an engine that has answered is asked again. It may have restarted at other ports.
	refreshInterval = time.Minute
	// sleepInterval is that time for an engine that can be sent to sleep.
	sleepInterval = 5 * time.Second
	// maxRequests bounds the requests in flight: so many engines that are slow to answer delay no other.
	maxRequests = 256
)

// Asker stands between a discovery.Watch and what finds its workers, and asks the engines of those with config.Worker.HTTP.
// A worker is found when its engine has answered. Until then it is in discovery.Rejected with the last error. An engine that
// has answered and fails later leaves its worker as it is. A worker whose engine sleeps is not found: its cache is empty, and nothing tells
// that in its events before it has been awake for a step.
type Asker struct {
	// Find and Follow are those of the discovery.Watch without the Asker. Follow may be nil.
	Find   func(context.Context) ([]config.Worker, error)
	Follow func(ctx context.Context, changed func())
	// Logger is optional.
	Logger *slog.Logger

	once    sync.Once
	limiter chan struct{} // semaphore of maxRequests

	mu      sync.Mutex // guards what follows
	engines map[string]*engine
	changed chan struct{} // closed and replaced when an engine has been asked with a new result
	// found receives the engines that FindAsked has found, to be asked by FollowAsked.
	found chan *engine
}

// engine is a worker whose engine is asked.
type engine struct {
	config config.Worker
	// gone is cancelled when the worker is no longer found, or has changed.
	gone context.Context
	stop context.CancelFunc

	// Asker.mu guards what follows.
	answer   config.Worker
	answered bool
	reported bool  // the engine has reported its ports
	asleep   bool  // the engine has told so
	err      error // of the last request
}

func (a *Asker) init() {
	a.once.Do(func() {
		a.engines, a.changed, a.found = make(map[string]*engine), make(chan struct{}), make(chan *engine)
		a.limiter = make(chan struct{}, maxRequests)
		if a.Logger == nil {
			a.Logger = slog.New(slog.DiscardHandler)
		}
	})
}

// FollowAsked is Follow of a discovery.Watch.
func (a *Asker) FollowAsked(ctx context.Context, changed func()) {
	a.init()
	var group sync.WaitGroup
	defer group.Wait()
	if a.Follow != nil {
		group.Go(func() { a.Follow(ctx, changed) })
	}
	for {
		select {
		case e := <-a.found:
			group.Go(func() { a.ask(ctx, e, changed) })
		case <-ctx.Done():
			return
		}
	}
}

// FindAsked is Find of a discovery.Watch. It waits until each new engine has been asked once, for 5 s at most, unless others
// have been found before.
func (a *Asker) FindAsked(ctx context.Context) ([]config.Worker, error) {
	a.init()
	workers, err := a.Find(ctx)
	var rejected discovery.Rejected
	if err != nil && !errors.As(err, &rejected) {
		return nil, err
	}
	if err := a.update(ctx, workers, rejected); err != nil {
		return nil, err
	}
	waited := time.NewTimer(timeout)
	defer waited.Stop()
	for isLast := false; ; {
		a.mu.Lock()
		unanswered := make(discovery.Rejected)
		maps.Copy(unanswered, rejected)
		found, waiting, isFirst := a.answers(workers, unanswered)
		changed := a.changed
		a.mu.Unlock()
		if waiting == 0 || !isFirst || isLast {
			if len(unanswered) > 0 {
				return found, unanswered
			}
			return found, nil
		}
		select {
		case <-changed:
		case <-waited.C:
			isLast = true
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// update has new engines asked, and those that are no longer found not any more.
func (a *Asker) update(ctx context.Context, workers []config.Worker, rejected discovery.Rejected) error {
	a.mu.Lock()
	kept := make(map[string]*engine)
	var added []*engine
	for _, w := range workers {
		if w.HTTP == "" {
			continue
		}
		e := a.engines[w.Name]
		if before := e; e == nil || !reflect.DeepEqual(e.config, w) {
			e = &engine{config: w}
			e.gone, e.stop = context.WithCancel(context.Background())
			if before != nil { // the worker stays as it was until the engine has answered
				e.answer, e.answered, e.reported = before.answer, before.answered, before.reported && before.config.HTTP == w.HTTP
				e.asleep = before.asleep
			}
			added = append(added, e)
		}
		kept[w.Name] = e
	}
	for name, e := range a.engines {
		switch {
		case kept[name] == e:
		case kept[name] == nil && rejected[name] != nil:
			kept[name] = e
		default:
			e.stop()
		}
	}
	a.engines = kept
	a.mu.Unlock()
	for _, e := range added {
		select {
		case a.found <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// answers returns the workers with what their engines have answered, the number of engines that have not been asked, and whether none has
// been. It adds the errors of those that have not answered to rejected. a.mu must be held.
func (a *Asker) answers(workers []config.Worker, rejected discovery.Rejected) (found []config.Worker, waiting int, isFirst bool) {
	isFirst = true
	for _, w := range workers {
		e := a.engines[w.Name]
		switch {
		case w.HTTP == "":
			found = append(found, w)
		case e.answered:
			if isFirst = false; !e.asleep {
				found = append(found, e.answer)
			}
		case e.err != nil:
			rejected[w.Name] = e.err
		default:
			waiting++
		}
	}
	return found, waiting, isFirst
}

// ask asks an engine until it is gone or ctx is done.
func (a *Asker) ask(ctx context.Context, e *engine, changed func()) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.gone, cancel)() // ends a request in flight
	backoff := minBackoff
	for ctx.Err() == nil {
		r, err := a.request(ctx, e.config)
		if ctx.Err() != nil {
			return
		}
		if err == nil && !r.reported && e.reported { // nothing else changes it
			err = fmt.Errorf("ask engine at %s: %w, although it has reported its ports before", e.config.HTTP, errNotFound)
		}
		wait := refreshInterval
		if err != nil {
			a.Logger.Debug("engine has not answered", "worker", e.config.Name, "error", err, "retry", backoff)
			wait, backoff = backoff, min(2*backoff, maxBackoff)
		} else {
			backoff = minBackoff
			if r.sleep != sleepUntold {
				wait = sleepInterval
			}
		}
		if a.store(e, r, err) {
			changed()
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// reply is what an engine has answered.
type reply struct {
	worker   config.Worker
	reported bool // its ports
	sleep    sleep
}

// request asks an engine once, when the limiter allows it.
func (a *Asker) request(ctx context.Context, w config.Worker) (r reply, err error) {
	select {
	case a.limiter <- struct{}{}:
	case <-ctx.Done():
		return reply{}, ctx.Err()
	}
	defer func() { <-a.limiter }()
	r.worker, r.reported, err = Ask(ctx, w)
	if err == nil && w.Sources[0].Engine == feed.EngineVLLM {
		r.sleep = askSleep(ctx, w.HTTP)
	}
	return r, err
}

// store stores the result of a request, and reports whether it changes what FindAsked returns.
func (a *Asker) store(e *engine, r reply, err error) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	asleep := r.sleep == sleepYes || r.sleep == sleepUnknown && e.asleep
	switch {
	case err == nil:
		changed = !e.answered || e.asleep != asleep || !reflect.DeepEqual(e.answer, r.worker)
		if e.asleep != asleep {
			a.logSleep(e.config.Name, asleep)
		}
		e.answer, e.answered, e.reported, e.asleep, e.err = r.worker, true, r.reported, asleep, nil
	case !e.answered:
		changed = e.err == nil || e.err.Error() != err.Error()
		e.err = err
	}
	if changed {
		close(a.changed)
		a.changed = make(chan struct{})
	}
	return changed
}

func (a *Asker) logSleep(worker string, asleep bool) {
	if asleep {
		a.Logger.Info("engine sleeps, and has discarded its cache: its worker is removed until it wakes up", "worker", worker)
	} else {
		a.Logger.Info("engine has woken up", "worker", worker)
	}
}
