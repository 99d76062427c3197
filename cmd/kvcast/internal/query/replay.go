package query

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Replay is kvcast replay.
type Replay struct {
	streamFlags
	After *client.Position `placeholder:"EPOCH:SEQ" help:"Start after this position; :SEQ means the server's current epoch. Default: the oldest entry retained."`
	Until *client.Position `placeholder:"EPOCH:SEQ" help:"End with this entry. Default: the newest."`
}

// Help implements kong.HelpProvider.
func (*Replay) Help() string {
	return cli.Examples(
		"kvcast replay",
		"kvcast replay --after :1000 --until :2000 --worker vllm-0",
		"kvcast replay -o json > entries.jsonl") + `
A replay that cannot be complete fails, with the entries that the server retains. So does one of a worker or a model that does not exist, and of which the range has no entries.`
}

// Run prints the entries of a range.
func (c *Replay) Run(ctx context.Context, std cli.Process) error {
	req := &kvcastv1.ReplayRequest{Filter: c.Proto()}
	if c.After != nil {
		req.After = c.After.Proto()
	}
	if c.Until != nil {
		req.Until = c.Until.Proto()
	}
	return c.call(std, func(client kvcastv1.RouterEventServiceClient) error {
		stream, err := client.Replay(ctx, req)
		if err != nil {
			return err
		}
		p, bar := output.NewPrinter(std.Out, c.Output), (*output.ProgressBar)(nil)
		defer func() { bar.Remove() }()
		first, seen := uint64(0), cli.Seen{}
		err = printAll(p, stream.Recv, func(m *kvcastv1.SubscribeResponse) {
			for _, e := range m.GetEntries() { // also of workers that were removed
				seen.Add(e.GetWorker(), e.GetModel())
			}
			if a := m.GetAccepted(); a != nil && hasRoomForBar(std) {
				first = m.GetPosition().GetSeq()
				last := a.GetNewestSeq()
				if c.Until != nil {
					last = c.Until.Seq
				}
				bar = output.NewProgressBar(std.Err, last-min(first, last))
			}
			bar.Update(p.At.Seq-min(first, p.At.Seq), fmt.Sprintf("seq %s", output.Grouped(p.At.Seq)))
		})
		if err != nil {
			return err
		}
		return c.CheckOthers(ctx, client, seen)
	})
}

// Snapshot is kvcast snapshot.
type Snapshot struct{ streamFlags }

// Help implements kong.HelpProvider.
func (*Snapshot) Help() string {
	return cli.Examples(
		"kvcast snapshot --worker vllm-0",
		"kvcast snapshot -o json > blocks.jsonl")
}

// Run prints the blocks of all workers.
func (c *Snapshot) Run(ctx context.Context, std cli.Process) error {
	filter := c.Proto()
	return c.call(std, func(client kvcastv1.RouterEventServiceClient) error {
		if err := c.CheckExists(ctx, client); err != nil {
			return err
		}
		stream, err := client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: filter})
		if err != nil {
			return err
		}
		p, bar := output.NewPrinter(std.Out, c.Output), (*output.ProgressBar)(nil)
		if hasRoomForBar(std) {
			total, err := countBlocks(ctx, client, filter)
			if err != nil {
				return err
			}
			bar = output.NewProgressBar(std.Err, total)
		}
		err = printAll(p, stream.Recv, func(*kvcastv1.SubscribeResponse) {
			bar.Update(uint64(p.Blocks), fmt.Sprintf("%s blocks", output.Grouped(uint64(p.Blocks))))
		})
		bar.Remove()
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(std.Err, "follow on with: kvcast subscribe%s --after %s\n", c.given(), p.At)
		return err
	})
}

// hasRoomForBar reports whether standard error is a terminal and standard output is not: output on the same terminal would
// scroll the bar away.
func hasRoomForBar(std cli.Process) bool { return cli.IsTerminal(std.Err) && !cli.IsTerminal(std.Out) }

func countBlocks(ctx context.Context, client kvcastv1.RouterEventServiceClient, f *kvcastv1.Filter) (n uint64, err error) {
	workers, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: f})
	for _, w := range workers.GetWorkers() {
		for _, r := range w.GetRanks() {
			for _, t := range r.GetBlocks() {
				if len(f.GetTiers()) == 0 || slices.Contains(f.GetTiers(), t.GetTier()) {
					n += t.GetBlocks()
				}
			}
		}
	}
	return n, err
}

// printAll prints a stream to its end, and calls printed after each message. It converts messages to SubscribeResponse,
// which has the same field numbers.
func printAll[M proto.Message](p *output.Printer, receive func() (M, error), printed func(*kvcastv1.SubscribeResponse)) error {
	for {
		m, err := receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var converted kvcastv1.SubscribeResponse
		raw, err := proto.Marshal(m)
		if err == nil {
			err = proto.Unmarshal(raw, &converted)
		}
		if err != nil {
			return fmt.Errorf("convert message: %w", err)
		}
		if err := p.Message(&converted, 0); err != nil {
			return err
		}
		printed(&converted)
	}
}
