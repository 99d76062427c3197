// Command run runs tests by their class (package testclass): first those that run with the race detector, where there is cgo, then
// those that declare that they run without it. Each test runs once. It lists failures, and at the end what was skipped
// and why, the slowest tests, and how many passed, failed and were skipped.
//
//	go run ./test/run                                   # tests of class quick of all packages
//	go run ./test/run -class cluster ./test/cluster -- -minutes 10
//	go run ./test/run -check -class quick,peers         # whether the runs since -forget ran each test of these classes
//	go run ./test/run -fuzz 1m ./internal/wire
//
// Flags after -- are for the test binaries. Tests that have run are recorded in bin/test/ran, for -check.
// The exit status is 1 if a test failed, if no test ran, or if -check misses one; 2 for a mistake in the arguments.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

func main() { os.Exit(exitStatus(run(os.Args[1:], os.Stdout))) }

// exitStatus prints an error, and returns the exit status.
func exitStatus(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "run:", err)
	if usage := (usageError{}); errors.As(err, &usage) {
		return 2
	}
	return 1
}

// usageError is a mistake in the arguments.
type usageError struct{ error }

// options are the flags of the command.
type options struct {
	classes  string         // as in testclass.Variable
	run      *regexp.Regexp // of names, nil: all
	race     bool
	full     bool     // at full size
	packages []string // patterns
	args     []string // of test binaries
	perGo    int      // packages that are tested at a time
	parallel int      // tests of a package that wait at a time
	timeout  time.Duration
	slowest  int
	check    bool
	forget   bool
	fuzz     string // time or number of inputs, empty: run tests
}

func parse(args []string) (options, error) {
	o := options{classes: string(testclass.ClassQuick)}
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	flags.StringVar(&o.classes, "class", o.classes, "classes of tests to run, separated by commas, or all; want "+classNames())
	flags.Func("run", "run only the tests whose names match this regular expression", func(text string) (err error) {
		o.run, err = regexp.Compile(text)
		return err
	})
	flags.BoolVar(&o.race, "race", os.Getenv("CGO_ENABLED") != "0", "use the race detector")
	flags.BoolVar(&o.full, "full", false, "run tests at full size, as those of class exhaustive do always")
	flags.IntVar(&o.perGo, "p", 4, "number of packages that are tested at a time: many wait for timers")
	flags.IntVar(&o.parallel, "parallel", 6, "number of tests of a package that run at a time, of those that allow it")
	flags.DurationVar(&o.timeout, "timeout", time.Hour, "time after which the tests of a package are ended, because one hangs")
	flags.IntVar(&o.slowest, "slowest", 10, "number of slowest tests to list")
	flags.BoolVar(&o.check, "check", false, "run nothing; fail if a test of the classes has not run since -forget and has not said why, or for all classes, if it was skipped")
	flags.StringVar(&o.fuzz, "fuzz", "", "instead, fuzz each fuzz target of the packages for this time or number of inputs, such as 1m or 10000x")
	flags.BoolVar(&o.forget, "forget", false, "run nothing; forget which tests have run")
	own, rest := args, []string(nil)
	if i := slices.Index(args, "--"); i >= 0 {
		own, rest = args[:i], args[i+1:]
	}
	if err := flags.Parse(own); err != nil {
		return o, usageError{err}
	}
	o.args, o.packages = rest, flags.Args()
	if len(o.packages) == 0 {
		o.packages = []string{"work"} // all of kvcast, in each of its modules
	}
	if o.classes != "all" {
		for _, name := range strings.Split(o.classes, ",") {
			if !isClass(name) {
				return o, usageError{fmt.Errorf("flag -class: class %q unknown; want %s or all", name, classNames())}
			}
		}
	}
	if o.perGo < 1 || o.parallel < 1 {
		return o, usageError{fmt.Errorf("flags -p and -parallel: got %d and %d; want 1 or more", o.perGo, o.parallel)}
	}
	return o, nil
}

func isClass(name string) bool {
	return slices.Contains(testclass.Classes, testclass.Class(name))
}

func classNames() string {
	var names []string
	for _, c := range testclass.Classes {
		names = append(names, string(c))
	}
	return strings.Join(names, ", ")
}

