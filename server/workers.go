package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Workers are those that are read; *ingest.Ingest is one. Its errors are those of
// ingest.Ingest.
type Workers interface {
	AddWorker(context.Context, config.Worker) error
	RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error
}

// workers is kvcast.v1.WorkerService.
type workers struct {
	kvcastv1.UnimplementedWorkerServiceServer
	*Server
}

// RegisterWorker implements kvcastv1.WorkerServiceServer.
func (s workers) RegisterWorker(ctx context.Context, req *kvcastv1.RegisterWorkerRequest) (*kvcastv1.RegisterWorkerResponse, error) {
	if s.cfg.Workers == nil {
		return nil, errUnimplemented(s.journal.Bounds(), "this server reads no workers by RegisterWorker; name the worker in its configuration")
	}
	spec := req.GetWorker()
	if violations := s.violationsOf(spec); len(violations) > 0 {
		return nil, errViolations(violations, s.journal.Bounds())
	}
	if err := s.cfg.Workers.AddWorker(ctx, workerConfig(spec)); err != nil {
		return nil, s.refused(err, spec.GetName())
	}
	return &kvcastv1.RegisterWorkerResponse{}, nil
}

// DeregisterWorker implements kvcastv1.WorkerServiceServer.
func (s workers) DeregisterWorker(ctx context.Context, req *kvcastv1.DeregisterWorkerRequest) (*kvcastv1.DeregisterWorkerResponse, error) {
	if s.cfg.Workers == nil {
		return nil, errUnimplemented(s.journal.Bounds(), "this server does not let go of workers by DeregisterWorker; start it without the worker")
	}
	name := req.GetName()
	if name == "" {
		return nil, errInvalid("name", "no worker is named: want the name of one", s.journal.Bounds())
	}
	if err := s.cfg.Workers.RemoveWorker(ctx, name, feed.RemovedDeregistered); err != nil {
		return nil, s.refused(err, name)
	}
	return &kvcastv1.DeregisterWorkerResponse{}, nil
}

