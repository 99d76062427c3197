package discovery

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
)

// DefaultInterval is the time between two looks.
const DefaultInterval = 5 * time.Second

// Workers are what is read; *ingest.Ingest is one.
type Workers interface {
	AddWorker(context.Context, config.Worker) error
	RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error
}

// Watch keeps workers as they are found.
type Watch struct {
	// Name is what the log calls it.
	Name string
	// Find finds all workers that there are now, each name once. On an error those
	// found before stay.
	Find func(context.Context) ([]config.Worker, error)
	// Interval is the time between two looks: DefaultInterval unless set.
	Interval time.Duration
	// Grace is how long a worker may not be found before it is removed; with 0 it is
	// at the first look that does not find it.
	Grace time.Duration
	// Looked is called after each look, whatever came of it; nil means nobody is.
	Looked func()
	// Logger takes what an operator should know; nil means no one does.
	Logger *slog.Logger
}

// watching is a Watch at work.
type watching struct {
	Watch
	workers Workers
	// known are the workers that were added, by name.
	known map[string]*known
	// failed is the last error logged, so that a lasting one is not logged at every look.
	failed string
	// nobody tells that the last look found no workers.
	nobody bool
	// refused are those that could not be added, as they were then.
	refused map[string]config.Worker
}

// known is a worker that was added.
type known struct {
	config config.Worker
	// missing is since when it has not been found; zero while it is.
	missing time.Time
}

// Run looks until ctx is done or there is nothing more to add to, and returns nil.
// Workers that it added stay.
func (w Watch) Run(ctx context.Context, workers Workers) error {
	if w.Interval <= 0 {
		w.Interval = DefaultInterval
	}
	if w.Logger == nil {
		w.Logger = slog.New(slog.DiscardHandler)
	}
	w.Logger = w.Logger.With("discovery", w.Name)
	at := &watching{Watch: w, workers: workers, known: make(map[string]*known), refused: make(map[string]config.Worker)}
	ticker := time.NewTicker(w.Interval)
	defer ticker.Stop()
	for {
		err := at.look(ctx)
		if w.Looked != nil {
			w.Looked()
		}
		if errors.Is(err, config.ErrEnded) || ctx.Err() != nil {
			return nil
		}
		at.log(err)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// log logs an error once for as long as it lasts, and its end.
func (w *watching) log(err error) {
	switch {
	case err == nil && w.failed != "":
		w.failed = ""
		w.Logger.Info("workers are found again")
	case err != nil && err.Error() != w.failed:
		w.failed = err.Error()
		w.Logger.Warn("workers can not be found; those found before stay", "error", err)
	}
}

// look makes the workers those that are found now. The error is that of finding
// them, or ingest.ErrEnded.
func (w *watching) look(ctx context.Context) error {
	found, err := w.Find(ctx)
	if err != nil {
		return err
	}
	if nobody := len(found) == 0; nobody != w.nobody {
		if w.nobody = nobody; nobody {
			w.Logger.Info("no workers are found") // which a misspelt name is a reason for
		}
	}
	now := time.Now()
	all := make(map[string]config.Worker, len(found))
	for _, c := range found {
		all[c.Name] = c
	}
	for _, name := range slices.Sorted(maps.Keys(w.known)) {
		k := w.known[name]
		c, ok := all[name]
		switch {
		case ok && reflect.DeepEqual(c, k.config):
			k.missing = time.Time{}
			continue
		case ok: // it is another now
		case k.missing.IsZero() && w.Grace > 0:
			k.missing = now
			continue
		case now.Sub(k.missing) < w.Grace:
			continue
		}
		if err := w.remove(ctx, name); err != nil {
			return err
		}
	}
	maps.DeleteFunc(w.refused, func(name string, _ config.Worker) bool { _, ok := all[name]; return !ok })
	for _, c := range found {
		if w.known[c.Name] != nil {
			continue
		}
		if err := w.add(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func (w *watching) remove(ctx context.Context, name string) error {
	err := w.workers.RemoveWorker(ctx, name, feed.RemovedDiscovery)
	switch {
	case err == nil:
		w.Logger.Info("worker removed", "worker", name)
	case errors.Is(err, config.ErrNoWorker): // somebody else has
	default:
		return err
	}
	delete(w.known, name)
	return nil
}

// add adds a worker. One that can not be is tried again at each look, and logged
// once.
func (w *watching) add(ctx context.Context, c config.Worker) error {
	err := w.workers.AddWorker(ctx, c)
	switch {
	case err == nil:
		w.Logger.Info("worker found", "worker", c.Name)
		w.known[c.Name] = &known{config: c}
		delete(w.refused, c.Name)
	case errors.Is(err, config.ErrEnded) || ctx.Err() != nil:
		return err
	default:
		if was, ok := w.refused[c.Name]; !ok || !reflect.DeepEqual(was, c) {
			w.Logger.Warn("worker can not be added", "worker", c.Name, "error", err)
			w.refused[c.Name] = c
		}
	}
	return nil
}
