// Package top is the command kvcast top: it polls a server's status, workers and subscribers, and shows them with rates, as
// a screen on a terminal or once as text.
package top

import (
	"context"
	"errors"
	"fmt"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Command is kvcast top.
type Command struct {
	cli.Connection
	Interval time.Duration `default:"1s" placeholder:"DURATION" help:"Polling interval, 100ms to 1m (${default})."`
	Once     bool          `help:"Print one screen as text after two polls and exit. Implied if standard output is no terminal."`
}

// Help implements kong.HelpProvider.
func (*Command) Help() string {
	return cli.Examples(
		"kvcast top",
		"kvcast top --addr kvcast.default.svc:50051 --interval 5s",
		"kvcast top --once | head -20") + `
Keys: q quits, s sorts by the next column (name, batches, blocks, gaps), arrow and page keys scroll.

REPLAY is whether the engine's replay socket answers. Below the tables is a line for each reason for which a rank is degraded, and for each source that is not as it should be, with what to do.

BEHIND is the number of entries that have not been sent to a subscriber, and with several servers on one journal the number that a server has not read.`
}

// pollTimeout is how long a poll may take, unless the interval is longer.
const pollTimeout = 5 * time.Second

// Run shows the server until ctx is done or the user quits.
func (c *Command) Run(ctx context.Context, p cli.Process) error {
	if c.Interval < 100*time.Millisecond || c.Interval > time.Minute {
		return cli.UsageError{Err: fmt.Errorf("--interval: %v is not allowed: want 100ms to 1m", c.Interval)}
	}
	conn, err := c.Dial(p)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	s := screen{addr: c.Addr, interval: c.Interval, poll: func(ctx context.Context) (*sample, error) {
		ctx, cancel := context.WithTimeout(ctx, max(pollTimeout, c.Interval))
		defer cancel()
		s, err := poll(ctx, kvcastv1.NewRouterEventServiceClient(conn))
		if err != nil {
			return nil, c.Error(err)
		}
		return s, nil
	}}
	if c.Once || !cli.IsTerminal(p.Out) || !cli.IsTerminal(p.In) {
		return s.once(ctx, p.Out)
	}
	s.Styler, s.ctx = output.NewStyler(p.Out), ctx
	_, err = tea.NewProgram(s, tea.WithContext(ctx), tea.WithInput(p.In), tea.WithOutput(p.Out), tea.WithEnvironment(p.Environ), tea.WithoutSignalHandler()).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
		return nil // ended by a signal
	}
	if err != nil {
		return fmt.Errorf("show screen: %w; print it with --once", err)
	}
	return nil
}

// sample is the result of a successful poll.
type sample struct {
	at          time.Time
	status      *kvcastv1.GetStatusResponse
	workers     []*kvcastv1.WorkerStatus
	subscribers []*kvcastv1.SubscriberStatus
}

func poll(ctx context.Context, client kvcastv1.RouterEventServiceClient) (*sample, error) {
	status, err := client.GetStatus(ctx, &kvcastv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	at := time.Now()
	workers, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	if err != nil {
		return nil, err
	}
	subscribers, err := client.ListSubscribers(ctx, &kvcastv1.ListSubscribersRequest{})
	if err != nil {
		return nil, err
	}
	return &sample{at, status, workers.GetWorkers(), subscribers.GetSubscribers()}, nil
}