// refused makes a client's error of that of Workers.
func (s workers) refused(err error, name string) error {
	b := s.journal.Bounds()
	if violations := violationsIn(err); len(violations) > 0 {
		return errViolations(violations, b)
	}
	switch {
	case errors.Is(err, config.ErrWorkerExists):
		return errWorkerExists(name, b)
	case errors.Is(err, config.ErrNoWorker):
		return errNoWorker(name, s.inStream(name), b)
	case errors.Is(err, config.ErrTooManyWorkers):
		return errTooManyWorkers(b)
	case errors.Is(err, config.ErrTooManySources):
		return errTooManySources(b)
	case errors.Is(err, config.ErrWorkersTooLarge):
		return errWorkersTooLarge(b)
	case errors.Is(err, config.ErrEnded):
		return errNoLongerReading(b)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	s.cfg.Logger.Error("workers can not be changed", "worker", name, "error", err)
	return errInternal(b)
}

// inStream tells whether there is such a worker, whoever brought it.
func (s workers) inStream(name string) bool {
	return len(s.state.Status(func(worker, _ string) bool { return worker == name })) > 0
}

// workerConfig is what ingest is told of a worker without violations.
func workerConfig(spec *kvcastv1.WorkerSpec) config.Worker {
	c := config.Worker{
		Name: spec.GetName(), Model: spec.GetModel(), BlockSize: spec.GetBlockSize(), Endpoint: spec.GetEndpoint(),
		Labels: maps.Clone(spec.GetLabels()), Consolidate: feed.ConsolidateDedup,
	}
	if spec.GetConsolidate() == kvcastv1.Consolidate_CONSOLIDATE_PASSTHROUGH {
		c.Consolidate = feed.ConsolidatePassthrough
	}
	for _, src := range spec.GetSources() {
		engine, ok := config.ParseEngine(src.GetEngine())
		if !ok { // none, or one that ingest does not allow
			engine = feed.Engine(src.GetEngine())
		}
		c.Sources = append(c.Sources, config.Source{
			Engine: engine, Connect: src.GetConnect(), Replay: src.GetReplay(),
			DPSize: int(src.GetDpSize()), Topic: src.GetTopic(), Copies: copiesOf[src.GetCopies()],
		})
	}
	return c
}

// copiesOf are what ingest calls the contract's Copies, where it is not the default.
var copiesOf = map[kvcastv1.Copies]config.Copies{
	kvcastv1.Copies_COPIES_COUNTED:        config.CopiesCounted,
	kvcastv1.Copies_COPIES_ANNOUNCED_LAST: config.CopiesAnnouncedLast,
}

// violation is a field that holds what it must not.
type violation = errdetails.BadRequest_FieldViolation

// notAllowed shows no more of a value than a client takes in an error.
func notAllowed(field string, value any, want string) *violation {
	if s, ok := value.(string); ok {
		value = fmt.Sprintf("%.64q", s)
	}
	return &violation{Field: field, Description: fmt.Sprintf("%v is not allowed: want %s", value, want)}
}

// violationsOf are those that ingest does not know of.
func (s workers) violationsOf(spec *kvcastv1.WorkerSpec) []*violation {
	var all []*violation
	wrong := func(field string, value any, want string) {
		all = append(all, notAllowed(field, value, want))
	}
	text := func(field, value string) {
		if !utf8.ValidString(value) || strings.IndexFunc(value, unicode.IsControl) >= 0 {
			wrong(field, value, "UTF-8 without control characters")
		}
	}
	if spec == nil {
		return []*violation{{Field: "worker", Description: "is missing: want a worker's name and its sources"}}
	}
	text("worker.endpoint", spec.GetEndpoint())
	for _, key := range slices.Sorted(maps.Keys(spec.GetLabels())) {
		text("worker.labels", key)
		text(fmt.Sprintf("worker.labels[%.64q]", key), spec.GetLabels()[key])
	}
	for i, src := range spec.GetSources() {
		text(fmt.Sprintf("worker.sources[%d].topic", i), src.GetTopic())
		for name, endpoint := range map[string]string{"connect": src.GetConnect(), "replay": src.GetReplay()} {
			if want := s.wantedEndpoint(endpoint); want != "" {
				wrong(fmt.Sprintf("worker.sources[%d].%s", i, name), endpoint, want)
			}
		}
		if src.GetDpSize() > feed.MaxRanks {
			wrong(fmt.Sprintf("worker.sources[%d].dp_size", i), src.GetDpSize(), fmt.Sprintf("1 to %d, or 0 for 1", feed.MaxRanks))
		}
		if _, known := kvcastv1.Copies_name[int32(src.GetCopies())]; !known {
			wrong(fmt.Sprintf("worker.sources[%d].copies", i), src.GetCopies(), "COPIES_AUTO, COPIES_COUNTED or COPIES_ANNOUNCED_LAST")
		}
	}
	switch c := spec.GetConsolidate(); c {
	case kvcastv1.Consolidate_CONSOLIDATE_UNSPECIFIED, kvcastv1.Consolidate_CONSOLIDATE_DEDUP, kvcastv1.Consolidate_CONSOLIDATE_PASSTHROUGH:
	default:
		wrong("worker.consolidate", c, "CONSOLIDATE_DEDUP or CONSOLIDATE_PASSTHROUGH")
	}
	return all
}

// wantedEndpoint says what is wanted instead of an endpoint that a caller may not name;
// nothing where it may. A caller is not to reach sockets of the server's file system, nor
// hosts that the operator has not allowed.
func (s workers) wantedEndpoint(endpoint string) string {
	switch {
	case strings.HasPrefix(endpoint, "ipc://"):
		return "tcp://HOST:PORT"
	case !strings.HasPrefix(endpoint, "tcp://"): // ingest says what is wrong with it
	case !s.cfg.RegisterHosts.Empty() && !s.cfg.RegisterHosts.ContainEndpoint(endpoint):
		return "a host that the server's operator allows (ingest.register_hosts)"
	}
	return ""
}

// violationsIn are the fields that ingest refuses.
func violationsIn(err error) []*violation {
	var all []*violation
	for _, err := range leaves(err) {
		var field *config.FieldError
		if !errors.As(err, &field) {
			continue
		}
		all = append(all, notAllowed(strings.ToLower(contractNames.Replace(field.Field)), field.Value, contractNames.Replace(field.Allowed)))
	}
	return all
}

// leaves are the errors that were joined to one.
func leaves(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, leaves(e)...)
	}
	return all
}

// contractNames are the contract's names of what ingest.Config has.
var contractNames = strings.NewReplacer("Workers[0]", "worker", "DPSize", "dp_size")
