package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxListed is the number of workers that are listed at most.
const maxListed = 8

// ReportNoMatch writes a hint if no worker matches the filter. This is no error, since a worker may come later. Errors of
// the server are ignored: the caller's next call reports them.
func (f *Filter) ReportNoMatch(ctx context.Context, client kvcastv1.RouterEventServiceClient, out io.Writer) {
	if len(f.Worker)+len(f.Model) == 0 {
		return
	}
	matching, err := listWorkers(ctx, client, f.Worker, f.Model)
	if err == nil && len(matching) == 0 {
		_, _ = fmt.Fprintln(out, f.noMatch(ctx, client))
	}
}

// CheckExists returns an error if a worker or a model of the filter does not exist, or no worker has one of the names and one
// of the models. The error lists the workers that exist.
func (f *Filter) CheckExists(ctx context.Context, client kvcastv1.RouterEventServiceClient) error {
	if len(f.Worker)+len(f.Model) == 0 {
		return nil
	}
	matching, err := listWorkers(ctx, client, f.Worker, f.Model)
	if err != nil {
		return err
	}
	var found Seen
	for _, w := range matching {
		found.Add(w.GetName(), w.GetModel())
	}
	if err := f.CheckOthers(ctx, client, found); err != nil {
		return err
	}
	if len(matching) == 0 {
		return f.noMatch(ctx, client)
	}
	return nil
}

// Seen are workers that exist or have existed, and their models. The zero Seen is empty.
type Seen struct{ workers, models map[string]bool }

// Add adds a worker and its model.
func (s *Seen) Add(worker, model string) {
	if s.workers == nil {
		s.workers, s.models = make(map[string]bool), make(map[string]bool)
	}
	s.workers[worker], s.models[model] = true, true
}

// CheckOthers returns an error if a worker or a model of the filter has not been seen, and does not exist.
func (f *Filter) CheckOthers(ctx context.Context, client kvcastv1.RouterEventServiceClient, seen Seen) error {
	var missing []string
	for i, name := range slices.Concat(f.Worker, f.Model) {
		known, text, names, models := seen.workers, "worker %q does not exist", []string{name}, []string(nil)
		if i >= len(f.Worker) {
			known, text, names, models = seen.models, "no worker has the model %q", nil, names
		}
		if known[name] {
			continue
		}
		with, err := listWorkers(ctx, client, names, models)
		if err != nil {
			return err
		}
		if len(with) == 0 {
			missing = append(missing, fmt.Sprintf(text, name))
		}
	}
	if missing == nil {
		return nil
	}
	return errors.New(strings.Join(slices.Compact(missing), ", ") + existing(ctx, client))
}

// noMatch returns the error that no worker matches the filter.
func (f *Filter) noMatch(ctx context.Context, client kvcastv1.RouterEventServiceClient) error {
	return fmt.Errorf("no worker matches%s%s", f.FilterFlags(), existing(ctx, client))
}

// existing returns the end of an error, with the workers that exist; empty if these cannot be listed.
func existing(ctx context.Context, client kvcastv1.RouterEventServiceClient) string {
	all, err := listWorkers(ctx, client, nil, nil)
	if err != nil { // such as too many workers for an answer
		return ""
	}
	names := []string{"none"}
	for i, w := range all {
		if i == 0 {
			names = nil
		}
		if i == maxListed {
			names = append(names, fmt.Sprintf("%d more", len(all)-i))
			break
		}
		names = append(names, fmt.Sprintf("%s (model %q)", output.Printable(w.GetName()), w.GetModel()))
	}
	return "; workers: " + strings.Join(names, ", ")
}

// listWorkers returns the workers with one of the names and one of the models; none means any.
func listWorkers(ctx context.Context, client kvcastv1.RouterEventServiceClient, names, models []string) ([]*kvcastv1.WorkerStatus, error) {
	list, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: names, Models: models}})
	return list.GetWorkers(), err
}
