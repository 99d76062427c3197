package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	tea "charm.land/bubbletea/v2"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type topCmd struct {
	connectionFlags
	Interval time.Duration `default:"1s" placeholder:"DURATION" help:"Look this often, 100ms to 1m (${default}). Rates are those since the look before."`
	Once     bool          `help:"Print one screen as plain text, after two looks, and end. So it is where standard output is no terminal."`
}

// Help shows what people do with it.
func (*topCmd) Help() string {
	return examples(
		"kvcast top",
		"kvcast top --addr kvcast.default.svc:50051 --interval 5s",
		"kvcast top --once | head -20") + `
Keys: q ends, s sorts by the next column (name, batches, blocks, gaps), arrows and page keys scroll.

A subscriber is behind by as many entries as came since the one that its connection took last.`
}

// lookTimeout is how long a server may take to answer before the screen says so.
const lookTimeout = 5 * time.Second

// Run shows the server until ctx is done, or the user has seen enough.
func (c *topCmd) Run(ctx context.Context, std stdio) error {
	if c.Interval < 100*time.Millisecond || c.Interval > time.Minute {
		return usageError{fmt.Errorf("--interval: %v is not allowed: want 100ms to 1m", c.Interval)}
	}
	conn, err := c.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	screen := topScreen{addr: c.Addr, interval: c.Interval, look: func(ctx context.Context) (*topSample, error) {
		ctx, cancel := context.WithTimeout(ctx, max(lookTimeout, c.Interval))
		defer cancel()
		s, err := lookAt(ctx, kvcastv1.NewRouterEventServiceClient(conn))
		if err != nil {
			return nil, c.callError(err)
		}
		return s, nil
	}}
	if c.Once || !isTerminal(std.out) || !isTerminal(std.in) {
		return screen.once(ctx, std.out)
	}
	screen.paint, screen.ctx = paintFor(std.out), ctx
	_, err = tea.NewProgram(screen, tea.WithContext(ctx), tea.WithInput(std.in), tea.WithOutput(std.out), tea.WithEnvironment(os.Environ()), tea.WithoutSignalHandler()).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
		return nil // a signal ended it
	}
	if err != nil {
		return fmt.Errorf("show screen: %w; print it with --once", err)
	}
	return nil
}

// topSample is what a server was like at a time.
type topSample struct {
	at          time.Time
	status      *kvcastv1.GetStatusResponse
	workers     []*kvcastv1.WorkerStatus
	subscribers []*kvcastv1.SubscriberStatus
}

func lookAt(ctx context.Context, client kvcastv1.RouterEventServiceClient) (*topSample, error) {
	s := new(topSample)
	var err error
	if s.status, err = client.GetStatus(ctx, &kvcastv1.GetStatusRequest{}); err != nil {
		return nil, err
	}
	s.at = time.Now()
	workers, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	if err != nil {
		return nil, err
	}
	subscribers, err := client.ListSubscribers(ctx, &kvcastv1.ListSubscribersRequest{})
	if err != nil {
		return nil, err
	}
	s.workers, s.subscribers = workers.GetWorkers(), subscribers.GetSubscribers()
	return s, nil
}
