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
	root := kubernetes.Root(t)
	text, err := os.ReadFile(filepath.Join(root, "docs", "kubernetes.md"))
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(text), "```sh\n")[1:]
	if len(blocks) != 9 {
		t.Errorf("docs/kubernetes.md has %d blocks of commands, want 9", len(blocks))
	}
	dir := t.TempDir() // the commands write files
	if err := os.Symlink(filepath.Join(root, "deploy"), filepath.Join(dir, "deploy")); err != nil {
		t.Fatal(err)
	}
	for _, block := range blocks {
		script, _, _ := strings.Cut(block, "```")
		cmd := command(t, s, "bash", "-euo", "pipefail", "-c", script)
		cmd.Dir = dir
		output, err := cmd.CombinedOutput()
		t.Logf("%s%s", script, output)
		if err != nil {
			t.Fatal(err)
		}
	}
}
