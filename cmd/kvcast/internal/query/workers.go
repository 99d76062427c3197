package query

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
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
SOURCE is the state of the connection to an engine: connecting, catching_up (its replay is being read), live, repairing (a replay after a gap), suspect (silent for long), stopped. REPLAY is whether its replay socket answers: none, never answered, answers, does not answer (the last time). The blocks that kvcast lists for an INCOMPLETE rank may differ from the engine's. EXACT is the share of predictions that routers have reported to be right; the column is there if they report.

Below the table is a line for each reason for which a rank is degraded, and for each source that is not as it should be, with what to do. As JSON they are reasons, tier_reasons and detail of a rank, and replay_state of a source.

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
			if err := writeTable(std.Out, workers); err != nil {
				return err
			}
			return writeNotes(std.Out, workers)
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
	accuracy := func(string) string { return "" }
	if output.HasAccuracy(workers) {
		accuracy = func(cell string) string { return "\t" + cell }
	}
	_, _ = fmt.Fprintln(t, owner("INSTANCE")+"WORKER\tMODEL\tSTATE\tRANK\tSOURCE\tREPLAY\tBLOCKS\tGAPS"+accuracy("EXACT")+"\tLAST SEQ\tREAD FROM\tENDPOINT")
	for _, w := range workers {
		row := func(rank, source, replay, blocks, gaps, exact, lastSeq, readFrom string) {
			_, _ = fmt.Fprintln(t, owner(output.Owner(w))+strings.Join([]string{
				output.WorkerName(w), output.Printable(cmp.Or(w.GetModel(), "-")), output.WorkerState(w.GetState()),
				rank, source, replay, blocks, gaps + accuracy(exact), lastSeq, readFrom, output.Printable(cmp.Or(w.GetEndpoint(), "-")),
			}, "\t"))
		}
		ranks := output.Ranks(w)
		for _, r := range ranks {
			rank, blocks, gaps, exact := fmt.Sprint(r.GetDpRank()), blocksByTier(r.GetBlocks()), output.Gaps(r), output.Accuracy(r)
			sources := output.RankSources(w, r.GetDpRank())
			for _, s := range sources {
				lastSeq := "-"
				if s.GetStarted() {
					lastSeq = fmt.Sprint(s.GetLastSeq())
				}
				row(rank, output.EnumName(s.GetState(), "SOURCE_STATE_"), output.ReplayState(s), blocks, gaps, exact, lastSeq, s.GetEndpoint())
			}
			if len(sources) == 0 {
				row(rank, "-", "-", blocks, gaps, exact, "-", "-")
			}
		}
		if len(ranks) == 0 {
			row("-", "-", "-", "-", "-", "-", "-", "-")
		}
	}
	return t.Flush()
}

// writeNotes writes what is wrong with workers and what to do, after an empty line.
func writeNotes(out io.Writer, workers []*kvcastv1.WorkerStatus) error {
	if notes := output.Notes(workers); len(notes) > 0 {
		_, err := fmt.Fprintf(out, "\n%s\n", strings.Join(notes, "\n"))
		return err
	}
	return nil
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
Below is a line for each reason for which a dp rank is degraded, and for each source that is not as it should be, with what to do. kvcast workers -o json has them as JSON.

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
		list, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
		if err != nil {
			_, _ = fmt.Fprintf(std.Err, "the states of the workers are not known: %v\n", err)
		}
		return writeStatus(std.Out, s, list.GetWorkers())
	})
}

// writeStatus writes the status of a server, of the servers that share its journal, and what is wrong with its workers.
func writeStatus(out io.Writer, s *kvcastv1.GetStatusResponse, workers []*kvcastv1.WorkerStatus) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(t, "version\t%s\nepoch\t%s\nentries\t%d to %d (%.1f MiB)\nworkers\t%d\nblocks\t%d\nsubscribers\t%d\n",
		s.GetVersion(), s.GetEpoch(), s.GetOldestSeq(), s.GetNewestSeq(), float64(s.GetJournalBytes())/(1<<20),
		s.GetWorkers(), s.GetBlocks(), s.GetSubscribers())
	reasons, replays := make(map[string]int), make(map[string]int)
	for _, w := range workers {
		for _, r := range w.GetRanks() {
			for _, reason := range r.GetReasons() {
				reasons[output.EnumName(reason, "DEGRADED_REASON_")]++
			}
		}
		for _, s := range w.GetSources() {
			replays[output.ReplayState(s)]++
		}
	}
	if len(reasons) > 0 {
		_, _ = fmt.Fprintf(t, "degraded\t%s\n", countTexts(reasons))
	}
	if len(replays) > 0 {
		_, _ = fmt.Fprintf(t, "replay\t%s\n", countTexts(replays))
	}
	if r := s.GetRecovery(); r != nil {
		_, _ = fmt.Fprintf(t, "recovering\t%d workers, entry %d of %d\n", r.GetWorkers(), r.GetAppliedSeq(), r.GetNewestSeq())
	}
	if id := s.GetInstanceId(); id != "" {
		_, _ = fmt.Fprintf(t, "instance\t%s\n", output.InstanceName(id))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(s.GetInstances()) == 0 {
		return writeNotes(out, workers)
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
	if err := t.Flush(); err != nil {
		return err
	}
	return writeNotes(out, workers)
}

// countTexts returns how often each text is there, such as "gap 2, joined_late 1".
func countTexts(counts map[string]int) string {
	var parts []string
	for _, text := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", text, counts[text]))
	}
	return strings.Join(parts, ", ")
}
