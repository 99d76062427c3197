package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// results are the figures of a suite.
type results struct {
	Date    string
	Commit  string // of kvcast; it ends with -dirty if files were changed
	Rounds  int
	Machine machine
	// Figures by benchmark, without the prefix "Benchmark" and the number of CPUs, and by unit.
	Figures map[string]map[string]figure
}

// figure is what the rounds gave.
type figure struct {
	Median, Min, Max float64
	Rounds           int
}

// summarize returns the figure of values, of which there is at least one.
func summarize(values []float64) figure {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return figure{Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Min: sorted[0], Max: sorted[n-1], Rounds: n}
}

func readResults(root string, s suite) (r results, err error) {
	b, err := os.ReadFile(filepath.Join(root, s.file))
	if errors.Is(err, os.ErrNotExist) {
		return r, fmt.Errorf("%s is missing: run make bench-%s", s.file, s.name)
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return r, fmt.Errorf("read figures: %w", err)
	}
	return r, nil
}

func (r results) write(root string, s suite) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err == nil {
		err = os.WriteFile(filepath.Join(root, s.file), append(b, '\n'), 0o644)
	}
	if err != nil {
		return fmt.Errorf("store figures: %w", err)
	}
	return nil
}

// missing returns an error unless each benchmark of a suite gave figures in each round.
func (r results) missing(s suite) error {
	var errs []error
	for _, b := range s.benchmarks {
		name, _, _ := strings.Cut(strings.TrimPrefix(b.pattern, "Benchmark"), "/")
		name = strings.TrimSuffix(name, "$")
		found := false
		for full, units := range r.Figures {
			if first, _, _ := strings.Cut(full, "/"); first != name {
				continue
			}
			found = true
			for unit, f := range units {
				if f.Rounds != r.Rounds {
					errs = append(errs, fmt.Errorf("%s has %s in %d of %d rounds", full, unit, f.Rounds, r.Rounds))
				}
			}
		}
		if !found {
			errs = append(errs, fmt.Errorf("%s of %s gave no figures", b.pattern, b.dir))
		}
	}
	return errors.Join(errs...)
}
