package restart_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/fleet"
)

const month = 30 * 24 * time.Hour

// offsetVariable names a file with the seconds by which time.Now differs from the clock, in a program of buildWithOffset.
const offsetVariable = "WALL_CLOCK_OFFSET"

// offsetSource is added to package time.
const offsetSource = `package time

import (
	"sync/atomic"
	"syscall"
)

var wallClockOffset atomic.Int64 // seconds

func init() {
	path, ok := syscall.Getenv("` + offsetVariable + `")
	if !ok {
		return
	}
	read := func() {
		text, err := readFile(path)
		if err != nil {
			panic(err)
		}
		negative := len(text) > 0 && text[0] == '-'
		if negative {
			text = text[1:]
		}
		seconds, _, err := leadingInt(text)
		if err != nil {
			panic(err)
		}
		if negative {
			wallClockOffset.Store(-int64(seconds))
		} else {
			wallClockOffset.Store(int64(seconds))
		}
	}
	read()
	go func() {
		for {
			Sleep(10 * Millisecond)
			read()
		}
	}()
}
`

// buildWithOffset builds kvcast with a package time that reads offsetVariable, and returns its path.
func buildWithOffset(t *testing.T) string {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output() //nolint:noctx // it terminates
	if err != nil {
		t.Fatal(err)
	}
	dir, pkg := t.TempDir(), filepath.Join(strings.TrimSpace(string(root)), "src", "time")
	source, err := os.ReadFile(filepath.Join(pkg, "time.go"))
	if err != nil {
		t.Fatal(err)
	}
	const head = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(source), head) != 1 {
		t.Fatalf("time.Now of this version of Go does not begin with %q", head)
	}
	overlay := map[string]string{}
	for name, text := range map[string]string{
		"time.go":   strings.Replace(string(source), head, head+"\tsec += wallClockOffset.Load()\n", 1),
		"offset.go": offsetSource,
	} {
		overlay[filepath.Join(pkg, name)] = filepath.Join(dir, name)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	file, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "kvcast")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	//nolint:noctx // it terminates
	if out, err := exec.Command("go", "build", "-overlay", file, "-o", program, "github.com/kvcast/kvcast/cmd/kvcast").CombinedOutput(); err != nil {
		t.Fatalf("build kvcast: %v\n%s", err, out)
	}
	return program
}

// TestClockJumpsLoseNothing sets the wall clock by up to a month, forwards and backwards, while the server runs, and then
// kills it. It does not change the times of files, which the kernel sets.
func TestClockJumpsLoseNothing(t *testing.T) {
	testclass.Exhaustive(t) // it compiles the standard library anew
	offset := filepath.Join(t.TempDir(), "offset")
	engines := fleet.New(t, *seed)
	var flags []string
	for i := range engineCount {
		flags = append(flags, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	s := newServerIn(t, t.TempDir(), "16MiB", flags...)
	s.Program, s.Wrapper = buildWithOffset(t), []string{"env", offsetVariable + "=" + offset}
	set := func() (by time.Duration) {
		by = time.Duration(s.rng.Int64N(int64(2*month)) - int64(month)).Truncate(time.Second)
		if err := os.WriteFile(offset+".new", []byte(fmt.Sprint(int64(by/time.Second))), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(offset+".new", offset); err != nil { // a whole number at any time
			t.Fatal(err)
		}
		return by
	}
	by := set()
	s.Start(t)
	logged, err := s.Process.Logged(regexp.MustCompile(`^time=(\S+) .* msg=serving`))
	if err != nil {
		t.Fatal(err)
	}
	at, err := time.Parse(time.RFC3339, logged)
	if differs := time.Until(at) - by; err != nil || differs.Abs() > 10*time.Minute {
		t.Fatalf("the clock is set by %v, and the log has the time %q", by, logged)
	}
	s.disturb = func() { set() }
	s.kill(*kills)
	engines.WantViews(s.router)
	if err := s.Process.Stop(); err != nil {
		t.Error(err)
	}
}
