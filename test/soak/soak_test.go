package main

import (
	"regexp"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestSoak runs a soak of about 20 s, at full size one of 10 minutes.
func TestSoak(t *testing.T) {
	testclass.Soak(t)
	if runtime.GOOS != "linux" {
		t.Skip("a soak reads /proc")
	}
	var out strings.Builder
	args := []string{"-minutes", "0.3", "-every", "8s", "-engines", "12", "-seed", "1"}
	if testclass.Full() {
		args = []string{"-minutes", "10"}
	}
	err := run(t.Context(), args, &out)
	t.Logf("\n%s", &out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`(?m)^ +\d+s  batches \d+, events \d+, faults [1-9]\d*, repairs [1-9]\d*, .* ranks equal [1-9]`,
		`(?m)^subscriber reconnecting: \d+ entries, .* [1-9]\d* resumes`,
		`(?m)^matches: \d+ requests, [1-9]\d* answers compared .*, [1-9]\d* blocks`,
		`(?m)^truth: [1-9]\d* requests .* [1-9]\d* exact .* 0 wrong$`,
		`(?m)^server: rss [1-9]`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("the log has no line like %s", want)
		}
	}
}

func TestArguments(t *testing.T) {
	for _, args := range []string{"-minutes 0", "-minutes NaN", "-every 0s", "-engines 9", "-rate -1", "-rate NaN", "ten", "-hours 1"} {
		if err := run(t.Context(), strings.Fields(args), new(strings.Builder)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
	if err := run(t.Context(), []string{"-h"}, new(strings.Builder)); err != nil {
		t.Errorf("help: %v", err)
	}
}

func TestMemoryIsFlat(t *testing.T) {
	const mib = 1 << 20
	for _, tt := range []struct {
		name string
		rss  []int64
		want bool
	}{
		{"too few checks", []int64{1 * mib, 2 * mib, 900 * mib}, true},
		{"flat", []int64{10 * mib, 90 * mib, 100 * mib, 95 * mib, 99 * mib}, true},
		{"grows during the warm-up", []int64{1 * mib, 10 * mib, 100 * mib, 100 * mib, 100 * mib, 100 * mib, 100 * mib, 100 * mib}, true},
		{"within the bound", []int64{10 * mib, 100 * mib, 157 * mib, 100 * mib}, true},
		{"beyond the bound", []int64{10 * mib, 100 * mib, 158 * mib, 100 * mib}, false},
		{"beyond the bound at the end", []int64{100 * mib, 100 * mib, 110 * mib, 120 * mib, 130 * mib, 170 * mib}, false},
	} {
		if err := checkMemory(tt.rss); (err == nil) != tt.want {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
}

func TestEveryFaultHasARate(t *testing.T) {
	all, lossless := faultsOf(1, false), faultsOf(1, true)
	for _, f := range simulator.AllFaults() {
		if all.Rates[f] == 0 {
			t.Errorf("fault %v does not occur", f)
		}
	}
	if lossless.Rates[simulator.FaultLose] > 0 || lossless.Rates[simulator.FaultDrop] == 0 {
		t.Errorf("a lossless engine has lossy faults: %v", lossless.Rates)
	}
}

// TestCompareFindsADifference compares views that are equal to the engine, different, and reported
// incomplete.
func TestCompareFindsADifference(t *testing.T) {
	everyWorker := func(string) bool { return true }
	states := []state{{&engine{worker: "w", lossless: true}, map[uint64]struct{}{}}}
	c := checker.New(checker.Options{})
	if _, err := compare(c, states, everyWorker); err == nil {
		t.Error("compare before a snapshot: no error")
	}
	c = snapshotOf(t)
	if o, err := compare(c, states, everyWorker); err != nil || o.equal != 1 {
		t.Errorf("equal: got %+v, %v", o, err)
	}
	states[0].blocks[7] = struct{}{}
	if _, err := compare(c, states, everyWorker); err == nil {
		t.Error("a block is missing: no error")
	}
	if _, err := compare(c, states, func(string) bool { return false }); err != nil {
		t.Errorf("an excluded worker: got %v", err)
	}
	c = snapshotOf(t, 0)
	if o, err := compare(c, states, everyWorker); err != nil || o.incomplete != 1 || o.differ != 1 || len(o.falselyIncomplete) != 1 {
		t.Errorf("incomplete: got %+v, %v", o, err)
	}
}

// snapshotOf returns a checker that has read a snapshot of a worker without blocks.
func snapshotOf(t *testing.T, incompleteRanks ...uint32) *checker.Checker {
	t.Helper()
	c := checker.New(checker.Options{})
	if err := c.BeginSnapshot(&kvcastv1.SnapshotRequest{}); err != nil {
		t.Fatal(err)
	}
	at := &kvcastv1.Position{Epoch: "e", Seq: 1}
	for _, m := range []*kvcastv1.SnapshotResponse{
		{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "e"}},
		{SnapshotWorker: &kvcastv1.SnapshotWorker{
			Worker: "w", Added: &kvcastv1.WorkerAdded{Model: "m"}, LastEventId: 1, IncompleteRanks: incompleteRanks,
		}},
		{SnapshotEnd: &kvcastv1.SnapshotEnd{Position: at}, Position: at, PrevSeq: at.Seq},
	} {
		if err := c.ReceiveSnapshot(m); err != nil {
			t.Fatal(err)
		}
	}
	return c
}
