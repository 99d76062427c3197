// Command mutate proves that tests would notice if a rule of the code were
// broken. Its argument is a file of mutants: each names a rule, and has a text of
// one source file and what to put in its place. Each is made on its own, in a copy
// of the module, and some test of the file's package must then fail.
//
// A mutant is an error, too, if its text is not found just once, since the code has
// moved on, or if it does not compile. The exit status is 0 if all is well, 1 if a
// mutant survives, and 2 if that could not be found out.
//
// The file of mutants, in which a line that begins with # is a comment:
//
//	= the rule that is broken, as a sentence
//	@ path/of/the/file.go
//	- a line of its text, without the white space before it
//	- the next line
//	+ what it becomes
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	switch err := run(ctx, os.Args[1:], os.Stdout); {
	case err == nil:
	case errors.Is(err, errSurvivors):
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	default:
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(2)
	}
}

var errSurvivors = errors.New("no test fails where a rule is broken")

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mutate", flag.ContinueOnError)
	root := flags.String("C", ".", "the module's directory")
	jobs := flags.Int("j", 2, "how many mutants to test at a time")
	slow := flags.String("last", "^$", "run the tests that match this regexp only where all others pass")
	only := flags.String("run", "", "only the mutants whose rule matches this regexp")
	if err := flags.Parse(args); err != nil {
		return err
	}
	chosen, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	mutants, err := readMutants(filepath.Join(*root, flags.Arg(0)))
	if err != nil {
		return err
	}
	var todo []mutant
	for _, m := range mutants {
		if _, err := m.apply(*root); err != nil { // of all, chosen or not
			return err
		}
		if chosen.MatchString(m.rule) {
			todo = append(todo, m)
		}
	}
	scratch, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)

	queue := make(chan mutant)
	results := make(chan result)
	var group sync.WaitGroup
	for i := range max(1, *jobs) {
		dir := filepath.Join(scratch, fmt.Sprint(i))
		if err := copyModule(ctx, *root, dir); err != nil {
			return err
		}
		if i == 0 {
			if err := unbroken(ctx, dir, *slow, todo); err != nil {
				return err
			}
		}
		group.Go(func() {
			for m := range queue {
				results <- m.test(ctx, dir, *slow)
			}
		})
	}
	go func() {
		for _, m := range todo {
			queue <- m
		}
		close(queue)
		group.Wait()
		close(results)
	}()
	var errs []error
	survivors := 0
	for r := range results {
		switch {
		case r.err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", r.mutant.rule, r.err))
		case r.survived:
			survivors++
			fmt.Fprintf(out, "SURVIVES  %s (%s)\n", r.mutant.rule, r.mutant.file)
		default:
			fmt.Fprintf(out, "fails     %s (%s)\n", r.mutant.rule, r.by)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	fmt.Fprintf(out, "%d mutants, %d survive\n", len(todo), survivors)
	if survivors > 0 {
		return errSurvivors
	}
	return nil
}

// mutant is a rule, and how it is broken.
type mutant struct {
	rule, file string
	old, new   []string
}

// readMutants reads a file of mutants.
func readMutants(name string) ([]mutant, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var all []mutant
	for i, line := range strings.Split(string(text), "\n") {
		wrong := func(what string) error { return fmt.Errorf("%s:%d: %s", name, i+1, what) }
		if line == "" || line[0] == '#' {
			continue
		}
		kind, rest, _ := strings.Cut(line, " ")
		if kind != "=" && len(all) == 0 {
			return nil, wrong("want a line with = and a rule first")
		}
		switch kind {
		case "=":
			all = append(all, mutant{rule: rest})
		case "@":
			all[len(all)-1].file = rest
		case "-":
			all[len(all)-1].old = append(all[len(all)-1].old, rest)
		case "+":
			all[len(all)-1].new = append(all[len(all)-1].new, rest)
		default:
			return nil, wrong("want a line that begins with =, @, -, + or #")
		}
	}
	for _, m := range all {
		if m.file == "" || len(m.old) == 0 {
			return nil, fmt.Errorf("%s: %s: want a file and a text", name, m.rule)
		}
	}
	return all, nil
}

// apply returns the file's text with the mutant made. Lines are compared, and put
// in, without the white space before them.
func (m mutant) apply(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(text), "\n")
	found := -1
	for i := 0; i+len(m.old) <= len(lines); i++ {
		same := true
		for k, old := range m.old {
			same = same && strings.TrimLeft(lines[i+k], "\t ") == old
		}
		if same && found >= 0 {
			return "", fmt.Errorf("%s: the text is in %s twice, in lines %d and %d", m.rule, m.file, found+1, i+1)
		}
		if same {
			found = i
		}
	}
	if found < 0 {
		return "", fmt.Errorf("%s: the text is not in %s: has the rule moved?", m.rule, m.file)
	}
	lines = append(append(append([]string{}, lines[:found]...), m.new...), lines[found+len(m.old):]...)
	return strings.Join(lines, "\n"), nil
}

