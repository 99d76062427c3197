package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

func TestDeclarationsAreReadFromSource(t *testing.T) {
	got, err := testsOf("p", "a_test.go", `package a
func TestQuick(t *testing.T) { t.Run("x", func(t *testing.T) { testclass.Cluster(t) }) }
func TestCluster(t *testing.T) { testclass.Cluster(t); t.Run("x", func(t *testing.T) { t.Parallel() }) }
func TestMemory(t *testing.T) { testclass.WithoutRace(t); testclass.Exhaustive(t) }
func TestMain(m *testing.M) {}
func Testing(t *testing.T) {}
func helper(t *testing.T) {}
func (s *suite) TestMethod(t *testing.T) {}
func FuzzDecode(f *testing.F) {}
func Example() {
	// Output: 1
}
func ExampleIsOnlyCompiled() {}
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []test{
		{"p", "Example", "", testclass.ClassQuick, false, false},
		{"p", "TestQuick", "", testclass.ClassQuick, false, false},
		{"p", "TestCluster", "", testclass.ClassCluster, false, true},
		{"p", "TestMemory", "", testclass.ClassExhaustive, true, false},
		{"p", "FuzzDecode", "", testclass.ClassQuick, false, false},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(test{})); diff != "" {
		t.Errorf("tests (-want +got):\n%s", diff)
	}
	_, err = testsOf("p", "a_test.go", "package a\nfunc TestX(t *testing.T) { testclass.Slow(t) }")
	if err == nil || !strings.Contains(err.Error(), "a_test.go: TestX calls testclass.Slow, which is no class; want quick, ") {
		t.Errorf("unknown class: got error %v", err)
	}
}

func TestEachSelectedTestIsInOnePass(t *testing.T) {
	declared := []test{
		{"p", "TestA", "", testclass.ClassQuick, false, false},
		{"p", "TestB", "", testclass.ClassQuick, true, false},
		{"q", "TestC", "", testclass.ClassCluster, false, false},
		{"r", "TestE", "", testclass.ClassCluster, true, false},
	}
	for _, tt := range []struct {
		name string
		o    options
		want []pass
	}{
		{"quick", options{classes: "quick", race: true}, []pass{{true, nil, []string{"p"}}, {false, []string{"TestB"}, []string{"p"}}}},
		{"quick without cgo", options{classes: "quick"}, []pass{{false, nil, []string{"p"}}}},
		{"one class", options{classes: "cluster", race: true}, []pass{{true, []string{"TestC"}, []string{"q"}}, {false, []string{"TestE"}, []string{"r"}}}},
		{"all", options{classes: "all", race: true}, []pass{{true, nil, []string{"p", "q"}}, {false, []string{"TestB", "TestE"}, []string{"p", "r"}}}},
		{"by name", options{classes: "quick", run: regexp.MustCompile("A$"), race: true}, []pass{{true, []string{"TestA"}, []string{"p"}}}},
		{"none", options{classes: "live"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, passes(declared, tt.o), cmp.AllowUnexported(pass{})); diff != "" {
				t.Errorf("passes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPackagesThatTakeLongestBeginFirst(t *testing.T) {
	tests := []*test{
		{"many", "TestA", "", testclass.ClassQuick, false, false},
		{"many", "TestB", "", testclass.ClassQuick, false, false},
		{"one", "TestC", "", testclass.ClassQuick, false, false},
		{"other", "TestC", "", testclass.ClassQuick, false, false},
		{"in turn", "TestD", "", testclass.ClassProcess, false, false},
		{"in turn", "TestE", "", testclass.ClassProcess, false, false},
		{"beside others", "TestF", "", testclass.ClassProcess, false, true},
		{"beside others", "TestG", "", testclass.ClassProcess, false, true},
		{"beside others", "TestH", "", testclass.ClassProcess, false, true},
	}
	if diff := cmp.Diff([]string{"in turn", "beside others", "many", "one", "other"}, longestFirst(tests, 6)); diff != "" {
		t.Errorf("packages (-want +got):\n%s", diff)
	}
}

// transcript is what go test -json printed of a package with a test of each outcome.
const transcript = `{"Action":"output","Package":"p","Test":"TestPasses","Output":"    a_test.go:1: noise\n"}
{"Action":"pass","Package":"p","Test":"TestPasses","Elapsed":2}
{"Action":"output","Package":"p","Test":"TestFails/sub","Output":"    a_test.go:2: got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestFails/sub","Elapsed":1}
{"Action":"fail","Package":"p","Test":"TestFails","Elapsed":1}
{"Action":"output","Package":"p","Test":"TestOther","Output":"    a_test.go:3: it is of class cluster: set KVCAST_TEST_CLASSES=cluster to run it\n"}
{"Action":"output","Package":"p","Test":"TestOther","Output":"--- SKIP: TestOther (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestOther","Elapsed":0}
{"Action":"output","Package":"p","Test":"TestMissing","Output":"    a_test.go:4: Chromium is missing: run make console-test\n"}
{"Action":"output","Package":"p","Test":"TestMissing","Output":"--- SKIP: TestMissing (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestMissing","Elapsed":0}
{"Action":"output","Package":"p","Output":"FAIL\tp\t3.000s\n"}
{"Action":"fail","Package":"p","Elapsed":3}
{"Action":"output","Package":"q","Test":"TestCrashes","Output":"panic: boom\n"}
{"Action":"fail","Package":"q","Elapsed":3}
go: no such tool
`

func TestReportHasFailuresAndSkips(t *testing.T) {
	t.Chdir(t.TempDir())
	declared := []test{
		{"p", "TestPasses", "", testclass.ClassQuick, false, false}, {"p", "TestFails", "", testclass.ClassQuick, false, false},
		{"p", "TestOther", "", testclass.ClassCluster, false, false}, {"p", "TestMissing", "", testclass.ClassQuick, false, false},
		{"q", "TestCrashes", "", testclass.ClassQuick, false, false},
	}
	var out strings.Builder
	r := newReport(&out)
	if err := r.read(strings.NewReader(transcript)); err != nil {
		t.Fatal(err)
	}
	if err := r.finish(1); err == nil || err.Error() != "tests failed" {
		t.Errorf("finish: got error %v", err)
	}
	text := out.String()
	for _, want := range []string{
		"got 1, want 2", "panic: boom", "go: no such tool", "FAIL\tp\t3.000s", "     2.0s  p TestPasses\n\n", // the slowest one
		"\nskipped:\n    Chromium is missing: run make console-test\n        p TestMissing\n",
		"\nfailed:\n    p TestFails/sub\n    p TestFails\n    q\n", "\n1 passed, 3 failed, 1 skipped\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, unwanted := range []string{"noise", "TestOther"} {
		if strings.Contains(text, unwanted) {
			t.Errorf("%q is in\n%s", unwanted, text)
		}
	}
	outcomes, err := recorded()
	if err != nil {
		t.Fatal(err)
	}
	var missed []string
	for _, m := range missing(declared, "all", outcomes) {
		missed = append(missed, m.name)
	}
	if want := []string{"TestOther", "TestMissing", "TestCrashes"}; !cmp.Equal(missed, want) {
		t.Errorf("have not run: got %q, want %q", missed, want)
	}
	// TestMissing says why it did not run.
	for classes, wants := range map[string]string{"quick": "1 tests of quick have not run", "all": "3 tests of all have not run"} {
		if err := check(declared, classes, &out); err == nil || err.Error() != wants {
			t.Errorf("check of %s: got error %v, want %s", classes, err, wants)
		}
	}
	if err := check(declared[:1], "quick", &out); err != nil {
		t.Errorf("check of a test that has run: %v", err)
	}
}

func TestRunOfNothingIsAnError(t *testing.T) {
	t.Chdir(t.TempDir())
	var out strings.Builder
	r := newReport(&out)
	if err := r.read(strings.NewReader(`{"Action":"skip","Package":"p","Test":"TestMissing"}` + "\n" + `{"Action":"pass","Package":"p"}`)); err != nil {
		t.Fatal(err)
	}
	if err := r.finish(0); err == nil || !strings.HasPrefix(err.Error(), "no test ran") {
		t.Errorf("finish: got error %v", err)
	}
}

func TestUnknownClassIsRefused(t *testing.T) {
	_, err := parse([]string{"-class", "quick,slow"})
	if err == nil || !strings.Contains(err.Error(), `class "slow" unknown; want quick, exhaustive`) {
		t.Errorf("got error %v", err)
	}
	if _, err := parse([]string{"-run", "("}); err == nil || !strings.Contains(err.Error(), "missing closing )") {
		t.Errorf("invalid pattern: got error %v", err)
	}
}
