package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json, see go doc cmd/test2json.
type event struct {
	Action, Package, ImportPath, Test, Output, FailedBuild string
	Elapsed                                                float64 // s
}

// key names a test of a package; test is empty for the package.
type key struct{ pkg, test string }

// top returns the key of the test function that a subtest belongs to.
func (k key) top() key {
	name, _, _ := strings.Cut(k.test, "/")
	return key{k.pkg, name}
}

// skipped is a test that said why it did not run.
type skipped struct {
	key
	reason string
}

// timed is a test with its time.
type timed struct {
	key
	elapsed time.Duration
}

// report collects what runs of go test say.
type report struct {
	out      io.Writer
	output   map[key][]string // lines of tests that have not ended
	outcomes map[key]outcome  // of test functions
	skips    []skipped
	times    []timed
	passed   int
	failures []key
	broken   []string // packages that failed without a test that failed
	notes    []string // a line for each pass
}

func newReport(out io.Writer) *report {
	return &report{out: out, output: make(map[key][]string), outcomes: make(map[key]outcome)}
}

func (r *report) failed() bool { return len(r.failures) > 0 || len(r.broken) > 0 }

// read reads the output of go test -json.
func (r *report) read(events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if jsonErr := json.Unmarshal(line, &e); jsonErr != nil {
				printf(r.out, "%s", line) // of the go command itself
			} else {
				r.take(&e)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the output of go test: %w", err)
		}
	}
}

func (r *report) take(e *event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		printf(r.out, "%s", e.Output)
	case "output":
		r.output[k] = append(r.output[k], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.packageEnded(e)
		} else {
			r.testEnded(k, e)
		}
		delete(r.output, k)
	}
}

func (r *report) packageEnded(e *event) {
	k := key{pkg: e.Package}
	switch e.Action {
	case "skip": // it has no tests
	case "pass":
		cached := ""
		if slices.ContainsFunc(r.output[k], func(line string) bool { return strings.HasSuffix(line, "(cached)\n") }) {
			cached = " (cached)"
		}
		printf(r.out, "ok  \t%s\t%.3fs%s\n", e.Package, e.Elapsed, cached)
	default:
		if !slices.ContainsFunc(r.failures, func(f key) bool { return f.pkg == e.Package }) {
			r.broken = append(r.broken, e.Package)
		}
		// Tests that a crash has ended: the last one has the stack.
		for unfinished, lines := range r.output {
			if unfinished.pkg == e.Package && unfinished.test != "" {
				printf(r.out, "%s", strings.Join(lines, ""))
				delete(r.output, unfinished)
			}
		}
		printf(r.out, "%s", strings.Join(r.output[k], "")) // ends with FAIL, the package and its time
	}
}

func (r *report) testEnded(k key, e *event) {
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		r.failures = append(r.failures, k)
		printf(r.out, "%s", strings.Join(r.output[k], ""))
	case "skip":
		// A test of another class or without the race detector is not selected, and has nothing to say.
		if notSelected(r.output[k]) {
			return
		}
		r.skips = append(r.skips, skipped{k, reason(r.output[k])})
		if k == k.top() {
			r.outcomes[k] = max(r.outcomes[k], outcomeSkipped)
		}
		return
	}
	if k == k.top() {
		r.outcomes[k] = outcomeRan
		r.times = append(r.times, timed{k, time.Duration(e.Elapsed * float64(time.Second))})
	}
}

// notSelected reports whether a test was skipped by what it declares; see package testclass.
func notSelected(output []string) bool {
	text := strings.Join(output, "")
	return strings.Contains(text, ": it is of class ") || strings.Contains(text, ": it runs without the race detector")
}

// reason returns what t.Skip printed: "    file_test.go:12: reason".
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "--- SKIP") || strings.HasPrefix(line, "===") {
			continue
		}
		if _, text, ok := strings.Cut(line, ": "); ok {
			return text
		}
		return line
	}
	return "no reason given"
}

func (r *report) passEnded(p *pass, took, cpu time.Duration) {
	kind := "without the race detector"
	if p.race {
		kind = "with the race detector"
	}
	r.notes = append(r.notes, fmt.Sprintf("%d packages %s in %v, %v of CPU", len(p.packages), kind, took.Round(time.Second), cpu.Round(time.Second)))
}

// finish prints the summary, and records what has run. It returns an error if a test failed, or none ran.
func (r *report) finish(slowest int) error {
	slices.SortFunc(r.times, func(a, b timed) int { return int(b.elapsed - a.elapsed) })
	if slowest > 0 && len(r.times) > 0 {
		printf(r.out, "\nslowest:\n")
		for _, t := range r.times[:min(slowest, len(r.times))] {
			printf(r.out, "%8.1fs  %s %s\n", t.elapsed.Seconds(), short(t.pkg), t.test)
		}
	}
	r.printSkips()
	if r.failed() {
		printf(r.out, "\nfailed:\n")
		for _, k := range r.failures {
			printf(r.out, "    %s %s\n", short(k.pkg), k.test)
		}
		for _, pkg := range r.broken {
			printf(r.out, "    %s\n", short(pkg))
		}
	}
	printf(r.out, "\n")
	for _, line := range r.notes {
		printf(r.out, "%s\n", line)
	}
	printf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, len(r.failures)+len(r.broken), len(r.skips))
	if err := remember(r.outcomes); err != nil {
		return err
	}
	switch {
	case r.failed():
		return errors.New("tests failed")
	case !slices.Contains(slices.Collect(maps.Values(r.outcomes)), outcomeRan):
		return errors.New("no test ran: each was skipped, or none has the classes and the name")
	}
	return nil
}

// printSkips lists the tests that were skipped, by their reasons.
func (r *report) printSkips() {
	if len(r.skips) == 0 {
		return
	}
	printf(r.out, "\nskipped:\n")
	byReason := make(map[string][]key)
	var reasons []string
	for _, s := range r.skips {
		if byReason[s.reason] == nil {
			reasons = append(reasons, s.reason)
		}
		byReason[s.reason] = append(byReason[s.reason], s.key)
	}
	for _, why := range reasons {
		printf(r.out, "    %s\n", why)
		// Subtests of one test with one reason take one line.
		counts := make(map[key]int)
		for _, k := range byReason[why] {
			counts[k.top()]++
		}
		for _, k := range byReason[why] {
			n, top := counts[k.top()], k.top()
			switch delete(counts, top); {
			case n > 1:
				printf(r.out, "        %s %s, %d subtests\n", short(k.pkg), top.test, n)
			case n == 1:
				printf(r.out, "        %s %s\n", short(k.pkg), k.test)
			}
		}
	}
}

// short returns the path of a package below this module.
func short(pkg string) string { return strings.TrimPrefix(pkg, "github.com/kvcast/kvcast/") }

// printf prints to the terminal, whose errors do not matter.
func printf(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format, args...) }
