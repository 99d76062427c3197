// Package discovery finds workers while the program runs.
//
// A Watch polls for workers, for example the addresses of a DNS name, a list in a file or the pods of a Kubernetes namespace, and adds them
// to and removes them from an Ingest. It polls at an interval, and when what it watches says that it has changed. A poll that fails changes
// nothing: a broken name server or a half-written file removes no worker. A worker that is no longer found is removed after Watch.Grace.
package discovery

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// DefaultInterval is the default of Watch.Interval.
const DefaultInterval = 5 * time.Second

// minPause is the time between two polls at least, whatever changes how often: a poll compares all workers.
const minPause = 100 * time.Millisecond

// Workers adds and removes workers. *ingest.Ingest implements it.
type Workers interface {
	AddWorker(context.Context, config.Worker) error
	RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error
}

// Watch polls for workers, and adds and removes them.
type Watch struct {
	// Name names the watch in the log.
	Name string
	// Find returns all workers that exist now, with unique names. If it fails with another error than Rejected, no worker is added or removed.
	Find func(context.Context) ([]config.Worker, error)
	// Follow runs beside the polls until ctx is done; it may be nil. It calls changed to have a poll follow at once.
	Follow func(ctx context.Context, changed func())
	// Interval is the time between two polls; 0 means DefaultInterval.
	Interval time.Duration
	// Grace is how long a worker may be missing before it is removed; 0 means that the first poll without the worker removes it.
	Grace time.Duration
	// Polled is called after each poll, with its error; it may be nil.
	Polled func(error)
	// Metrics is optional.
	Metrics *Metrics
	// Logger is optional.
	Logger *slog.Logger
}

// Rejected is an error of Watch.Find, with the workers that were found with settings that are not valid, by name. They
// stay as they are: not added if they were not valid before. Other workers are added and removed.
type Rejected map[string]error

// Error returns the errors in the order of the names.
func (r Rejected) Error() string {
	all := make([]string, 0, len(r))
	for _, name := range slices.Sorted(maps.Keys(r)) {
		all = append(all, name+": "+r[name].Error())
	}
	return strings.Join(all, "; ")
}

// watcher is the state of Watch.Run.
type watcher struct {
	Watch
	workers Workers
	// known are the workers that were added, by name.
	known map[string]*knownWorker
	// rejected are the workers that could not be added, by name. A worker is logged again only if it or the error has changed.
	rejected map[string]rejection
	// lastError is the last error logged. It is logged again only after a successful poll or another error.
	lastError string
	// foundNone reports whether the last poll found no workers.
	foundNone bool
	// excess is the number of workers that the last poll found and did not add, since there were as many as are allowed.
	excess int
}

// knownWorker is a worker that was added.
type knownWorker struct {
	config config.Worker
	// missingSince is the time of the first poll that did not find the worker; zero if the last poll found it.
	missingSince time.Time
}

// rejection is a worker that could not be added.
type rejection struct {
	config config.Worker
	err    string
}

// Run polls until ctx is done or workers return config.ErrEnded, and then returns nil. It does not remove the workers that it added.
func (w Watch) Run(ctx context.Context, workers Workers) error {
	if w.Interval <= 0 {
		w.Interval = DefaultInterval
	}
	if w.Logger == nil {
		w.Logger = slog.New(slog.DiscardHandler)
	}
	w.Logger = w.Logger.With("discovery", w.Name)
	running := &watcher{Watch: w, workers: workers, known: make(map[string]*knownWorker), rejected: make(map[string]rejection)}
	changed := make(chan struct{}, 1)
	ctx, stop := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer stop()
	if w.Follow != nil {
		following.Go(func() { w.Follow(ctx, func() { signal(changed) }) })
	}
	ticker := time.NewTicker(w.Interval)
	defer ticker.Stop()
	for {
		polled := time.Now()
		err := running.poll(ctx)
		w.Metrics.polled(w.Name, err, len(running.known), len(running.rejected)+running.excess)
		if w.Polled != nil {
			w.Polled(err)
		}
		if errors.Is(err, config.ErrEnded) || ctx.Err() != nil {
			return nil
		}
		running.log(err)
		select {
		case <-ticker.C:
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(minPause - time.Since(polled)):
		case <-ctx.Done():
			return nil
		}
	}
}

