package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"
)

// benchmarkTimeout bounds one run of a benchmark.
const benchmarkTimeout = 15 * time.Minute

// measure runs each benchmark of a suite once in each round.
func measure(ctx context.Context, progress io.Writer, root string, s suite, rounds int) (r results, err error) {
	dir, err := os.MkdirTemp("", "kvcast-report-")
	if err != nil {
		return r, fmt.Errorf("create directory for test programs: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r = results{Date: time.Now().UTC().Format(time.DateOnly), Rounds: rounds}
	if r.Commit, err = commit(ctx, root); err != nil {
		return r, err
	}
	if r.Machine, err = describeMachine(ctx, root); err != nil {
		return r, err
	}
	programs := make(map[string]string)
	for _, b := range s.benchmarks {
		if programs[b.dir] == "" {
			programs[b.dir] = filepath.Join(dir, fmt.Sprintf("%d.test", len(programs)))
			if _, err := output(ctx, root, "go", "test", "-c", "-o", programs[b.dir], "./"+b.dir); err != nil {
				return r, err
			}
		}
	}
	values := make(map[string]map[string][]float64)
	for round := range rounds {
		for _, b := range s.benchmarks {
			_, _ = fmt.Fprintf(progress, "round %d of %d: %s\n", round+1, rounds, b.pattern)
			if err := b.run(ctx, root, programs[b.dir], values); err != nil {
				return r, err
			}
		}
	}
	r.Figures = make(map[string]map[string]figure)
	for name, units := range values {
		r.Figures[name] = make(map[string]figure)
		for unit, v := range units {
			r.Figures[name][unit] = summarize(v)
		}
	}
	if r.Machine.LoadAfter, err = load(); err != nil {
		return r, err
	}
	return r, nil
}

// run runs a benchmark, and appends its figures to values.
func (b benchmark) run(ctx context.Context, root, program string, values map[string]map[string][]float64) error {
	ctx, cancel := context.WithTimeout(ctx, benchmarkTimeout)
	defer cancel()
	out, err := output(ctx, filepath.Join(root, b.dir), program, "-test.run", "^$", "-test.bench", b.pattern, "-test.benchtime", b.time, "-test.benchmem")
	if err != nil {
		return err
	}
	return appendFigures(values, out)
}

// appendFigures appends the figures that a test program has printed to values, by the name of the benchmark and the unit.
func appendFigures(values map[string]map[string][]float64, printed string) error {
	reader := benchfmt.NewReader(strings.NewReader(printed), "benchmarks")
	for reader.Scan() {
		result, ok := reader.Result().(*benchfmt.Result)
		if !ok {
			continue
		}
		base, parts := result.Name.Parts()
		name := string(base)
		for _, p := range parts {
			if p[0] == '/' {
				name += string(p)
			}
		}
		if values[name] == nil {
			values[name] = make(map[string][]float64)
		}
		for _, v := range result.Values {
			unit, value := v.Unit, v.Value
			if v.OrigUnit != "" {
				unit, value = v.OrigUnit, v.OrigValue
			}
			values[name][unit] = append(values[name][unit], value)
		}
	}
	if err := reader.Err(); err != nil {
		return fmt.Errorf("read figures: %w", err)
	}
	return nil
}

// commit returns the commit that is measured. It ends with "-dirty" if there are changes, except of what this program writes.
func commit(ctx context.Context, root string) (string, error) {
	hash, err := output(ctx, root, "git", "rev-parse", "--short=12", "HEAD")
	if err != nil {
		return "", err
	}
	changes, err := output(ctx, root, "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!README.md", ":!docs", ":!test/bench/report/*.json")
	if changes != "" {
		hash += "-dirty"
	}
	return hash, err
}

// output runs a program in a directory, and returns what it prints without the last newline.
func output(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run %v: %w\n%s%s", cmd.Args, err, out.Bytes(), errs.Bytes())
	}
	return string(bytes.TrimRight(out.Bytes(), "\n")), nil
}
