package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type subscribeCmd struct {
	clientFlags
	filterFlags
	After position `placeholder:"EPOCH:SEQ" help:"Resume after this position; :SEQ means the server's current epoch. Where it is no longer retained a snapshot comes first."`
	From  string   `placeholder:"START" predictor:"from" help:"Start from a snapshot (the default), earliest (all that the server retains) or latest (new entries only)."`
	Count uint64   `placeholder:"N" help:"End after this many events, and the rest of their entry. A snapshot's blocks do not count."`
}

func (c *subscribeCmd) request() (*kvcastv1.SubscribeRequest, error) {
	filter, err := c.filter()
	if err != nil {
		return nil, err
	}
	req := &kvcastv1.SubscribeRequest{Filter: filter}
	if c.After.set {
		if c.From != "" {
			return nil, errors.New("--after and --from can't be used together: give one of them")
		}
		req.Start = &kvcastv1.SubscribeRequest_After{After: c.After.proto()}
		return req, nil
	}
	switch c.From {
	case "", "snapshot":
		req.Start = &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}
	case "earliest":
		req.Start = &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}
	case "latest":
		req.Start = &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}
	default:
		return nil, fmt.Errorf("--from: %q is not allowed: want snapshot, earliest or latest", c.From)
	}
	return req, nil
}

// Run prints the stream until ctx is done, the stream ends, or enough has come.
func (c *subscribeCmd) Run(ctx context.Context, std stdio) error {
	req, err := c.request()
	if err != nil {
		return usageError{err}
	}
	p := newPrinter(std.out, c.Output)
	err = c.call(func(client kvcastv1.RouterEventServiceClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := client.Subscribe(ctx, req)
		if err != nil {
			return err
		}
		return c.print(ctx, p, stream.Recv)
	})
	if p.at.set {
		_, _ = fmt.Fprintf(std.err, "resume with: kvcast subscribe%s --after %s\n", c.flags(c.clientFlags), p.at)
	}
	return err
}

// print prints messages until their end, or until enough events have come.
func (c *subscribeCmd) print(ctx context.Context, p *printer, receive func() (*kvcastv1.SubscribeResponse, error)) error {
	for {
		m, err := receive()
		if errors.Is(err, io.EOF) || ctx.Err() != nil {
			return nil //nolint:nilerr // it ended, or the user ended it
		}
		if err != nil {
			return err
		}
		if err := p.message(m, c.Count); err != nil {
			return err
		}
		if c.Count > 0 && p.events >= c.Count {
			return nil
		}
	}
}
