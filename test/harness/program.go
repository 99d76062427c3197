package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

// programs are the builds of kvcast by this process.
var programs struct {
	mu    sync.Mutex
	dir   string          // guarded by mu; empty before the first build
	paths map[bool]string // guarded by mu; the key reports whether the build has the race detector
}

// Program returns the path of a build of kvcast, with or without the race detector. The first call for each builds
// kvcast. RemovePrograms deletes both builds.
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
	return os.RemoveAll(dir) // no effect if dir is empty
}

// RunTests runs the tests of a package that uses Program, checks that no goroutine is left, and
// returns the exit status: TestMain is os.Exit(harness.RunTests(m)).
func RunTests(m *testing.M) int {
	// By default, a program with the race detector sleeps for a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		panic(err)
	}
	status := m.Run()
	err := RemovePrograms()
	if status == 0 {
		err = errors.Join(err, goleak.Find())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return status
}

// RaceEnabled reports whether this program is built with the race detector.
func RaceEnabled() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
