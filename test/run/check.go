package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// ranFile is the record, below the module, which is the working directory. It has a line for each test that has run: package and
// name, and "skipped" if it was skipped for a reason of its own.
var ranFile = filepath.Join("bin", "test", "ran")

// forget deletes the record of the tests that have run.
func forget() error {
	if err := os.Remove(ranFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget which tests have run: %w", err)
	}
	return nil
}

// outcome is what the record has of a test.
type outcome int

const (
	outcomeSkipped outcome = iota + 1
	outcomeRan
)

// remember adds tests to the record.
func remember(outcomes map[key]outcome) error {
	var lines []string
	for k, o := range outcomes {
		line := k.pkg + " " + k.test
		if o == outcomeSkipped {
			line += " skipped"
		}
		lines = append(lines, line+"\n")
	}
	slices.Sort(lines)
	if err := os.MkdirAll(filepath.Dir(ranFile), 0o755); err != nil {
		return fmt.Errorf("record which tests have run: %w", err)
	}
	f, err := os.OpenFile(ranFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = f.WriteString(strings.Join(lines, ""))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("record which tests have run: %w", err)
	}
	return nil
}

// recorded returns the record.
func recorded() (map[key]outcome, error) {
	f, err := os.Open(ranFile)
	if err != nil {
		return nil, fmt.Errorf("read which tests have run: %w", err)
	}
	defer func() { _ = f.Close() }()
	outcomes := make(map[key]outcome)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		pkg, name, _ := strings.Cut(lines.Text(), " ")
		name, isSkipped := strings.CutSuffix(name, " skipped")
		o := outcomeRan
		if isSkipped {
			o = outcomeSkipped
		}
		outcomes[key{pkg, name}] = max(outcomes[key{pkg, name}], o)
	}
	return outcomes, lines.Err()
}

// check returns an error if a test of the classes has not run, nor said why; with all classes, also if it was skipped.
func check(declared []test, classes string, out io.Writer) error {
	outcomes, err := recorded()
	if err != nil {
		return err
	}
	failed := 0
	for _, t := range missing(declared, classes, outcomes) {
		what := "has not run"
		if outcomes[key{t.pkg, t.name}] == outcomeSkipped {
			what = "was skipped"
		}
		if what == "has not run" || classes == "all" {
			failed++
		}
		printf(out, "%s: %s %s, of class %s\n", what, short(t.pkg), t.name, t.class)
	}
	if failed > 0 {
		return fmt.Errorf("%d tests of %s have not run", failed, classes)
	}
	printf(out, "no test of %s was left out\n", classes)
	return nil
}

// missing returns the tests of classes that have not run.
func missing(declared []test, classes string, outcomes map[key]outcome) (missed []test) {
	for _, t := range declared {
		if testclass.Selected(t.class, classes) && outcomes[key{t.pkg, t.name}] != outcomeRan {
			missed = append(missed, t)
		}
	}
	return missed
}
