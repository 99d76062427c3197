package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type subscribeCmd struct {
	clientFlags
	filterFlags
	After position `placeholder:"EPOCH:SEQ" help:"Resume after this position; :SEQ means the server's current epoch. Where it is no longer retained a snapshot comes first."`
	From  string   `placeholder:"START" predictor:"from" help:"Start from a snapshot (the default), earliest (all that the server retains) or latest (new entries only)."`
	Count uint64   `placeholder:"N" help:"End after this many events, and the rest of their entry; 0, the default, is never. A snapshot's blocks do not count."`
}

// config is the subscription that was asked for.
func (c *subscribeCmd) config() (client.Config, error) {
	filter, err := c.filter()
	if err != nil {
		return client.Config{}, err
	}
	cfg := client.Config{Filter: filter}
	switch {
	case c.After.set && c.From != "":
		return cfg, errors.New("--after and --from can't be used together: give one of them")
	case c.After.set && c.After.epoch == "":
		cfg.Start = client.AfterSeq(c.After.seq)
	case c.After.set:
		cfg.Start = client.After(client.Position{Epoch: c.After.epoch, Seq: c.After.seq})
	case c.From == "", c.From == "snapshot":
		cfg.Start = client.FromSnapshot()
	case c.From == "earliest":
		cfg.Start = client.FromEarliest()
	case c.From == "latest":
		cfg.Start = client.FromLatest()
	default:
		return cfg, fmt.Errorf("--from: %q is not allowed: want snapshot, earliest or latest", c.From)
	}
	return cfg, nil
}

// Run prints the stream until ctx is done, enough has come, or the server refuses. A
// stream that ends is resumed; one that never began is an error.
func (c *subscribeCmd) Run(ctx context.Context, std stdio) error {
	cfg, err := c.config()
	if err != nil {
		return usageError{err}
	}
	s, err := c.subscriber()
	if err != nil {
		return err
	}
	_ = c.call(func(client kvcastv1.RouterEventServiceClient) error {
		c.tellOfNobody(ctx, client, std.err)
		return nil
	})
	p := newPrinter(std.out, c.Output)
	err = c.print(s.Subscribe(ctx, cfg), p, std.err)
	if p.at.set {
		_, _ = fmt.Fprintf(std.err, "resume with: kvcast subscribe%s --after %s\n", c.flags(c.clientFlags), p.at)
	}
	return err
}

// print prints updates until their end, or until enough events have come.
func (c *subscribeCmd) print(updates iter.Seq2[client.Update, error], p *printer, stderr io.Writer) error {
	began := false
	resuming, following := c.After, false
	for u, err := range updates {
		if err != nil {
			return c.callError(err)
		}
		if i := u.Interruption; i != nil {
			if !began {
				return c.callError(i.Err)
			}
			after := "with a snapshot"
			resuming = position{}
			if !i.Snapshot {
				after = "after " + u.Position.String()
				resuming = position{set: true, epoch: u.Position.Epoch, seq: u.Position.Seq}
			}
			_, _ = fmt.Fprintf(stderr, "the stream ended: %v; resuming %s in %v\n", c.callError(i.Err), after, i.Wait.Round(time.Millisecond))
			continue
		}
		began = true
		switch a := u.Message.GetAccepted(); {
		case a != nil:
			following = a.GetMode() != kvcastv1.Accepted_MODE_SNAPSHOT
			if !following && resuming.set {
				_, _ = fmt.Fprintf(stderr, "%s: a snapshot comes first\n", notResumed(resuming, a))
			}
		case u.Message.GetSnapshotEnd() != nil:
			following = true
		case u.Message.GetSnapshotBegin() != nil && following:
			following = false
			_, _ = fmt.Fprintln(stderr, "the server no longer retains the entries that come next, as this was too far behind: a snapshot comes first")
		}
		if err := p.message(u.Message, c.Count); err != nil {
			return err
		}
		if c.Count > 0 && p.events >= c.Count {
			return nil
		}
	}
	return nil
}

// notResumed says why a stream does not go on after a position.
func notResumed(after position, a *kvcastv1.Accepted) string {
	if after.epoch != "" && after.epoch != a.GetEpoch() {
		return fmt.Sprintf("%s is of another life of the server's journal than its epoch now, %s (it was restarted, or is another server)", after, a.GetEpoch())
	}
	return fmt.Sprintf("the entries after seq %d are no longer retained (the oldest is %d)", after.seq, a.GetOldestSeq())
}