type result struct {
	mutant   mutant
	survived bool
	by       string // the first test that failed
	err      error
}

// test tells whether the tests notice the mutant, in a copy of the module.
func (m mutant) test(ctx context.Context, dir, slow string) (r result) {
	r.mutant = m
	file := filepath.Join(dir, m.file)
	before, err := os.ReadFile(file)
	if err != nil {
		r.err = err
		return r
	}
	text, err := m.apply(dir)
	if err == nil {
		err = os.WriteFile(file, []byte(text), 0o600)
	}
	if err != nil {
		r.err = err
		return r
	}
	defer func() { r.err = errors.Join(r.err, os.WriteFile(file, before, 0o600)) }()
	r.by, r.err = testPackage(ctx, dir, filepath.Dir(m.file), slow)
	r.survived = r.by == ""
	return r
}

// unbroken tells why the tests fail without any mutant.
func unbroken(ctx context.Context, dir, slow string, mutants []mutant) error {
	seen := make(map[string]bool)
	for _, m := range mutants {
		pkg := filepath.Dir(m.file)
		if seen[pkg] {
			continue
		}
		seen[pkg] = true
		if by, err := testPackage(ctx, dir, pkg, slow); err != nil || by != "" {
			return errors.Join(fmt.Errorf("%s fails without any mutant: %s", pkg, by), err)
		}
	}
	return nil
}

// testTimeout is how long a package's tests may take: a mutant may never end.
const testTimeout = 2 * time.Minute

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)|^(panic: .*)|^(FAIL)`)

// testPackage returns the first test of a package that fails, "" where none does,
// and an error where the package does not compile.
func testPackage(ctx context.Context, dir, pkg, slow string) (by string, err error) {
	binary := filepath.Join(dir, pkg, "mutate.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, "./"+pkg)
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, out)
	}
	for _, which := range []string{"-test.skip=" + slow, "-test.run=" + slow} {
		// What rapid finds need not be made small, nor kept.
		tests := exec.CommandContext(ctx, binary, which, "-test.failfast", "-test.timeout", testTimeout.String(),
			"-rapid.shrinktime", "1ms", "-rapid.nofailfile")
		tests.Dir = filepath.Join(dir, pkg)
		out, err := tests.CombinedOutput()
		var exit *exec.ExitError
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case err == nil:
			continue
		case !errors.As(err, &exit):
			return "", err
		}
		if m := failed.FindStringSubmatch(string(out)); m != nil {
			return m[1] + m[2] + m[3], nil
		}
		return "exit without a word", nil
	}
	return "", nil
}

// copyModule copies the files that git knows or would.
func copyModule(ctx context.Context, root, dir string) error {
	list := exec.CommandContext(ctx, "git", "ls-files", "-co", "--exclude-standard", "-z")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("list files: %w", err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not yet committed so
		}
		if err == nil {
			err = os.WriteFile(to, text, 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
