package conformance_test

import (
	"errors"
	"io"
	"testing"

	"github.com/kvcast/kvcast/test/conformance"
	"github.com/kvcast/kvcast/test/conformance/gorunner"
)

// load returns all scripts.
func load(t *testing.T) []*conformance.Script {
	t.Helper()
	all, err := conformance.Load("scripts")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pass plays all scripts for a client.
func pass(t *testing.T, r *conformance.Runner) {
	t.Helper()
	var ended error
	for _, s := range load(t) {
		t.Run(s.Name, func(t *testing.T) {
			if ended != nil {
				t.Fatalf("%s: not played: %v", s.About, ended)
			}
			var wrong []string
			wrong, ended = r.Play(t, s)
			if len(wrong) > 0 {
				t.Errorf("%s", s.About)
			}
			for _, w := range wrong {
				t.Error(w)
			}
			if ended != nil {
				t.Fatal(ended)
			}
		})
	}
}

func TestGo(t *testing.T) {
	t.Parallel()
	jobsIn, jobs := io.Pipe()
	lines, linesOut := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := gorunner.Run(t.Context(), jobsIn, linesOut)
		_ = linesOut.CloseWithError(err) // it returns nil always
		ended <- err
	}()
	pass(t, conformance.NewRunner(jobs, lines))
	_ = jobs.Close() // it returns nil always
	if err := <-ended; err != nil && !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}
