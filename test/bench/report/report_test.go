package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../../.."

// TestDocumentsHaveTheStoredFigures fails if a table or a plot was changed by hand, or if the rows were changed and the documents not written again.
func TestDocumentsHaveTheStoredFigures(t *testing.T) {
	files, err := documents(root)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range files {
		got, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Error(err)
		} else if string(got) != want {
			t.Errorf("%s does not have the stored figures: run go run ./test/bench/report -render", path)
		}
	}
	for _, want := range []string{"README.md", "docs/performance.md", "docs/images/scale-engines.svg"} {
		if files[want] == "" {
			t.Errorf("%s is not written", want)
		}
	}
}

// TestStoredFiguresAreComplete checks that each benchmark of the suites has figures of each round.
func TestStoredFiguresAreComplete(t *testing.T) {
	for _, s := range suites {
		r, err := readResults(root, s)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.missing(s); err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
		if strings.HasSuffix(r.Commit, "-dirty") {
			t.Errorf("%s: measured with changes that are not in %s", s.name, r.Commit)
		}
	}
}

func TestAppendFigures(t *testing.T) {
	const printed = `goos: linux
pkg: github.com/kvcast/kvcast/test/bench
cpu: AMD EPYC
BenchmarkServer/B1OneCore-2   	  100000	     14053 ns/op	     12873 server-cpu-ns/batch	       0 B/op
BenchmarkServer/B1OneCore-2   	  100000	     14000 ns/op	     12000 server-cpu-ns/batch	       0 B/op
BenchmarkGrowth/engines=10-2  	       1	 1.1e+10 ns/op	      9000 server-cpu-ns/batch
BenchmarkGrowth/blocks=1000000
--- SKIP: BenchmarkGrowth/blocks=1000000
PASS
`
	values := make(map[string]map[string][]float64)
	if err := appendFigures(values, printed); err != nil {
		t.Fatal(err)
	}
	r := results{Rounds: 2, Figures: make(map[string]map[string]figure)}
	for name, units := range values {
		r.Figures[name] = make(map[string]figure)
		for unit, v := range units {
			r.Figures[name][unit] = summarize(v)
		}
	}
	want := map[string]figure{
		"ns/op": {14026.5, 14000, 14053, 2}, "server-cpu-ns/batch": {12436.5, 12000, 12873, 2}, "B/op": {Rounds: 2},
	}
	if got := r.Figures["Server/B1OneCore"]; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := r.points(curve{family: "Growth/engines", quantity: quantity{unit: "server-cpu-ns/batch", factor: 1e-3}}); len(got) != 1 || got[0] != (point{10, 9, 9, 9}) {
		t.Errorf("got the points %v", got)
	}
	err := r.missing(suite{benchmarks: []benchmark{{"d", "BenchmarkServer/B1$", ""}, {"d", "BenchmarkGrowth", ""}, {"d", "BenchmarkHerd", ""}}})
	const missing = `Growth/engines=10 has ns/op in 1 of 2 rounds
Growth/engines=10 has server-cpu-ns/batch in 1 of 2 rounds
BenchmarkHerd of d gave no figures`
	if err == nil || !sameLines(err.Error(), missing) {
		t.Errorf("got %v, want %s", err, missing)
	}
}

// sameLines reports whether two texts have the same lines, in any order.
func sameLines(a, b string) bool {
	count := make(map[string]int)
	for l := range strings.Lines(a + "\n") {
		count[l]++
	}
	for l := range strings.Lines(b + "\n") {
		count[l]--
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0123: "0.0123", 1.944: "1.94", 12.34: "12.3", 123.4: "123", 1234.5: "1,234", 999.6: "1,000", 1234567: "1,234,567", -5: "-5.00",
	} {
		if got := number(v); got != want {
			t.Errorf("%v: got %q, want %q", v, got, want)
		}
	}
}

func TestReplaceSection(t *testing.T) {
	const document = "a\n<!-- figures of make bench-x -->\nold\n<!-- end of figures of make bench-x -->\nb\n"
	got, err := replaceSection(document, "x", "new\n")
	const want = "a\n<!-- figures of make bench-x -->\n\nnew\n\n<!-- end of figures of make bench-x -->\nb\n"
	if err != nil || got != want {
		t.Errorf("got %q and %v, want %q", got, err, want)
	}
	if again, err := replaceSection(got, "x", "new\n"); err != nil || again != got {
		t.Errorf("again: got %q and %v", again, err)
	}
	if _, err := replaceSection("a\n", "x", ""); err == nil || !strings.Contains(err.Error(), "<!-- figures of make bench-x -->") {
		t.Errorf("got %v, want the missing line", err)
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"-suite=all", `-suite "all" is not allowed: want report or scale`},
		{"-rounds=0", "-rounds 0 is not allowed: want 1 or more"},
		{"x", `argument "x" is not allowed: want flags only`},
	} {
		if err := run([]string{c.args}); err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %s", c.args, err, c.want)
		}
	}
}
