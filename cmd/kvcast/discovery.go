package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/discovery"
)

// watches are what keeps the workers as they are found.
func (c config) watches(log *slog.Logger) []discovery.Watch {
	var all []discovery.Watch
	for _, d := range c.Discovery {
		w := discovery.Watch{Interval: d.Interval, Logger: log}
		if d.File != "" {
			w.Name = d.File
			// Whoever takes a worker out of a file means it.
			w.Find = func(context.Context) ([]ingestconfig.Worker, error) { return readWorkers(d.File, c.Ingest.MaxWorkers) }
		} else {
			w.Name = d.DNS
			w.Grace = c.Ingest.Grace
			w.Find = discovery.DNS{
				Host: d.DNS, Port: d.Port, ReplayPort: d.ReplayPort, Engine: d.Engine, Copies: d.Copies, Model: d.Model, BlockSize: d.BlockSize,
			}.Find
		}
		all = append(all, w)
	}
	return all
}

// checkWatchedFiles tells what is wrong with the files of workers.
func (c config) checkWatchedFiles() error {
	var errs []error
	for _, d := range c.Discovery {
		if d.File != "" {
			_, err := readWorkers(d.File, c.Ingest.MaxWorkers)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// discover runs the watches until ctx is done. It closes looked when each has
// looked once.
func discover(ctx context.Context, watches []discovery.Watch, workers discovery.Workers, looked chan<- struct{}) error {
	var all, first sync.WaitGroup
	errs := make([]error, len(watches))
	first.Add(len(watches))
	for i, w := range watches {
		w.Looked = sync.OnceFunc(first.Done)
		all.Go(func() { errs[i] = w.Run(ctx, workers) })
	}
	first.Wait()
	close(looked)
	all.Wait()
	return errors.Join(errs...)
}
