// Command report measures kvcast with its benchmarks, stores the figures, and writes them into the README and docs/performance.md.
//
// Each benchmark runs once in each round, so that what it is compared with has met the same machine. The suite "report" is what the README's table
// needs; "scale" is how costs grow with the number of engines, blocks, subscribers and workers, and draws plots. With -render, nothing is measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	flags := flag.NewFlagSet("report", flag.ContinueOnError)
	root := flags.String("root", ".", "directory of the repository")
	name := flags.String("suite", "report", "what is measured: report or scale")
	rounds := flags.Int("rounds", 7, "how many times each benchmark runs")
	render := flags.Bool("render", false, "write the documents from the stored figures, and measure nothing")
	if err := flags.Parse(args); err != nil {
		return err
	}
	i := slices.IndexFunc(suites, func(s suite) bool { return s.name == *name })
	switch {
	case i < 0:
		return fmt.Errorf("-suite %q is not allowed: want report or scale", *name)
	case *rounds < 1:
		return fmt.Errorf("-rounds %d is not allowed: want 1 or more", *rounds)
	case flags.NArg() > 0:
		return fmt.Errorf("argument %q is not allowed: want flags only", flags.Arg(0))
	case *render:
		return writeDocuments(*root)
	}
	r, err := measure(ctx, os.Stderr, *root, suites[i], *rounds)
	if err != nil {
		return err
	}
	if err := r.write(*root, suites[i]); err != nil {
		return err
	}
	return errors.Join(writeDocuments(*root), r.missing(suites[i]))
}
