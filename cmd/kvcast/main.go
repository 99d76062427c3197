// Command kvcast relays the KV-cache events of LLM engines to routers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/demo"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/query"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/serve"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/simulate"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/top"
	"github.com/kvcast/kvcast/internal/transport/configured"
)

func main() {
	// The signal handler is never removed, so that a second SIGTERM does not change the exit status.
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	p := cli.Process{Environ: os.Environ(), In: os.Stdin, Out: os.Stdout, Err: os.Stderr}
	os.Exit(exitStatus(run(ctx, os.Args[1:], p), os.Stderr))
}

type commands struct {
	Serve      serve.Command    `cmd:"" help:"Read engines and serve their events to routers."`
	Subscribe  query.Subscribe  `cmd:"" help:"Follow the stream of a server."`
	Replay     query.Replay     `cmd:"" help:"Print the entries between two positions."`
	Snapshot   query.Snapshot   `cmd:"" help:"Print the blocks of all workers."`
	Match      query.Match      `cmd:"" help:"Print the workers that hold the longest prefixes of a prompt."`
	Workers    query.Workers    `cmd:"" help:"List the workers of a server."`
	Status     query.Status     `cmd:"" help:"Print the status of a server."`
	Top        top.Command      `cmd:"" help:"Monitor a server: workers, rates, blocks, gaps, and how far its subscribers are behind."`
	Simulate   simulate.Command `cmd:"" help:"Publish the events of simulated engines."`
	Decode     decodeCmd        `cmd:"" help:"Print an engine's payload or recording as JSON."`
	Demo       demo.Command     `cmd:"" help:"Run engines, a server, and a router that is disconnected and resumes, on this machine."`
	Version    versionCmd       `cmd:"" help:"Print the version."`
	Completion completionCmd    `cmd:"" help:"Print a shell's completion script."`
	Man        manCmd           `cmd:"" help:"Print the man page."`

	// EndWithStdin ends a command at the end of its standard input, so that it ends with a parent process that is killed.
	EndWithStdin bool `hidden:""`
}

// exitStatus prints an error, and returns the exit status: 0 without an error, 2 for a usage error, otherwise 1.
func exitStatus(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	if !errors.Is(err, cli.ErrSilent) {
		_, _ = fmt.Fprintf(stderr, "kvcast: %v\n", err)
	}
	var usage cli.UsageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// run runs a command until it ends or ctx is done.
func run(ctx context.Context, args []string, p cli.Process) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmds := commands{Serve: serve.New()}
	exited := false
	parser, err := kong.New(&cmds,
		kong.Name("kvcast"),
		kong.Description("kvcast relays KV-cache events from LLM engines to cache-aware routers: one ordered stream that can be resumed."),
		kong.Writers(p.Out, p.Err),
		kong.Exit(func(int) { exited = true }),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(p),
	)
	if err != nil {
		return fmt.Errorf("build command line: %w", err)
	}
	if line := p.Getenv("COMP_LINE"); line != "" {
		return complete(p, parser.Model.Node, line, args)
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(args)
	if exited { // help was printed
		return nil
	}
	if err != nil {
		command := parser.Model.Name
		if parsed := new(kong.ParseError); errors.As(err, &parsed) && parsed.Context.Selected() != nil {
			command = parsed.Context.Selected().FullPath()
		}
		return cli.UsageError{Err: fmt.Errorf("%w; see %s --help", err, command)}
	}
	if cmds.EndWithStdin {
		go func() {
			defer cancel()
			_, _ = io.Copy(io.Discard, p.In)
		}()
	}
	return command.Run()
}

type versionCmd struct{}

func (versionCmd) Help() string { return cli.Examples("kvcast version") }

// Run prints the versions of kvcast and, if the build has it, libzmq.
func (versionCmd) Run(p cli.Process) error {
	libzmq := "without libzmq"
	if v := configured.LibzmqVersion(); v != "" {
		libzmq = "libzmq " + v
	}
	_, err := fmt.Fprintf(p.Out, "kvcast %s (%s)\n", cli.Version(), libzmq)
	return err
}
