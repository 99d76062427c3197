// Package registration implements kvcast.v1.WorkerService: clients register workers whose engines are read, and deregister them.
package registration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// Workers adds and removes workers of ingest. Its errors are errors of package ingest/config.
type Workers interface {
	AddWorker(context.Context, config.Worker) error
	RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error
}

// ErrNotIngesting is an error of Workers: the server reads no engines.
var ErrNotIngesting = errors.New("the server reads no engines")

// ErrNotStored is an error of Workers: the change was not made, because it cannot be stored.
var ErrNotStored = errors.New("not stored")

// Service implements kvcast.v1.WorkerService.
type Service struct {
	kvcastv1.UnimplementedWorkerServiceServer
	server  *server.Server
	workers Workers
	hosts   config.Hosts
}

// New returns the service of a server, which is a server.Config.Workers. It changes workers, and accepts hosts alone in endpoints; all if
// there are none.
func New(workers Workers, hosts config.Hosts) func(*server.Server) kvcastv1.WorkerServiceServer {
	return func(s *server.Server) kvcastv1.WorkerServiceServer {
		return &Service{server: s, workers: workers, hosts: hosts}
	}
}

// RegisterWorker implements kvcastv1.WorkerServiceServer.
func (s *Service) RegisterWorker(ctx context.Context, req *kvcastv1.RegisterWorkerRequest) (*kvcastv1.RegisterWorkerResponse, error) {
	if err := s.server.MayChangeWorkers(); err != nil {
		return nil, err
	}
	spec := req.GetWorker()
	if violations := s.validate(spec); len(violations) > 0 {
		return nil, callerror.InvalidFields(violations, s.server.Bounds())
	}
	if err := s.workers.AddWorker(ctx, workerConfig(spec)); err != nil {
		return nil, s.workerError(err, spec.GetName())
	}
	return &kvcastv1.RegisterWorkerResponse{}, nil
}

// DeregisterWorker implements kvcastv1.WorkerServiceServer.
func (s *Service) DeregisterWorker(ctx context.Context, req *kvcastv1.DeregisterWorkerRequest) (*kvcastv1.DeregisterWorkerResponse, error) {
	if err := s.server.MayChangeWorkers(); err != nil {
		return nil, err
	}
	name := req.GetName()
	if name == "" {
		return nil, callerror.InvalidField(s.server.Bounds(), "name", "is missing: want a worker's name")
	}
	if err := s.workers.RemoveWorker(ctx, name, feed.RemovedDeregistered); err != nil {
		return nil, s.workerError(err, name)
	}
	return &kvcastv1.DeregisterWorkerResponse{}, nil
}

