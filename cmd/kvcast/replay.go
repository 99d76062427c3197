package main

import (
	"context"
	"errors"
	"fmt"
	"io"

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
		stream, err := client.Replay(ctx, &kvcastv1.ReplayRequest{After: c.After.proto(), Until: c.Until.proto(), Filter: filter})
		if err != nil {
			return err
		}
		return printAll(newPrinter(std.out, c.Output), stream.Recv)
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
		stream, err := client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: filter})
		if err != nil {
			return err
		}
		p := newPrinter(std.out, c.Output)
		if err := printAll(p, stream.Recv); err != nil {
			return err
		}
		_, err = fmt.Fprintf(std.err, "follow on with: kvcast subscribe%s --after %s\n", c.flags(c.clientFlags), p.at)
		return err
	})
}

// printAll prints a stream to its end. Its messages have the field numbers of
// SubscribeResponse.
func printAll[M proto.Message](p *printer, receive func() (M, error)) error {
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
	}
}
