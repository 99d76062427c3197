// Command compare prints a table of the figures of kvcast's index and, with -peers, of other projects' indexes.
//
// Each index is measured in a process of its own, one after the other, with the workload in a file. A peer that could not
// be prepared, or that fails, is a line that says why.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvcast/kvcast/test/indexers"
)

// The forms in which kvcast's index returns matches.
const (
	list   = "kvcast, list"
	groups = "kvcast, groups"
)

const (
	rounds = 3
	// limit is the longest time that one index may take.
	limit = 10 * time.Minute
)

// peers are the indexes of other projects: a program of the directory of -peers, and its argument.
var peers = []struct{ name, program, argument string }{
	{"SMG kv-index ChainIndex", "rust", "chain"},
	{"Dynamo CRTC", "rust", "crtc"},
	{"Dynamo RadixTree", "rust", "radix"},
	{"llm-d in-memory", "llmd", ""},
}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	flags := flag.NewFlagSet("compare", flag.ContinueOnError)
	programs := flags.String("peers", "", "directory of the peers' programs; without it, only kvcast is measured")
	measured := flags.String("measure", "", "measure kvcast with the workload of this file, and print the figures as JSON")
	grouped := flags.Bool("groups", false, "with -measure: matches return groups of workers, not a list")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *measured != "" {
		w, err := indexers.ReadFile(*measured)
		if err != nil {
			return err
		}
		f := indexers.Measure(w, rounds, func() indexers.Index { return newIndex(*grouped) })
		return json.NewEncoder(out).Encode(f)
	}
	dir, err := os.MkdirTemp("", "kvcast-indexers-")
	if err != nil {
		return fmt.Errorf("create directory for the workload: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w := indexers.Generate()
	file := filepath.Join(dir, "workload")
	if err := w.WriteFile(file); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start kvcast's index: %w", err)
	}
	if err := printHead(out, w); err != nil {
		return err
	}
	var own indexers.Figures
	for _, form := range []string{list, groups} {
		if own, err = measure(ctx, self, "-measure", file, fmt.Sprintf("-groups=%t", form == groups)); err != nil {
			return err
		}
		own.Indexer = form
		if err := printRow(out, own, nil); err != nil {
			return err
		}
	}
	for _, p := range peers {
		if *programs == "" {
			break
		}
		f, err := measurePeer(ctx, *programs, p.program, file, p.argument)
		f.Indexer = p.name
		if err == nil && (f.Checksum != own.Checksum || f.Answers != own.Answers) {
			err = fmt.Errorf("its answers %v to workload %x differ from %v to %x", f.Answers, f.Checksum, own.Answers, own.Checksum)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := printRow(out, f, err); err != nil {
			return err
		}
	}
	return printLoad(out)
}

// measurePeer runs a peer's program. If it does not exist, the error has the reason, which is in a file.
func measurePeer(ctx context.Context, dir, program, file, argument string) (indexers.Figures, error) {
	path := filepath.Join(dir, program)
	if reason, err := os.ReadFile(path + ".skipped"); err == nil {
		return indexers.Figures{}, errors.New(strings.TrimSpace(string(reason)))
	}
	args := []string{file}
	if argument != "" {
		args = append(args, argument)
	}
	return measure(ctx, path, args...)
}

// measure runs a program that prints figures.
func measure(ctx context.Context, program string, args ...string) (f indexers.Figures, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		return f, fmt.Errorf("measure with %s: %w", filepath.Base(program), err)
	}
	return f, nil
}
