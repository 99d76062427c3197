package main_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/faultfs"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(faultfs.RunTests(m)) }

// waitTimeout bounds each wait for a condition that usually takes at most a second.
const waitTimeout = harness.Timeout

// program returns the path of kvcast, which is built with the race detector if this test is.
func program(t *testing.T) string {
	t.Helper()
	path, err := harness.Program(testclass.RaceEnabled)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// result is the output and the exit status of a command.
type result struct {
	out    string
	err    string
	status int
}

// kvcast runs a command until it exits.
func kvcast(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t), args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run kvcast %v: %v", args, err)
	}
	return result{out: out.String(), err: errOut.String(), status: cmd.ProcessState.ExitCode()}
}

// process is kvcast serve.
type process = harness.Server

// serve starts kvcast serve. It is built with the race detector if this test is.
func serve(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
}

func start(t *testing.T, cfg harness.ProcessConfig) *process {
	t.Helper()
	return harness.Serve(t, cfg)
}
