// Package cost_test guards what the hot path costs, in figures that do not depend on the machine's speed or load: instructions, as valgrind
// counts them, and allocations.
package cost_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

var update = flag.Bool("update", false, "store the figures that were measured")

// tolerance is how far the instructions may be from the stored figure. Seeds of hashes, and goroutines of the runtime, change them by some tenths of a percent.
const tolerance = 0.03

// storedFile has the stored figures. They are of one version of Go, since another one compiles other instructions.
const storedFile = "testdata/costs.json"

// costs are the stored figures.
type costs struct {
	Go, Arch string
	Costs    map[string]cost
}

// cost is that of one operation.
type cost struct {
	Instructions, Allocations int
}

// benchmarks are what is guarded. runs is a number of operations that takes some 100 million instructions.
var benchmarks = []struct {
	name, dir, benchmark string
	runs                 int
}{
	{"decode B1", "../../internal/wire", "BenchmarkDecodeAdmit/B1/array", 10_000},
	{"decode B2", "../../internal/wire", "BenchmarkDecodeAdmit/B2/array", 100_000},
	{"pipeline and encode B1", "../../pipeline", "BenchmarkLaneB1/pool=10000", 10_000},
	{"pipeline and encode B2", "../../pipeline", "BenchmarkLaneB2/pool=10000", 50_000},
	{"apply B1", "../../internal/core/index", "BenchmarkApplyEncoded/B1", 16_384},
	{"apply B2", "../../internal/core/index", "BenchmarkApplyEncoded/B2", 65_536},
	{"match, 32 blocks, 8 of 64 workers", "../../internal/core/index", "BenchmarkMatchBest", 50_000},
	{"encode matches", "../../server/match", "BenchmarkResponse", 50_000},
}

func TestCostsAreAsStored(t *testing.T) {
	testclass.Process(t)
	valgrind, err := exec.LookPath("valgrind")
	if err != nil {
		t.Skip("valgrind is not installed: run make prepare")
	}
	var stored costs
	if data, err := os.ReadFile(storedFile); err != nil {
		t.Fatal(err)
	} else if err := json.Unmarshal(data, &stored); err != nil {
		t.Fatal(err)
	}
	if !*update && (stored.Go != runtime.Version() || stored.Arch != runtime.GOARCH) {
		t.Skipf("the stored figures are of %s on %s", stored.Go, stored.Arch)
	}
	measured := costs{Go: runtime.Version(), Arch: runtime.GOARCH, Costs: make(map[string]cost)}
	programs := t.TempDir()
	for _, b := range benchmarks {
		c := measure(t, valgrind, compile(t, programs, b.dir), b.benchmark, b.runs)
		measured.Costs[b.name] = c
		want, ok := stored.Costs[b.name]
		if *update {
			continue
		}
		change := float64(c.Instructions)/float64(want.Instructions) - 1
		t.Logf("%s: %d instructions, stored %d (%+.1f %%), %d allocations", b.name, c.Instructions, want.Instructions, 100*change, c.Allocations)
		if !ok || math.Abs(change) > tolerance || c.Allocations != want.Allocations {
			t.Errorf("%s: %d instructions and %d allocations, stored %d and %d: if that is intended, run make costs", b.name,
				c.Instructions, c.Allocations, want.Instructions, want.Allocations)
		}
	}
	if !*update {
		return
	}
	data, err := json.MarshalIndent(measured, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(storedFile, append(data, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// compile returns a program of a package's benchmarks. It is compiled as the packages without cgo are in .ci/run.
func compile(t *testing.T, programs, dir string) string {
	t.Helper()
	program := filepath.Join(programs, filepath.Base(dir)+".test")
	if _, err := os.Stat(program); err == nil {
		return program
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-trimpath", "-o", program, ".")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("compile the benchmarks of %s: %v\n%s", dir, err, out)
	}
	return program
}

// measure returns the cost of an operation of a benchmark: the difference of two numbers of operations, so that what precedes them does not count.
func measure(t *testing.T, valgrind, program, benchmark string, runs int) cost {
	t.Helper()
	few, _ := count(t, valgrind, program, benchmark, runs)
	many, allocations := count(t, valgrind, program, benchmark, 3*runs)
	return cost{(many - few) / (2 * runs), allocations}
}

var (
	instructions = regexp.MustCompile(`I +refs: +([0-9,]+)`)
	allocations  = regexp.MustCompile(`\s(\d+) allocs/op`)
)

// count runs a benchmark and returns all instructions of the program, and the allocations of an operation.
func count(t *testing.T, valgrind, program, benchmark string, runs int) (all, allocated int) {
	t.Helper()
	pattern := "^" + strings.ReplaceAll(benchmark, "/", "$/^") + "$"
	cmd := exec.CommandContext(t.Context(), valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
		program, "-test.run=^$", "-test.bench="+pattern, "-test.benchmem", fmt.Sprintf("-test.benchtime=%dx", runs))
	// Concurrent garbage collection would count as much as it happens to run.
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "GOGC=off")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", benchmark, err, out.Bytes())
	}
	refs, allocs := instructions.FindSubmatch(out.Bytes()), allocations.FindSubmatch(out.Bytes())
	if refs == nil || allocs == nil {
		t.Fatalf("%s: no figures in\n%s", benchmark, out.Bytes())
	}
	all, err := strconv.Atoi(strings.ReplaceAll(string(refs[1]), ",", ""))
	if err == nil {
		allocated, err = strconv.Atoi(string(allocs[1]))
	}
	if err != nil {
		t.Fatal(err)
	}
	return all, allocated
}
