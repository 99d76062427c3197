package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type replayCmd struct {
	clientFlags
	filterFlags
	After position `placeholder:"EPOCH:SEQ" help:"Begin after this position; :SEQ means the server's current epoch. Without: with the oldest entry retained."`
	Until position `placeholder:"EPOCH:SEQ" help:"End with this entry. Without: with the newest."`
}

// Run prints the entries of a range.
func (c *replayCmd) Run(ctx context.Context, std stdio) error {
	filter, err := c.filter()
	if err != nil {
		return usageError{err}
	}
	return c.call(func(client kvcastv1.RouterEventServiceClient) error {
		c.tellOfNobody(ctx, client, std.err)
		stream, err := client.Replay(ctx, &kvcastv1.ReplayRequest{After: c.After.proto(), Until: c.Until.proto(), Filter: filter})
		if err != nil {
			return err
		}
		p, bar := newPrinter(std.out, c.Output), (*progressBar)(nil)
		defer func() { bar.end() }()
		first := uint64(0)
		return printAll(p, stream.Recv, func(m *kvcastv1.SubscribeResponse) {
			if a := m.GetAccepted(); a != nil && hasRoomForBar(std) {
				first = m.GetPosition().GetSeq()
				last := a.GetNewestSeq()
				if c.Until.set {
					last = c.Until.seq
				}
				bar = newProgressBar(std.err, last-min(first, last))
			}
			bar.at(p.at.seq-min(first, p.at.seq), fmt.Sprintf("seq %s", grouped(p.at.seq)))
		})
	})
}

type snapshotCmd struct {
	clientFlags
	filterFlags
}

// Run prints what the workers hold.
func (c *snapshotCmd) Run(ctx context.Context, std stdio) error {
	filter, err := c.filter()
	if err != nil {
		return usageError{err}
	}
	return c.call(func(client kvcastv1.RouterEventServiceClient) error {
		c.tellOfNobody(ctx, client, std.err)
		stream, err := client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: filter})
		if err != nil {
			return err
		}
		p, bar := newPrinter(std.out, c.Output), (*progressBar)(nil)
		if hasRoomForBar(std) {
			all, err := blocksOf(ctx, client, filter)
			if err != nil {
				return err
			}
			bar = newProgressBar(std.err, all)
		}
		err = printAll(p, stream.Recv, func(*kvcastv1.SubscribeResponse) {
			bar.at(uint64(p.blocks), fmt.Sprintf("%s blocks", grouped(uint64(p.blocks))))
		})
		if bar.end(); err != nil {
			return err
		}
		_, err = fmt.Fprintf(std.err, "follow on with: kvcast subscribe%s --after %s\n", c.flags(c.clientFlags), p.at)
		return err
	})
}

// hasRoomForBar tells whether standard error is a terminal that standard output does
// not scroll.
func hasRoomForBar(std stdio) bool { return isTerminal(std.err) && !isTerminal(std.out) }

// blocksOf is how many blocks there are now that a filter takes.
func blocksOf(ctx context.Context, client kvcastv1.RouterEventServiceClient, f *kvcastv1.Filter) (n uint64, err error) {
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

// printAll prints a stream to its end, and tells of each message once it is printed.
// Its messages have the field numbers of SubscribeResponse.
func printAll[M proto.Message](p *printer, receive func() (M, error), printed func(*kvcastv1.SubscribeResponse)) error {
	for {
		m, err := receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		raw, err := proto.Marshal(m)
		if err != nil {
			return fmt.Errorf("read message: %w", err)
		}
		var same kvcastv1.SubscribeResponse
		if err := proto.Unmarshal(raw, &same); err != nil {
			return fmt.Errorf("read message: %w", err)
		}
		if err := p.message(&same, 0); err != nil {
			return err
		}
		printed(&same)
	}
}