func run(args []string, stdout io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.forget {
		return forget()
	}
	declared, err := declaredTests(ctx, o.packages)
	if err != nil {
		return err
	}
	if o.check {
		return check(declared, o.classes, stdout)
	}
	if o.fuzz != "" {
		return fuzz(ctx, declared, o.fuzz, stdout)
	}
	report := newReport(stdout)
	for _, p := range passes(declared, o) {
		if err := p.run(ctx, o, report); err != nil {
			return err
		}
	}
	return report.finish(o.slowest)
}

// pass is one call of go test.
type pass struct {
	race     bool
	names    []string // of the tests to run, nil: all
	packages []string
}

// passes returns the calls that run the selected tests.
func passes(declared []test, o options) (all []pass) {
	var withRace, without []*test
	for i := range declared {
		t := &declared[i]
		switch {
		case !testclass.Selected(t.class, o.classes) || !t.matches(o.run):
		case t.withoutRace && o.race:
			without = append(without, t)
		default:
			withRace = append(withRace, t)
		}
	}
	if len(withRace) > 0 {
		p := pass{race: o.race, packages: longestFirst(withRace, o.parallel)}
		// Without names, all other tests of the packages are skipped by what they declare.
		if o.run != nil || !testclass.Selected(testclass.ClassQuick, o.classes) {
			p.names = names(withRace)
		}
		all = append(all, p)
	}
	if len(without) > 0 {
		all = append(all, pass{names: names(without), packages: longestFirst(without, o.parallel)})
	}
	return all
}

func names(tests []*test) []string {
	var names []string
	for _, t := range tests {
		names = append(names, t.name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// longestFirst returns the packages of tests, those first that probably take longest, so that none is left to run alone at the end:
// those with the most tests, of which one that is not quick and does not run beside others counts as many as could run at its time.
func longestFirst(tests []*test, parallel int) []string {
	work := make(map[string]int)
	for _, t := range tests {
		n := 1
		if !t.parallel && t.class != testclass.ClassQuick {
			n = parallel
		}
		work[t.pkg] += n
	}
	return slices.SortedFunc(maps.Keys(work), func(a, b string) int {
		return cmp.Or(cmp.Compare(work[b], work[a]), strings.Compare(a, b))
	})
}

// checks and raceChecks are the numbers of random inputs of a property, without the race detector and with it, which makes them ten
// times slower. At full size, rapid's default counts: 100.
const (
	checks     = 40
	raceChecks = 10
)

// raceOptions are options of the race detector. A test binary waits 20 ms at its end for reports of other goroutines, not a second.
const raceOptions = "atexit_sleep_ms=20"

func (p *pass) run(ctx context.Context, o options, r *report) error {
	args := []string{"test", "-json", "-vet=off", fmt.Sprintf("-p=%d", o.perGo), fmt.Sprintf("-parallel=%d", o.parallel), "-timeout=" + o.timeout.String()}
	if p.race {
		args = append(args, "-race")
	}
	if p.names != nil {
		args = append(args, "-run=^("+strings.Join(p.names, "|")+")$")
	}
	if o.classes != string(testclass.ClassQuick) {
		args = append(args, "-count=1") // what other programs do is no part of the cache's key
	}
	args = append(append(args, p.packages...), o.args...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), testclass.Variable+"="+o.classes)
	switch {
	case o.full:
		cmd.Env = append(cmd.Env, testclass.FullVariable+"=1")
	case !testclass.Selected(testclass.ClassExhaustive, o.classes):
		n := checks
		if p.race {
			n = raceChecks
		}
		cmd.Env = append(cmd.Env, fmt.Sprintf("RAPID_CHECKS=%d", n))
	}
	if o.classes == string(testclass.ClassQuick) && os.Getenv("GOGC") == "" {
		cmd.Env = append(cmd.Env, "GOGC=400") // less CPU time for more memory
	}
	if p.race {
		cmd.Env = append(cmd.Env, strings.TrimSpace("GORACE="+raceOptions+" "+os.Getenv("GORACE")))
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = os.Stderr
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start go test: %w", err)
	}
	began := time.Now()
	readErr := r.read(events)
	err = cmd.Wait()
	r.passEnded(p, time.Since(began), cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	if ctx.Err() != nil {
		return fmt.Errorf("go test: %w", ctx.Err())
	}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) && r.failed() {
		err = nil // the report has it
	}
	if err := errors.Join(readErr, err); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	return nil
}
