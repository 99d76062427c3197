package query

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Workers is kvcast workers.
type Workers struct {
	flags
	Name   []string `arg:"" optional:"" help:"Only these workers, as --worker."`
	Worker []string `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Model  []string `placeholder:"NAME" help:"Only workers with these models. Repeatable."`
}

// Help implements kong.HelpProvider.
func (*Workers) Help() string {
	return cli.Examples(
		"kvcast workers",
		"kvcast workers vllm-0 vllm-1",
		"kvcast workers --model Qwen/Qwen3-0.6B",
		"kvcast workers -o json | jq -r 'select(.state != \"WORKER_STATE_LIVE\").name'") + `
SOURCE is the state of the connection to an engine: connecting, catching_up (its replay is being read), live, repairing (a replay after a gap), suspect (silent for long), stopped. The blocks that kvcast lists for an INCOMPLETE rank may differ from the engine's.

With several servers on one journal, INSTANCE is the server that reads the worker's engines, and SOURCE is known to that server alone. kvcast status lists the servers.`
}

// Run prints a line for each dp rank and source, or an object for each worker.
func (c *Workers) Run(ctx context.Context, std cli.Process) error {
	filter := cli.Filter{Worker: slices.Concat(c.Name, c.Worker), Model: c.Model}
	return c.call(std, func(client kvcastv1.RouterEventServiceClient) error {
		if err := filter.CheckExists(ctx, client); err != nil {
			return err
		}
		list, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: filter.Proto()})
		if err != nil {
			return err
		}
		workers := list.GetWorkers()
		switch {
		case c.Output == "text" && len(workers) > 0:
			return writeTable(std.Out, workers)
		case c.Output == "text":
			_, err := fmt.Fprintln(std.Out, "no workers")
			return err
		}
		for _, w := range workers {
			if err := output.WriteJSON(std.Out, w); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeTable writes a line for each source of each dp rank.
func writeTable(out io.Writer, workers []*kvcastv1.WorkerStatus) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	owner := func(string) string { return "" }
	if output.HasOwners(workers) {
		owner = func(cell string) string { return cell + "\t" }
	}
	_, _ = fmt.Fprintln(t, owner("INSTANCE")+"WORKER\tMODEL\tSTATE\tRANK\tSOURCE\tBLOCKS\tGAPS\tLAST SEQ\tREAD FROM\tENDPOINT")
	for _, w := range workers {
		row := func(rank, source, blocks, gaps, lastSeq, readFrom string) {
			_, _ = fmt.Fprintln(t, owner(output.Owner(w))+strings.Join([]string{
				output.Printable(w.GetName()), output.Printable(cmp.Or(w.GetModel(), "-")), output.WorkerState(w.GetState()),
				rank, source, blocks, gaps, lastSeq, readFrom, output.Printable(cmp.Or(w.GetEndpoint(), "-")),
			}, "\t"))
		}
		ranks := output.Ranks(w)
		for _, r := range ranks {
			rank, blocks, gaps := fmt.Sprint(r.GetDpRank()), blocksByTier(r.GetBlocks()), output.Gaps(r)
			sources := output.RankSources(w, r.GetDpRank())
			for _, s := range sources {
				lastSeq := "-"
				if s.GetStarted() {
					lastSeq = fmt.Sprint(s.GetLastSeq())
				}
				row(rank, output.EnumName(s.GetState(), "SOURCE_STATE_"), blocks, gaps, lastSeq, s.GetEndpoint())
			}
			if len(sources) == 0 {
				row(rank, "-", blocks, gaps, "-", "-")
			}
		}
		if len(ranks) == 0 {
			row("-", "-", "-", "-", "-", "-")
		}
	}
	return t.Flush()
}

// blocksByTier returns numbers of blocks such as "512, disk 2048". The tier device is omitted.
func blocksByTier(tiers []*kvcastv1.TierBlocks) string {
	if len(tiers) == 0 {
		return "0"
	}
	parts := make([]string, len(tiers))
	for i, t := range tiers {
		parts[i] = fmt.Sprintf("%s %d", output.TierName(t.GetTier()), t.GetBlocks())
	}
	return strings.TrimPrefix(strings.Join(parts, ", "), "device ")
}

// Status is kvcast status.
type Status struct{ flags }

// Help implements kong.HelpProvider.
func (*Status) Help() string {
	return cli.Examples("kvcast status", "kvcast status --addr kvcast.default.svc:50051 -o json") + `
With several servers on one journal, each has a line: WORKERS is the number of workers that it reads (- if it reads none), and BEHIND the number of entries that it lags behind the server that answers, by its last heartbeat.`
}

// Run prints the server's status.
func (c *Status) Run(ctx context.Context, std cli.Process) error {
	return c.call(std, func(client kvcastv1.RouterEventServiceClient) error {
		s, err := client.GetStatus(ctx, &kvcastv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if c.Output == "json" {
			return output.WriteJSON(std.Out, s)
		}
		return writeStatus(std.Out, s)
	})
}

// writeStatus writes the status of a server, and of the servers that share its journal.
func writeStatus(out io.Writer, s *kvcastv1.GetStatusResponse) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(t, "version\t%s\nepoch\t%s\nentries\t%d to %d (%.1f MiB)\nworkers\t%d\nblocks\t%d\nsubscribers\t%d\n",
		s.GetVersion(), s.GetEpoch(), s.GetOldestSeq(), s.GetNewestSeq(), float64(s.GetJournalBytes())/(1<<20),
		s.GetWorkers(), s.GetBlocks(), s.GetSubscribers())
	if r := s.GetRecovery(); r != nil {
		_, _ = fmt.Fprintf(t, "recovering\t%d workers, entry %d of %d\n", r.GetWorkers(), r.GetAppliedSeq(), r.GetNewestSeq())
	}
	if id := s.GetInstanceId(); id != "" {
		_, _ = fmt.Fprintf(t, "instance\t%s\n", output.InstanceName(id))
	}
	if err := t.Flush(); err != nil || len(s.GetInstances()) == 0 {
		return err
	}
	_, _ = fmt.Fprintln(t, "\nINSTANCE\tSTATE\tHOST\tPID\tGRPC\tVERSION\tSTARTED\tWORKERS\tBEHIND")
	for _, i := range s.GetInstances() {
		workers := "-"
		if i.GetIngests() {
			workers = fmt.Sprint(i.GetWorkers())
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%d\n", output.InstanceName(i.GetId()), output.InstanceState(i),
			output.Printable(i.GetHost()), i.GetPid(), output.Printable(i.GetGrpcAddress()), output.Printable(i.GetVersion()),
			output.InstanceStarted(i), workers, i.GetBehind())
	}
	return t.Flush()
}
