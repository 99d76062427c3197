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

	"github.com/kvcast/kvcast/internal/testclass"
)

// ranFile has a line for each test that has run: package and name. The path is below the module, which is the working directory.
var ranFile = filepath.Join("bin", "test", "ran")

// forget deletes the record of the tests that have run.
func forget() error {
	if err := os.Remove(ranFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget which tests have run: %w", err)
	}
	return nil
}

// remember adds tests to the record.
func remember(ran map[key]bool) error {
	var lines []string
	for k := range ran {
		lines = append(lines, k.pkg+" "+k.test+"\n")
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

// recorded returns the tests that have run.
func recorded() (map[key]bool, error) {
	f, err := os.Open(ranFile)
	if err != nil {
		return nil, fmt.Errorf("read which tests have run: %w", err)
	}
	defer func() { _ = f.Close() }()
	ran := make(map[key]bool)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		pkg, name, _ := strings.Cut(lines.Text(), " ")
		ran[key{pkg, name}] = true
	}
	return ran, lines.Err()
}

// check returns an error if a test of the classes has not run. It also lists the packages whose tests are all of other
// classes than quick.
func check(declared []test, classes string, out io.Writer) error {
	ran, err := recorded()
	if err != nil {
		return err
	}
	missed := missing(declared, classes, ran)
	for _, t := range missed {
		fmt.Fprintf(out, "has not run: %s %s, of class %s\n", short(t.pkg), t.name, t.class)
	}
	if len(missed) > 0 {
		return fmt.Errorf("%d tests of %s have not run", len(missed), classes)
	}
	fmt.Fprintf(out, "each test of %s has run\n", classes)
	return nil
}

// missing returns the tests of classes that are not in ran.
func missing(declared []test, classes string, ran map[key]bool) (missed []test) {
	for _, t := range declared {
		if testclass.Selected(t.class, classes) && !ran[key{t.pkg, t.name}] {
			missed = append(missed, t)
		}
	}
	return missed
}
