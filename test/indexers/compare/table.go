package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvcast/kvcast/test/indexers"
)

// columns are the columns of the table. goal is kvcast's goal; "" if there is none.
var columns = []struct {
	head, goal string
	value      func(indexers.Figures) string
}{
	{"fill ns/block", "<= 350", func(f indexers.Figures) string { return fmt.Sprintf("%.0f", f.FillNanos) }},
	{"churn ns/block", "<= 350", func(f indexers.Figures) string { return fmt.Sprintf("%.0f", f.ChurnNanos) }},
	{"shared ns/block", "<= 100", func(f indexers.Figures) string { return fmt.Sprintf("%.0f", f.SharedNanos) }},
	{"bytes/block", "<= 60", func(f indexers.Figures) string { return fmt.Sprintf("%.0f-%.0f", f.FillBytes, f.ChurnBytes) }},
	{"1000x64 us", "<= 5", func(f indexers.Figures) string { return fmt.Sprintf("%.2f", f.LongMicros) }},
	{"32x64 us", "<= 1.5", func(f indexers.Figures) string { return fmt.Sprintf("%.2f", f.ShortMicros) }},
	{"mix matches/s", ">= 200000", func(f indexers.Figures) string { return fmt.Sprintf("%.0f", f.MixRate) }},
}

// nameWidth is the width of the first column.
const nameWidth = 24

// printHead prints the head of the table, and the goals.
func printHead(out io.Writer, w *indexers.Workload) error {
	heads, goals := make([]string, len(columns)), make([]string, len(columns))
	for i, c := range columns {
		heads[i], goals[i] = c.head, c.goal
	}
	_, err := fmt.Fprintf(out, "Indexes: %d workers; fill of %d blocks, churn of %d stored and removed; workload %x.\n",
		indexers.Workers, w.Phases[indexers.Fill].Blocks, w.Phases[indexers.Churn].Blocks, w.Checksum)
	if err == nil {
		err = printLine(out, "", heads)
	}
	if err == nil {
		err = printLine(out, "goal of kvcast", goals)
	}
	return err
}

// printRow prints the figures of an index, or why there are none.
func printRow(out io.Writer, f indexers.Figures, skipped error) error {
	if skipped != nil {
		_, err := fmt.Fprintf(out, "%-*s skipped: %v\n", nameWidth, f.Indexer, skipped)
		return err
	}
	values := make([]string, len(columns))
	for i, c := range columns {
		values[i] = c.value(f)
	}
	return printLine(out, f.Indexer, values)
}

func printLine(out io.Writer, name string, values []string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%-*s", nameWidth, name)
	for i, v := range values {
		fmt.Fprintf(&b, " %*s", max(len(columns[i].head), 8), v)
	}
	_, err := fmt.Fprintln(out, b.String())
	return err
}

// printLoad prints the load of the machine, where it is known.
func printLoad(out io.Writer) error {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return nil //nolint:nilerr // only Linux has it
	}
	_, err = fmt.Fprintf(out, "Load of the machine: %s", b)
	return err
}
