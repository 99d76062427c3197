package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// fuzz fuzzes each target for a time or a number of inputs, as in go test -fuzztime. Inputs that fail a target are
// written below testdata of its package, where the tests have them from then on.
func fuzz(ctx context.Context, declared []test, fuzztime string, out io.Writer) error {
	dir, err := os.MkdirTemp("", "fuzz")
	if err != nil {
		return fmt.Errorf("fuzz: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	built, binary, targets := "", filepath.Join(dir, "package.test"), 0
	for _, t := range declared {
		if !strings.HasPrefix(t.name, "Fuzz") {
			continue
		}
		targets++
		if t.pkg != built {
			// One build of the package, with the coverage that guides the fuzzer, serves all of its targets.
			build := exec.CommandContext(ctx, "go", "test", "-vet=off", "-c", "-fuzz=.", "-o", binary, t.pkg)
			build.Stdout, build.Stderr = out, out
			if err := build.Run(); err != nil {
				return fmt.Errorf("fuzz: build %s: %w", t.pkg, err)
			}
			built = t.pkg
		}
		printf(out, "%s %s\n", short(t.pkg), t.name)
		cmd := exec.CommandContext(ctx, binary, "-test.run=^$", "-test.fuzz=^"+t.name+"$", "-test.fuzztime="+fuzztime,
			"-test.fuzzminimizetime=20x", "-test.fuzzcachedir="+filepath.Join(dir, "cache", t.name))
		cmd.Dir, cmd.Stdout, cmd.Stderr = t.dir, out, out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("fuzz %s %s: %w", short(t.pkg), t.name, err)
		}
	}
	if targets == 0 {
		return errors.New("fuzz: the packages have no fuzz targets")
	}
	printf(out, "%d targets, no failure\n", targets)
	return nil
}
