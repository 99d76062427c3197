package pipeline_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

var update = flag.Bool("update", false, "write the stored state that this version makes to testdata")

// goldenDir has state that version 1 has stored: checkpoints, and entries up to after them. state.txt is what they recover to.
// All later versions must read it.
const goldenDir = "testdata/state-v1"

// goldenCalls makes state of every kind.
func goldenCalls() []call {
	dedup := call{Worker: "two", Add: &feed.Worker{
		Name: "two", Model: "m", Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}, Consolidate: feed.ConsolidateDedup,
	}}
	passthrough := call{Worker: "pass", Add: &feed.Worker{
		Name: "pass", Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}, Consolidate: feed.ConsolidatePassthrough,
	}}
	announced := of("w", batch(store(1, 2), after(2, store(6)), store(1, 2)))
	announced.Batch.CopyRule = feed.CopyRuleDetected
	announced.Batch.Events[1].RawID = 5
	announced.Batch.Progress.Learned = []byte("learned")
	return []call{
		{Worker: "w", Add: &feed.Worker{
			Name: "w", Model: "m", BlockSize: 16, Endpoint: "10.0.0.5:8000", Labels: map[string]string{"zone": "a"}, Ranks: []uint32{0, 3},
		}},
		of("w", withProgress("w1", batch(store(1, 2), after(2, withLoRA("adapter", store(3))), store(1)))),
		dedup,
		of("two", withProgress("two1", batch(store(1, 2)))),
		of("two", by2(batch(named(store(1), 11)))),
		passthrough,
		of("pass", batch(store(7))),
		of("pass", by2(batch(inTier(kvblock.TierHostPinned, store(8))))),
		{Worker: "gone", Add: &feed.Worker{Name: "gone"}},
		{Worker: "gone", Remove: feed.RemovedDiscovery},
		announced,
		of("w", gap(0)),
		of("w", batch(store(2), store(2), remove(2))),
	}
}

// goldenAfter are calls after the checkpoints.
func goldenAfter() []call {
	return []call{
		of("w", batch(remove(2), store(4))),
		of("w", groupsOmitted(3, store(9))),
		of("two", by2(batch(named(store(2), 12)))),
		of("two", batch(remove(1))),
		of("two", batch(store(5))),
		of("pass", call{Gap: &feed.Gap{Source: 1, Reason: feed.GapReplayForgotten}}),
		of("pass", by2(batch(store(9)))),
		{Worker: "new", Add: &feed.Worker{Name: "new"}},
		of("new", batch(store(1))),
	}
}

// goldenState describes the lanes that the golden state recovers to.
func goldenState(p *pipeline.Pipeline) string {
	var b strings.Builder
	lanes := p.Lanes()
	for _, name := range slices.Sorted(maps.Keys(lanes)) {
		state := pipeline.StateOf(lanes[name])
		for rank, tracker := range state.Trackers {
			state.Trackers[rank] = fmt.Sprintf("%x", tracker)
		}
		state.Pending = fmt.Sprintf("%x", state.Pending)
		fmt.Fprintf(&b, "%s: %+v\n", name, state)
	}
	return b.String()
}

func TestStateOfVersion1IsRead(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	rec := pipeline.Recover(pipeline.Config{Durable: true})
	checkpoints, err := filepath.Glob(filepath.Join(goldenDir, "*.checkpoint"))
	if err != nil || len(checkpoints) == 0 {
		t.Fatalf("no checkpoints in %s: %v", goldenDir, err)
	}
	for _, name := range checkpoints {
		if err := rec.Checkpoint(readGolden(t, filepath.Base(name))); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for i, e := range readGoldenEntries(t) {
		if err := rec.Entry(uint64(i+1), e.worker, e.body, e.state); err != nil {
			t.Fatal(err)
		}
	}
	if lost := rec.Lost(); len(lost) > 0 {
		t.Errorf("lost: %v", lost)
	}
	p, err := rec.Pipeline(&nowhere{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(readGolden(t, "state.txt")), goldenState(p)); diff != "" {
		t.Errorf("recovered state (-want +got):\n%s", diff)
	}
}

func readGolden(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(goldenDir, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// readGoldenEntries returns the entries, a line each: worker, body and state.
func readGoldenEntries(t testing.TB) (entries []storedEntry) {
	t.Helper()
	for line := range strings.Lines(string(readGolden(t, "entries.txt"))) {
		var e storedEntry
		if _, err := fmt.Sscanf(line, "%s %x %x", &e.worker, &e.body, &e.state); err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	return entries
}

func writeGolden(t *testing.T) {
	t.Helper()
	r := newRecoverable(t, pipeline.Config{Timeout: pipeline.MaxBatchTimeout})
	r.play(t, goldenCalls()...)
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(goldenDir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var checkpoints [][]byte
	for _, worker := range []string{"w", "two", "pass", pipeline.RemovedWorkers} {
		checkpoints = append(checkpoints, r.checkpoint(t, worker))
		write(orRemoved(worker)+".checkpoint", checkpoints[len(checkpoints)-1])
	}
	r.play(t, goldenAfter()...)
	var b strings.Builder
	for _, e := range r.storage.entries {
		fmt.Fprintf(&b, "%s %x %x\n", e.worker, e.body, e.state)
	}
	write("entries.txt", []byte(b.String()))
	r.crash(t, 0, checkpoints...) // what has changed since the last entry of each worker is lost
	write("state.txt", []byte(goldenState(r.pipeline)))
}

// orRemoved names the checkpoint RemovedWorkers.
func orRemoved(name string) string {
	if name == pipeline.RemovedWorkers {
		return "removed"
	}
	return name
}

// FuzzRecovery recovers from invalid state: it returns errors, and a pipeline that it makes works.
func FuzzRecovery(f *testing.F) {
	entries := readGoldenEntries(f)
	for _, name := range []string{"w", "two", "pass", "removed"} {
		for _, e := range entries[len(entries)-4:] {
			f.Add(readGolden(f, name+".checkpoint"), e.body, e.state)
		}
	}
	for _, e := range entries {
		f.Add([]byte(nil), e.body, e.state)
	}
	f.Fuzz(func(t *testing.T, checkpoint, body, state []byte) {
		rec := pipeline.Recover(pipeline.Config{Durable: true, Timeout: pipeline.MaxBatchTimeout})
		_ = rec.Checkpoint(checkpoint) // an error means that nothing is restored
		for _, worker := range rec.Workers() {
			if rec.Entry(1, worker.Worker.Name, body, state) != nil {
				return
			}
		}
		if rec.Entry(2, "w", body, state) != nil {
			return
		}
		p, err := rec.Pipeline(&nowhere{})
		if err != nil {
			t.Fatal(err)
		}
		for _, worker := range rec.Workers() {
			lane := p.AddWorker(worker.Worker)
			lane.Batch(&feed.Batch{Events: []wire.Event{store(1, 2), remove(1), inTier(kvblock.TierDisk, remove(2)), cleared()}})
			lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
			if _, ok := p.Checkpoint(worker.Worker.Name, nil); !ok {
				t.Errorf("no checkpoint of %q", worker.Worker.Name)
			}
		}
		if err := p.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
