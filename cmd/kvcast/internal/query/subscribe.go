package query

import (
	"context"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Subscribe is kvcast subscribe.
type Subscribe struct {
	streamFlags
	After *client.Position `placeholder:"EPOCH:SEQ" xor:"start" help:"Resume after this position; :SEQ means the server's current epoch. If it is no longer retained, a snapshot comes first."`
	From  *string          `enum:"snapshot,earliest,latest" placeholder:"START" xor:"start" help:"Start from a snapshot (the default), earliest (the oldest entry retained) or latest (new entries only)."`
	Count uint64           `placeholder:"N" help:"Exit after the entry with the Nth event; 0, the default, never exits. A snapshot's blocks do not count."`
}

// Help implements kong.HelpProvider.
func (*Subscribe) Help() string {
	return cli.Examples(
		"kvcast subscribe",
		"kvcast subscribe --from latest --worker vllm-0 --tier device",
		"kvcast subscribe --after 4f1c9a20d3b7e865:1042",
		"kvcast subscribe --from earliest -o json | jq -r 'select(.event.gap)'")
}

func (c *Subscribe) start() client.Start {
	switch {
	case c.After != nil && c.After.Epoch == "":
		return client.AfterSeq(c.After.Seq)
	case c.After != nil:
		return client.After(*c.After)
	case c.From != nil && *c.From == "earliest":
		return client.FromEarliest()
	case c.From != nil && *c.From == "latest":
		return client.FromLatest()
	default:
		return client.FromSnapshot()
	}
}

// Run prints the stream until ctx is done, --count events are printed, or the server rejects the subscription. It resumes
// an interrupted stream, but fails if no server accepts the first one.
func (c *Subscribe) Run(ctx context.Context, std cli.Process) error {
	options, err := c.DialOptions(std)
	if err != nil {
		return err
	}
	subscriber, err := client.New(c.Addr, options...)
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", c.Addr, err)}
	}
	_ = c.call(std, func(client kvcastv1.RouterEventServiceClient) error {
		c.ReportNoMatch(ctx, client, std.Err)
		return nil
	})
	p := output.NewPrinter(std.Out, c.Output)
	err = c.print(subscriber.Subscribe(ctx, client.Config{Filter: c.Proto(), Start: c.start(), ClientID: "kvcast subscribe"}), p, std.Err)
	if !p.At.IsZero() {
		_, _ = fmt.Fprintf(std.Err, "resume with: kvcast subscribe%s --after %s\n", c.given(), p.At)
	}
	return err
}

// print prints updates until they end or --count events are printed. It reports interruptions on stderr.
func (c *Subscribe) print(updates iter.Seq2[client.Update, error], p *output.Printer, stderr io.Writer) error {
	report := func(format string, args ...any) { _, _ = fmt.Fprintf(stderr, format+"\n", args...) }
	accepted, following := false, false
	after := c.After // the position to resume after; nil: none
	for u, err := range updates {
		if err != nil {
			return c.Error(err)
		}
		if i := u.Interruption; i != nil {
			switch {
			case accepted:
			case i.Failures < len(c.Servers()):
				continue
			default:
				return c.Error(i.Err)
			}
			next := "with a snapshot"
			after = nil
			if !i.Snapshot {
				next = "after " + u.Position.String()
				after = &u.Position
			}
			report("stream ended: %v; resuming %s in %v", c.Error(i.Err), next, i.Wait.Round(time.Millisecond))
			continue
		}
		accepted = true
		switch a := u.Message.GetAccepted(); {
		case a != nil:
			following = a.GetMode() != kvcastv1.Accepted_MODE_SNAPSHOT
			if !following && after != nil {
				report("%s: starting from a snapshot", notResumed(*after, a))
			}
		case u.Message.GetSnapshotEnd() != nil:
			following = true
		case u.Message.GetSnapshotBegin() != nil && following:
			following = false
			report("fell behind: the next entries are no longer retained: continuing from a snapshot")
		}
		if err := p.Message(u.Message, c.Count); err != nil {
			return err
		}
		if c.Count > 0 && p.Events >= c.Count {
			return nil
		}
	}
	return nil
}

// notResumed returns why a stream starts from a snapshot instead of resuming after a position.
func notResumed(after client.Position, a *kvcastv1.Accepted) string {
	if after.Epoch != "" && after.Epoch != a.GetEpoch() {
		return fmt.Sprintf("%s has another epoch than the server, %s: the server was restarted, or is another server", after, a.GetEpoch())
	}
	return fmt.Sprintf("the entries after seq %d are no longer retained (the oldest is %d)", after.Seq, a.GetOldestSeq())
}
