package config

import "errors"

// Errors of AddWorker and RemoveWorker.
var (
	// ErrWorkerExists: a worker of that name is read already.
	ErrWorkerExists = errors.New("a worker of that name exists")
	// ErrNoWorker: no worker of that name was configured or added.
	ErrNoWorker = errors.New("no worker of that name was configured or added")
	// ErrTooManyWorkers: there are MaxWorkers.
	ErrTooManyWorkers = errors.New("there are as many workers as there may be")
	// ErrTooManySources: there are MaxSources, or would be.
	ErrTooManySources = errors.New("there are as many sources as there may be")
	// ErrWorkersTooLarge: what is said of all workers comes to WorkerBytes, or would.
	ErrWorkersTooLarge = errors.New("what is said of all workers takes as much memory as it may")
	// ErrEnded: Run has ended.
	ErrEnded = errors.New("ingest has ended")
)
