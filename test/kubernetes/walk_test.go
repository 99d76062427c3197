package kubernetes_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/kubernetes"
)

// TestCommandsOfTheWalk executes the commands of docs/kubernetes.md.
func TestCommandsOfTheWalk(t *testing.T) {
	testclass.Packaging(t)
	requireCharts(t)
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("openssl is not installed: run apt-get install openssl")
	}
	s := kubernetes.Start(t)
	createMonitoringKinds(t, s)
	w := newWalk(t, s)
	for _, block := range blocks(t, "docs/kubernetes.md", 9) {
		w.run(block)
	}
}

// blocks returns the blocks of commands of a page, of which there must be a number.
func blocks(t *testing.T, page string, want int) (all []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(kubernetes.Root(t), page))
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range strings.Split(string(text), "```sh\n")[1:] {
		block, _, _ = strings.Cut(block, "```")
		all = append(all, block)
	}
	if len(all) != want {
		t.Fatalf("%s has %d blocks of commands, want %d", page, len(all), want)
	}
	return all
}

// walk is a directory in which commands of pages run, as in the root of the repository.
type walk struct {
	t   *testing.T
	s   *kubernetes.APIServer
	dir string
}

func newWalk(t *testing.T, s *kubernetes.APIServer) *walk {
	t.Helper()
	w := &walk{t, s, t.TempDir()} // the commands write files
	if err := os.Symlink(filepath.Join(kubernetes.Root(t), "deploy"), filepath.Join(w.dir, "deploy")); err != nil {
		t.Fatal(err)
	}
	return w
}

// try runs commands, and returns what they print.
func (w *walk) try(script string) (string, error) {
	w.t.Helper()
	cmd := command(w.t, w.s, "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = w.dir
	output, err := cmd.CombinedOutput()
	w.t.Logf("%s%s", script, output)
	return string(output), err
}

// run runs commands, which must succeed.
func (w *walk) run(script string) string {
	w.t.Helper()
	output, err := w.try(script)
	if err != nil {
		w.t.Fatal(err)
	}
	return output
}