// signal makes a channel with a buffer of one ready to be received from.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// log logs an error when it first occurs, and the first success after it.
func (w *watcher) log(err error) {
	switch {
	case err == nil && w.lastError != "":
		w.lastError = ""
		w.Logger.Info("discovery works again")
	case err != nil && err.Error() != w.lastError:
		w.lastError = err.Error()
		w.Logger.Warn("discovery failed; the workers found before stay", "error", err)
	}
}

// poll adds and removes workers so that they match the workers found. It returns the error of Find, or config.ErrEnded.
func (w *watcher) poll(ctx context.Context) error {
	found, err := w.Find(ctx)
	var rejected Rejected
	if err != nil && !errors.As(err, &rejected) {
		return err
	}
	if foundNone := len(found)+len(rejected) == 0; foundNone != w.foundNone {
		if w.foundNone = foundNone; foundNone {
			w.Logger.Info("no workers found") // a misspelt name is one cause
		}
	}
	byName := make(map[string]config.Worker, len(found))
	for _, c := range found {
		byName[c.Name] = c
	}
	now := time.Now()
	for _, name := range slices.Sorted(maps.Keys(w.known)) {
		k := w.known[name]
		c, ok := byName[name]
		switch {
		case ok && reflect.DeepEqual(c, k.config):
			k.missingSince = time.Time{}
			continue
		case ok: // the worker has changed
		case rejected[name] != nil:
			k.missingSince = time.Time{}
			continue
		case k.missingSince.IsZero() && w.Grace > 0:
			k.missingSince = now
			continue
		case now.Sub(k.missingSince) < w.Grace:
			continue
		}
		if err := w.remove(ctx, name); err != nil {
			return err
		}
	}
	maps.DeleteFunc(w.rejected, func(name string, _ rejection) bool {
		_, ok := byName[name]
		return rejected[name] == nil && (!ok || w.known[name] != nil)
	})
	for _, name := range slices.Sorted(maps.Keys(rejected)) {
		w.reject(config.Worker{Name: name}, rejected[name])
	}
	return w.addAll(ctx, slices.DeleteFunc(slices.Clone(found), func(c config.Worker) bool { return w.known[c.Name] != nil }))
}

// addAll adds workers until there are as many as are allowed.
func (w *watcher) addAll(ctx context.Context, workers []config.Worker) error {
	excess := 0
	for i, c := range workers {
		err := w.add(ctx, c)
		if errors.Is(err, config.ErrTooManyWorkers) {
			excess = len(workers) - i
			for _, c := range workers[i:] {
				delete(w.rejected, c.Name) // it is counted once
			}
			break
		}
		if err != nil {
			return err
		}
	}
	if excess > 0 && excess != w.excess {
		w.Logger.Warn("more workers found than ingest.max_workers allows: the last are not read", "workers", excess, "first", workers[len(workers)-excess].Name)
	}
	w.excess = excess
	return nil
}

func (w *watcher) remove(ctx context.Context, name string) error {
	err := w.workers.RemoveWorker(ctx, name, feed.RemovedDiscovery)
	switch {
	case err == nil:
		w.Logger.Info("worker removed", "worker", name)
	case !errors.Is(err, config.ErrNoWorker): // it may have been deregistered by a client
		return err
	}
	delete(w.known, name)
	return nil
}

// add adds a worker. If it cannot be added, each poll tries again, and the reason is logged once. The error is config.ErrEnded or
// config.ErrTooManyWorkers, or ctx is done.
func (w *watcher) add(ctx context.Context, c config.Worker) error {
	err := w.workers.AddWorker(ctx, c)
	switch {
	case err == nil:
		w.Logger.Info("worker found", "worker", c.Name)
		w.known[c.Name] = &knownWorker{config: c}
		delete(w.rejected, c.Name)
	case errors.Is(err, config.ErrEnded) || errors.Is(err, config.ErrTooManyWorkers) || ctx.Err() != nil:
		return err
	default:
		w.reject(c, err)
	}
	return nil
}

// reject logs that a worker cannot be added, or that its change is not valid, unless that was logged before.
func (w *watcher) reject(c config.Worker, err error) {
	now := rejection{c, err.Error()}
	if was, ok := w.rejected[c.Name]; ok && reflect.DeepEqual(was, now) {
		return
	}
	w.rejected[c.Name] = now
	if w.known[c.Name] != nil {
		w.Logger.Warn("worker stays as it was: its change is not valid", "worker", c.Name, "error", err)
		return
	}
	w.Logger.Warn("worker cannot be added", "worker", c.Name, "error", err)
}