func (s *Service) workerError(err error, name string) error {
	b := s.server.Bounds()
	if violations := fieldViolations(err); len(violations) > 0 {
		return callerror.InvalidFields(violations, b)
	}
	switch {
	case errors.Is(err, config.ErrWorkerExists):
		return callerror.New(callerror.WorkerExists, b, "worker %q exists, or its name is reserved for a worker that connects to a port; choose another name, or deregister the existing worker first", name)
	case errors.Is(err, config.ErrNoWorker) && s.server.HasWorker(name):
		return callerror.New(callerror.WorkerNotFound, b,
			"worker %q cannot be deregistered: its engine connects to a port of the server; stop the engine, and the worker is removed after the grace time", name)
	case errors.Is(err, config.ErrNoWorker):
		return callerror.New(callerror.WorkerNotFound, b, "worker %.253q does not exist; ListWorkers lists all workers", name)
	case errors.Is(err, config.ErrTooManyWorkers):
		return callerror.New(callerror.TooManyWorkers, b, "the number of workers has reached its limit; deregister another worker, or raise the limit (--ingest-max-workers)")
	case errors.Is(err, config.ErrTooManySources):
		return callerror.New(callerror.TooManySources, b, "the worker's sources, counted per dp rank, exceed the limit of all sources; deregister another worker, or raise the limit (--ingest-max-sources)")
	case errors.Is(err, config.ErrWorkersTooLarge):
		return callerror.New(callerror.WorkersTooLarge, b, "the labels and names of all registered workers exceed their memory limit; use fewer labels, deregister another worker, or raise the limit (--ingest-worker-bytes)")
	case errors.Is(err, ErrNotIngesting):
		return callerror.New(callerror.NotIngesting, b, "this server reads no engines; ask the server that reads them")
	case errors.Is(err, ErrNotStored):
		return callerror.New(callerror.NotStored, b, "worker %.253q is as before, because the change cannot be stored: %.1000v; try again", name, err)
	case errors.Is(err, config.ErrEnded):
		return callerror.New(callerror.ShuttingDown, b, "the server is shutting down; try again when a server is back")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	s.server.Logger().Error("change worker failed", "worker", name, "error", err)
	return callerror.Bug(b)
}

// workerConfig converts a spec that validate has checked.
func workerConfig(spec *kvcastv1.WorkerSpec) config.Worker {
	c := config.Worker{
		Name: spec.GetName(), Model: spec.GetModel(), BlockSize: spec.GetBlockSize(), Endpoint: spec.GetEndpoint(),
		Labels: maps.Clone(spec.GetLabels()), Consolidate: feed.ConsolidateDedup,
		Pool: spec.GetPool(), Pools: slices.Clone(spec.GetPools()),
	}
	if spec.GetConsolidate() == kvcastv1.Consolidate_CONSOLIDATE_PASSTHROUGH {
		c.Consolidate = feed.ConsolidatePassthrough
	}
	if a := spec.GetAttention(); a != nil {
		c.Attention = config.Attention{ChunkSize: int(a.GetChunkSize()), HashSeed: a.GetHashSeed(), LoRAPaths: maps.Clone(a.GetLoraPaths())}
		for _, group := range a.GetEagleGroups() {
			c.Attention.EAGLEGroups |= 1 << (group & 63)
		}
		if a.GetEagle() {
			c.Attention.EAGLEGroups = math.MaxUint64
		}
	}
	for _, src := range spec.GetSources() {
		engine, ok := config.ParseEngine(src.GetEngine())
		if !ok {
			engine = feed.Engine(src.GetEngine()) // empty, or ingest returns an error
		}
		c.Sources = append(c.Sources, config.Source{
			Engine: engine, Connect: src.GetConnect(), Replay: src.GetReplay(),
			FirstRank: int(src.GetFirstRank()), DPSize: int(src.GetDpSize()), Topic: src.GetTopic(),
			Copies: copiesModes[src.GetCopies()], Clears: clearsModes[src.GetClears()],
		})
	}
	return c
}

// copiesModes has the modes other than COPIES_AUTO.
var copiesModes = map[kvcastv1.Copies]config.Copies{
	kvcastv1.Copies_COPIES_COUNTED:        config.CopiesCounted,
	kvcastv1.Copies_COPIES_ANNOUNCED_LAST: config.CopiesAnnouncedLast,
}

// clearsModes has the modes other than CLEARS_AUTO.
var clearsModes = map[kvcastv1.Clears]config.Clears{
	kvcastv1.Clears_CLEARS_DEVICE: config.ClearsDevice,
	kvcastv1.Clears_CLEARS_ALL:    config.ClearsAll,
}

// notAllowed returns a violation with the first 64 bytes of a string value, since the size of errors is bounded.
func notAllowed(field string, value any, want string) *callerror.Violation {
	if s, ok := value.(string); ok {
		value = fmt.Sprintf("%.64q", s)
	}
	return &callerror.Violation{Field: field, Description: fmt.Sprintf("%v is not allowed: want %s", value, want)}
}

// validate checks what ingest does not check.
func (s *Service) validate(spec *kvcastv1.WorkerSpec) []*callerror.Violation {
	if spec == nil {
		return []*callerror.Violation{{Field: "worker", Description: "is missing: want a worker's name and its sources"}}
	}
	var all []*callerror.Violation
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			all = append(all, notAllowed(field, value, want))
		}
	}
	for i, src := range spec.GetSources() {
		source := fmt.Sprintf("worker.sources[%d].", i)
		for name, endpoint := range map[string]string{"connect": src.GetConnect(), "replay": src.GetReplay()} {
			want := s.wantEndpoint(endpoint)
			check(want == "", source+name, endpoint, want)
		}
		_, known := kvcastv1.Copies_name[int32(src.GetCopies())]
		check(known, source+"copies", src.GetCopies(), "COPIES_AUTO, COPIES_COUNTED or COPIES_ANNOUNCED_LAST")
		_, known = kvcastv1.Clears_name[int32(src.GetClears())]
		check(known, source+"clears", src.GetClears(), "CLEARS_AUTO, CLEARS_DEVICE or CLEARS_ALL")
	}
	for i, group := range spec.GetAttention().GetEagleGroups() {
		check(group < hybrid.MaxGroups, fmt.Sprintf("worker.attention.eagle_groups[%d]", i), group, fmt.Sprintf("0 to %d", hybrid.MaxGroups-1))
		if group >= hybrid.MaxGroups { // one error says what is wrong with all
			break
		}
	}
	_, known := kvcastv1.Consolidate_name[int32(spec.GetConsolidate())]
	check(known, "worker.consolidate", spec.GetConsolidate(), "CONSOLIDATE_DEDUP or CONSOLIDATE_PASSTHROUGH")
	return all
}

// wantEndpoint returns a description of the allowed endpoints if an endpoint is not allowed; otherwise it returns
// an empty string. Clients must not make the server connect to sockets in its file system, or to hosts that the
// operator has not allowed. ingest checks the form of endpoints.
func (s *Service) wantEndpoint(endpoint string) string {
	e, ok := config.ParseSource(endpoint)
	switch {
	case strings.HasPrefix(endpoint, "ipc://"):
		return "tcp://HOST:PORT, smg://HOST:PORT, openengine://HOST:PORT, lmcache://HOST:PORT, lmcache-coordinator://HOST:PORT, mooncake://HOST:PORT or workers://TIER"
	case !ok, e.Transport == config.TransportWorkers:
	case !s.hosts.Empty() && !s.hosts.ContainEndpoint(endpoint):
		return "a host that the server's operator allows (ingest.register_hosts)"
	}
	return ""
}

func fieldViolations(err error) (all []*callerror.Violation) {
	for _, field := range config.FieldErrors(err) {
		path := strings.Replace(field.Path(), "workers[0]", "worker", 1)
		all = append(all, notAllowed(fmt.Sprintf("%.96s", path), field.Value, field.Allowed)) // a label's key may be long
	}
	return all
}
