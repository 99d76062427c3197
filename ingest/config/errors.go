package config

import "errors"

// Errors of Ingest.AddWorker and Ingest.RemoveWorker.
var (
	// ErrWorkerExists: another worker has that name.
	ErrWorkerExists = errors.New("a worker of that name exists")
	// ErrNoWorker: no worker of that name was configured or added.
	ErrNoWorker = errors.New("no worker of that name was configured or added")
	// ErrTooManyWorkers: Config.MaxWorkers is reached.
	ErrTooManyWorkers = errors.New("the maximum number of workers is reached")
	// ErrTooManySources: Config.MaxSources would be exceeded.
	ErrTooManySources = errors.New("the maximum number of sources is reached")
	// ErrWorkersTooLarge: Config.WorkerBytes would be exceeded.
	ErrWorkersTooLarge = errors.New("the names, endpoints and labels of all workers take the maximum of memory")
	// ErrEnded: Run has ended.
	ErrEnded = errors.New("ingest has ended")
)
