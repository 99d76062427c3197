package conformance_test

import (
	"os/exec"
	"testing"

	"github.com/kvcast/kvcast/test/conformance"
)

// process plays all scripts for a client that is a program of its own.
func process(t *testing.T, argv ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Stderr = t.Output()
	jobs, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	lines, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := conformance.NewRunner(jobs, lines)
	pass(t, r)
	failed := t.Failed()
	if failed { // it may wait for what does not come
		_ = cmd.Process.Kill() // an error means that it has ended
	}
	_ = jobs.Close() // an error means that it has ended
	r.Drain()
	if err := cmd.Wait(); err != nil && !failed {
		t.Errorf("%s: %v", argv[0], err)
	}
}
