package serve

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/registration"
)

// mode is where the journal is, and with that, what the server recovers, stores, and shares with other servers. Open decides it once.
type mode interface {
	entries
	// configure sets what the gRPC server asks the mode.
	configure(c *server.Config)
	// opened is called at the end of Open. It creates what reads engines, unless recover does.
	opened() error
	// recover recovers the state and creates what reads engines. It returns the workers to register again.
	recover(ctx context.Context) ([]ingestconfig.Worker, error)
	// run serves routers until ctx is done or a part fails.
	run(ctx context.Context, registered []ingestconfig.Worker, grpcDone, portsDone <-chan error) error

	// discoverer gets the workers that discovery finds.
	discoverer() discovery.Workers
	// beside does what the journal needs while engines are read, until ctx ends or the journal fails.
	beside(ctx context.Context, registered []ingestconfig.Worker, discovered <-chan struct{}) error
	// settle waits until this server has the workers that it is to read, at most for a time. It returns an error if ctx ends before.
	settle(ctx context.Context, atMost time.Duration) error
	registrations() registrations

	// isStalled reports whether the journal acknowledges nothing.
	isStalled(now time.Time) bool
	// knowledge returns how recent the index is, given the ranks of which this server knows that they are behind.
	knowledge(behind []server.RankSince, now time.Time) server.Knowledge
}

// registrations stores the workers that were registered.
type registrations interface {
	Add(ctx context.Context, w ingestconfig.Worker) error
	Remove(ctx context.Context, name string) error
}

// openMode opens the journal of the configuration.
func openMode(ctx context.Context, s *Service) (mode, error) {
	switch {
	case !s.cfg.Journal.Durable():
		return memory{journal.NewMemory(s.cfg.Journal.Retention), reading{s}}, nil
	case len(s.cfg.Journal.Servers()) == 0:
		return openAlone(ctx, s)
	case s.cfg.Cluster.Ingest:
		return openShared(ctx, s)
	default:
		return openReplica(ctx, s)
	}
}

// reading is what most modes do: the server reads all workers that discovery finds, from the start.
type reading struct{ s *Service }

func (r reading) run(ctx context.Context, registered []ingestconfig.Worker, grpcDone, portsDone <-chan error) error {
	return r.s.readEngines(ctx, registered, grpcDone, portsDone)
}

func (r reading) discoverer() discovery.Workers { return r.s.ingest }

func (reading) settle(context.Context, time.Duration) error { return nil }

// memory is the mode of a journal in the memory of the process.
type memory struct {
	*journal.Memory
	reading
}

func (m memory) configure(c *server.Config) {
	c.Workers = registration.New(workers{m.s}, m.s.cfg.RegisterHosts)
}

func (m memory) opened() error {
	p, err := pipeline.New(m.s.cfg.Pipeline, m)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	close(m.s.registered)
	return m.s.assemble(p)
}

func (memory) recover(context.Context) ([]ingestconfig.Worker, error) { return nil, nil }

func (memory) beside(ctx context.Context, _ []ingestconfig.Worker, _ <-chan struct{}) error {
	<-ctx.Done()
	return nil
}

func (memory) isStalled(time.Time) bool { return false }

func (m memory) knowledge(behind []server.RankSince, now time.Time) server.Knowledge {
	return m.s.ownKnowledge(behind, now, now)
}

func (memory) registrations() registrations { return noRegistrations{} }

// noRegistrations keeps no registrations.
type noRegistrations struct{}

func (noRegistrations) Add(context.Context, ingestconfig.Worker) error { return nil }
func (noRegistrations) Remove(context.Context, string) error           { return nil }

// ownKnowledge is the knowledge of a server that shares its journal with none. confirmed is when the journal had all that it appends.
func (s *Service) ownKnowledge(behind []server.RankSince, confirmed, now time.Time) server.Knowledge {
	confirmed = confirmed.Add(-s.cfg.Pipeline.Timeout) // events may have waited so long
	k := server.Knowledge{Behind: behind, Others: confirmed}
	if len(behind) > 0 || confirmed.Before(now) {
		k.Limit = s.cfg.Cluster.TTL
	}
	return k
}
