package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// programs are the builds of kvcast that this process has made.
var programs struct {
	mu    sync.Mutex
	dir   string          // guarded by mu; empty before the first build
	paths map[bool]string // guarded by mu; by whether it has the race detector
}

// Program returns the path of a build of kvcast, with or without the race detector. The first call
// of either kind in a process builds it; RemovePrograms deletes both.
func Program(race bool) (string, error) {
	programs.mu.Lock()
	defer programs.mu.Unlock()
	if path := programs.paths[race]; path != "" {
		return path, nil
	}
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "kvcast-test-")
		if err != nil {
			return "", fmt.Errorf("build kvcast: %w", err)
		}
		programs.dir, programs.paths = dir, make(map[bool]string)
	}
	path := filepath.Join(programs.dir, fmt.Sprintf("race=%t", race), "kvcast")
	args := []string{"build", fmt.Sprintf("-race=%t", race), "-o", path, "github.com/kvcast/kvcast/cmd/kvcast"}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil { //nolint:noctx // it terminates
		return "", fmt.Errorf("build kvcast: %w\n%s", err, out)
	}
	programs.paths[race] = path
	return path, nil
}

// RemovePrograms deletes the builds of Program.
func RemovePrograms() error {
	programs.mu.Lock()
	defer programs.mu.Unlock()
	dir := programs.dir
	programs.dir, programs.paths = "", nil
	return os.RemoveAll(dir) // an empty path removes nothing
}

// RunTests runs the tests of a package that uses Program, checks that no goroutine is left, and
// returns the exit status: TestMain is os.Exit(harness.RunTests(m)).
func RunTests(m *testing.M) int {
	// By default, a program with the race detector sleeps for a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		return failed(err)
	}
	status := m.Run()
	if err := RemovePrograms(); err != nil {
		return failed(err)
	}
	if status == 0 {
		if err := goleak.Find(); err != nil {
			return failed(err)
		}
	}
	return status
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}
