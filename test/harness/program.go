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

// programs are the programs that this process has built.
var programs struct {
	mu    sync.Mutex         // guards all below
	dir   string             // empty before the first build
	paths map[program]string // of the executables
}

type program struct {
	pkg  string // below the module
	race bool
}

// Program returns the path of a build of kvcast, with or without the race detector. The first call for each builds
// kvcast. RemovePrograms deletes both builds.
func Program(race bool) (string, error) { return program{"cmd/kvcast", race}.build() }

func (p program) build() (string, error) {
	programs.mu.Lock()
	defer programs.mu.Unlock()
	if path := programs.paths[p]; path != "" {
		return path, nil
	}
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "kvcast-test-")
		if err != nil {
			return "", fmt.Errorf("build %s: %w", p.pkg, err)
		}
		programs.dir, programs.paths = dir, make(map[program]string)
	}
	path := filepath.Join(programs.dir, fmt.Sprintf("race=%t", p.race), filepath.Base(p.pkg))
	args := []string{"build", fmt.Sprintf("-race=%t", p.race), "-o", path, "github.com/kvcast/kvcast/" + p.pkg}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil { //nolint:noctx // it terminates
		return "", fmt.Errorf("build %s: %w\n%s", p.pkg, err, out)
	}
	programs.paths[p] = path
	return path, nil
}

// RemovePrograms deletes all builds.
func RemovePrograms() error {
	programs.mu.Lock()
	defer programs.mu.Unlock()
	dir := programs.dir
	programs.dir, programs.paths = "", nil
	return os.RemoveAll(dir) // no effect if dir is empty
}

// RunTests runs the tests of a package that uses Program, checks that no goroutine is left, and
// returns the exit status: TestMain is os.Exit(harness.RunTests(m)).
func RunTests(m *testing.M, leaks ...goleak.Option) int {
	// By default, a program with the race detector sleeps for a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		panic(err)
	}
	status := m.Run()
	err := RemovePrograms()
	if status == 0 {
		err = errors.Join(err, goleak.Find(leaks...))
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
