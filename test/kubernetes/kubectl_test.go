package kubernetes_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/kubernetes"
)

// command returns a command that runs in the root directory of the repository, with programs of bin and bin/tools before
// others, and ends with the test. It uses the API server unless that is nil.
func command(t *testing.T, s *kubernetes.APIServer, name string, args ...string) *exec.Cmd {
	t.Helper()
	root := kubernetes.Root(t)
	for _, dir := range []string{"bin", filepath.Join("bin", "tools")} {
		if path := filepath.Join(root, dir, name); isFile(path) {
			name = path
		}
	}
	cmd := exec.CommandContext(harness.Context(t), name, args...)
	cmd.Dir = root
	// Tools keep caches and settings in the home directory.
	// Variables of the caller must not change what make does.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "NAMESPACE=") || strings.HasPrefix(v, "ZMQ_") || strings.HasPrefix(v, "KUBECTL=") || strings.HasPrefix(v, "GO=")
	})
	cmd.Env = append(cmd.Env, "HOME="+t.TempDir(), "PATH="+filepath.Join(root, "bin")+":"+filepath.Join(root, "bin", "tools")+":"+os.Getenv("PATH"), "MAKEFLAGS=", "MAKELEVEL=")
	if s != nil {
		cmd.Env = append(cmd.Env, "KUBECONFIG="+s.Kubeconfig)
	}
	return cmd
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// run runs a command, and returns what it prints. The test fails if the command does.
func run(t *testing.T, s *kubernetes.APIServer, name string, args ...string) string {
	t.Helper()
	return runWith(t, s, "", name, args...)
}

// runWith runs a command with a standard input.
func runWith(t *testing.T, s *kubernetes.APIServer, input, name string, args ...string) string {
	t.Helper()
	cmd := command(t, s, name, args...)
	cmd.Stdin = strings.NewReader(input)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, output)
	}
	return string(output)
}

// requireMake skips the test if make is not installed.
func requireMake(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is not installed: run apt-get install make")
	}
}
