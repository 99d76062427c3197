// Command kvcast relays the KV-cache events of LLM engines to routers.
//
// It wires: what the parts do is in their packages.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	// The signals stay caught to the end: one that comes while the program is
	// ending anyway must not change its exit status.
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	os.Exit(exitStatus(run(ctx, os.Args[1:], stdio{os.Stdin, os.Stdout, os.Stderr}), os.Stderr))
}

// stdio is where a command reads and writes.
type stdio struct {
	in  io.Reader
	out io.Writer
	err io.Writer
}

// commands are what kvcast can do.
type commands struct {
	Serve     serveCmd     `cmd:"" help:"Read engines, and serve their events to routers."`
	Subscribe subscribeCmd `cmd:"" help:"Follow the stream of a server."`
	Replay    replayCmd    `cmd:"" help:"Print the entries between two positions."`
	Snapshot  snapshotCmd  `cmd:"" help:"Print what all workers hold."`
	Workers   workersCmd   `cmd:"" help:"List the workers."`
	Status    statusCmd    `cmd:"" help:"Show a server at a glance."`
	Top       topCmd       `cmd:"" help:"Watch a server: workers, rates, blocks, gaps, and how far behind its subscribers are."`
	Simulate  simulateCmd  `cmd:"" help:"Be an engine: publish the events of a simulated KV cache."`
	Decode    decodeCmd    `cmd:"" help:"Show what a payload or a recording of an engine says."`
	Demo      demoCmd      `cmd:"" help:"Show it all at work on this machine: engines, server, a router that is cut off and resumes."`
	Version   versionCmd   `cmd:"" help:"Print the version."`

	Completion completionCmd `cmd:"" help:"Print what makes a shell complete kvcast's commands and flags."`

	// EndWithStdin ends a command when its standard input does: whoever started
	// it is gone then, however it went.
	EndWithStdin bool `hidden:""`
}

// usageError is a mistake in the command line.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// errSilent ends a command with status 1 when all has been said.
var errSilent = errors.New("failed")

// exitStatus says what went wrong in one line, and returns the exit status: 0,
// 1 for a failure, 2 for a mistake in the command line.
func exitStatus(err error, stderr io.Writer) int {
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errSilent):
		return 1
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(stderr, "kvcast: %v\n", err)
		return 2
	}
	_, _ = fmt.Fprintf(stderr, "kvcast: %v\n", err)
	return 1
}

// run runs one command until it is done or ctx is.
func run(ctx context.Context, args []string, std stdio) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var cmds commands
	exited := false
	parser, err := kong.New(&cmds,
		kong.Name("kvcast"),
		kong.Description("kvcast relays KV-cache events from LLM engines to cache-aware routers: one ordered stream that can be resumed."),
		kong.Writers(std.out, std.err),
		kong.Exit(func(int) { exited = true }),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(std),
	)
	if err != nil {
		return fmt.Errorf("build command line: %w", err)
	}
	if completed, err := complete(parser); completed {
		return err
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(args)
	if exited { // help was asked for and given
		return nil
	}
	if err != nil {
		return usageError{fmt.Errorf("%w; see kvcast %s--help", err, commandOf(parser, args))}
	}
	if cmds.EndWithStdin {
		go func() {
			defer cancel()
			_, _ = io.Copy(io.Discard, std.in)
		}()
	}
	return command.Run()
}

// commandOf returns the command that was meant, for a hint, with a space behind.
func commandOf(parser *kong.Kong, args []string) string {
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		for _, c := range parser.Model.Children {
			if c.Name == args[0] {
				return args[0] + " "
			}
		}
	}
	return ""
}
