package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type workersCmd struct {
	clientFlags
	Worker []string `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Model  []string `placeholder:"NAME" help:"Only workers of these models. Repeatable."`
}

// Run lists the workers: as JSON an object a worker.
func (c *workersCmd) Run(ctx context.Context, std stdio) error {
	return c.call(func(client kvcastv1.RouterEventServiceClient) error {
		list, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{
			Filter: &kvcastv1.Filter{Workers: c.Worker, Models: c.Model},
		})
		if err != nil {
			return err
		}
		switch f := (filterFlags{Worker: c.Worker, Model: c.Model}); {
		case c.Output != "text":
		case len(list.GetWorkers()) > 0:
			return writeWorkers(std.out, list.GetWorkers())
		case f.text() != "":
			return f.nobody(ctx, client, std.out)
		default:
			_, err := fmt.Fprintln(std.out, "no workers")
			return err
		}
		for _, w := range list.GetWorkers() {
			if err := writeJSON(std.out, w); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeJSON writes a message as a line.
func writeJSON(out io.Writer, m proto.Message) error {
	raw, err := compactJSON(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\n", raw)
	return err
}

// writeWorkers writes a line for each dp rank of each worker, with how its source
// is doing, and as many where a rank has several sources. The endpoint is the
// engine's for requests, as it was configured for routers.
func writeWorkers(out io.Writer, workers []*kvcastv1.WorkerStatus) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "WORKER\tMODEL\tSTATE\tRANK\tSOURCE\tBLOCKS\tGAPS\tLAST SEQ\tREAD FROM\tENDPOINT")
	for _, w := range workers {
		state, model := lower(w.GetState().String(), "WORKER_STATE_"), visible(cmp.Or(w.GetModel(), "-"))
		endpoint := visible(cmp.Or(w.GetEndpoint(), "-"))
		ranks := ranksOf(w)
		for _, r := range ranks {
			sources := sourcesOf(w, r.GetDpRank())
			for _, s := range sources {
				lastSeq := "-"
				if s.GetStarted() {
					lastSeq = decimal(s.GetLastSeq())
				}
				_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", visible(w.GetName()), model, state,
					r.GetDpRank(), lower(s.GetState().String(), "SOURCE_STATE_"), tierBlocks(r.GetBlocks()), gaps(r), lastSeq, s.GetEndpoint(), endpoint)
			}
			if len(sources) == 0 {
				_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%d\t-\t%s\t%s\t-\t-\t%s\n", visible(w.GetName()), model, state,
					r.GetDpRank(), tierBlocks(r.GetBlocks()), gaps(r), endpoint)
			}
		}
		if len(ranks) == 0 {
			_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t-\t-\t-\t-\t-\t-\t%s\n", visible(w.GetName()), model, state, endpoint)
		}
	}
	return t.Flush()
}

// sourcesOf returns the sources of a dp rank.
func sourcesOf(w *kvcastv1.WorkerStatus, rank uint32) (all []*kvcastv1.SourceStatus) {
	for _, s := range w.GetSources() {
		if s.GetDpRank() == rank {
			all = append(all, s)
		}
	}
	return all
}

// ranksOf returns the dp ranks of a worker, those included that have a source and
// have not been heard of.
func ranksOf(w *kvcastv1.WorkerStatus) []*kvcastv1.RankStatus {
	ranks := slices.Clone(w.GetRanks())
	for _, s := range w.GetSources() {
		if !slices.ContainsFunc(ranks, func(r *kvcastv1.RankStatus) bool { return r.GetDpRank() == s.GetDpRank() }) {
			ranks = append(ranks, &kvcastv1.RankStatus{DpRank: s.GetDpRank()})
		}
	}
	slices.SortFunc(ranks, func(a, b *kvcastv1.RankStatus) int { return cmp.Compare(a.GetDpRank(), b.GetDpRank()) })
	return ranks
}

func lower(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

// tierBlocks writes such as "512" or "512, disk 2048": what is not named is on
// the device.
func tierBlocks(tiers []*kvcastv1.TierBlocks) string {
	if len(tiers) == 0 {
		return "0"
	}
	parts := make([]string, len(tiers))
	for i, t := range tiers {
		parts[i] = fmt.Sprintf("%s %d", tierName(t.GetTier()), t.GetBlocks())
	}
	return strings.TrimPrefix(strings.Join(parts, ", "), "device ")
}

// gaps writes how many there were, and whether the blocks may be wrong.
func gaps(r *kvcastv1.RankStatus) string {
	text := decimal(r.GetGaps())
	if r.GetGaps() > 0 {
		text += fmt.Sprintf(" (%d batches)", r.GetMissedBatches())
	}
	if r.GetIncomplete() {
		text += " INCOMPLETE"
	}
	return text
}

type statusCmd struct {
	clientFlags
}

// Run prints the server at a glance.
func (c *statusCmd) Run(ctx context.Context, std stdio) error {
	return c.call(func(client kvcastv1.RouterEventServiceClient) error {
		s, err := client.GetStatus(ctx, &kvcastv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if c.Output == "json" {
			return writeJSON(std.out, s)
		}
		t := tabwriter.NewWriter(std.out, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintf(t, "version\t%s\nepoch\t%s\nentries\t%d to %d (%.1f MiB)\nworkers\t%d\nblocks\t%d\nsubscribers\t%d\n",
			s.GetVersion(), s.GetEpoch(), s.GetOldestSeq(), s.GetNewestSeq(), float64(s.GetJournalBytes())/(1<<20),
			s.GetWorkers(), s.GetBlocks(), s.GetSubscribers())
		return t.Flush()
	})
}
