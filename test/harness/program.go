package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// programs are the programs that this process has built, or found up to date.
var programs struct {
	mu    sync.Mutex         // guards all below
	paths map[program]string // of the executables
}

type program struct {
	pkg  string // below the module
	race bool
	// version is what kvcast version prints; empty: that of the module.
	version string
}

// Program returns the path of a build of kvcast, with or without the race detector. The first call for each builds
// kvcast in bin/test of the module, unless what is there is up to date: so all packages that are tested link it once.
func Program(race bool) (string, error) { return program{pkg: "cmd/kvcast", race: race}.build() }

// ProgramOf is Program with another version, as a release has it.
func ProgramOf(version string, race bool) (string, error) {
	return program{pkg: "cmd/kvcast", race: race, version: version}.build()
}

// Router returns the path of a build of the example router.
func Router() (string, error) { return program{pkg: "examples/router"}.build() }

// NATSServer returns the path of a build of natstest/natsserver.
func NATSServer() (string, error) { return program{pkg: "test/harness/natstest/natsserver"}.build() }

func (p program) build() (string, error) {
	programs.mu.Lock()
	defer programs.mu.Unlock()
	if path := programs.paths[p]; path != "" {
		return path, nil
	}
	path, err := p.buildIn("bin/test")
	if err != nil {
		return "", fmt.Errorf("build %s: %w", p.pkg, err)
	}
	if programs.paths == nil {
		programs.paths = make(map[program]string)
	}
	programs.paths[p] = path
	return path, nil
}

// buildIn builds the program in a directory of the module. One process at a time does so.
func (p program) buildIn(dir string) (string, error) {
	root, err := output("go", "list", "-m", "-f", "{{.Dir}}", "github.com/kvcast/kvcast")
	if err != nil {
		return "", err
	}
	dir = filepath.Join(root, dir)
	kind, ldflags := fmt.Sprintf("cgo=%s,race=%t", buildSetting("CGO_ENABLED"), p.race), "-s -w"
	if p.version != "" {
		kind += ",version=" + p.version
		ldflags += " -X github.com/kvcast/kvcast/cmd/kvcast/internal/cli.version=" + p.version
	}
	path := filepath.Join(dir, kind, filepath.Base(p.pkg))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }() // which unlocks it
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	// Without what debuggers need, linking takes half the time.
	_, err = output("go", "build", "-ldflags="+ldflags, fmt.Sprintf("-race=%t", p.race), "-o", path, "github.com/kvcast/kvcast/"+p.pkg)
	return path, err
}

// output runs a command, and returns what it has printed without the line feed at the end.
func output(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).Output() //nolint:noctx // it terminates
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		err = fmt.Errorf("%w\n%s", err, failed.Stderr)
	}
	return strings.TrimSuffix(string(out), "\n"), err
}

// RunTests runs the tests of a package that uses Program, checks that no goroutine is left, and
// returns the exit status: TestMain is os.Exit(harness.RunTests(m)).
func RunTests(m *testing.M, leaks ...goleak.Option) int {
	// By default, a program with the race detector sleeps for a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		panic(err)
	}
	status := m.Run()
	if status != 0 {
		return status
	}
	if err := goleak.Find(leaks...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// buildSetting returns a setting with which this program was built, or "".
func buildSetting(key string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	i := slices.IndexFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == key })
	if i < 0 {
		return ""
	}
	return info.Settings[i].Value
}
